"""The trainer's forward over packed trees learns what TRL's padded forward learns."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support.architectures import build_random
from support.hybrids import ONE_OF_EACH_KIND, build_hybrid
from support.models import CPU_RUN
from support.template_matrix import ASKED, Exchange, tokenizer_of, turns_of, written
from support.trainers import LOSS_TYPES, Letters, batch, conversation
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from mt_grpo.errors import ConfigError
from mt_grpo.rollout import ScriptedEngine
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer

LAYOUTS = [
    {},
    {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8},
    {"num_iterations": 2},
    {"beta": 0.1},
]


@pytest.mark.parametrize("options", LAYOUTS)
@pytest.mark.slow
def test_tree_and_padded_runs_are_the_same(build, model, tmp_path, options):
    model.save_pretrained(tmp_path / "model")
    runs = []
    for forward in ("tree", "padded", "turn_by_turn"):
        trainer = build(model=str(tmp_path / "model"), forward=forward, optim="sgd", max_steps=3, **options)
        torch.manual_seed(0)
        trainer.train()
        logged = [row for row in trainer.state.log_history if "loss" in row]
        runs.append(([[row["loss"], row["grad_norm"], row["entropy"]] for row in logged], trainer.model))
    for other in (1, 2):
        torch.testing.assert_close(torch.tensor(runs[0][0]), torch.tensor(runs[other][0]), rtol=1e-4, atol=1e-6)
        for a, b in zip(runs[0][1].parameters(), runs[other][1].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.slow
def test_every_loss_type_has_the_same_loss_and_gradient(build, loss_type):
    losses, gradients = [], []
    for forward in ("tree", "padded"):
        trainer = build(forward=forward, loss_type=loss_type)
        loss = trainer.compute_loss(trainer.model, batch(trainer))
        loss.backward()
        losses.append(loss.detach())
        gradients.append([parameter.grad for parameter in trainer.model.parameters()])
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-7)
    tree, padded = (torch.cat([gradient.flatten() for gradient in run]) for run in gradients)
    assert (tree - padded).norm() <= 1e-5 * padded.norm()


def test_lora_and_gradient_checkpointing_go_through_the_tree(build):
    gradients = []
    for forward in ("tree", "padded"):
        torch.manual_seed(0)
        adapter = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        trainer = build(forward=forward, peft_config=adapter)
        if forward == "tree":
            trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
            assert trainer.model.is_gradient_checkpointing
        trainer.compute_loss(trainer.model, batch(trainer)).backward()
        gradients.append([p.grad for p in trainer.model.parameters() if p.requires_grad])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("history", ["keep", "strip_thinking"])
@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_experts_are_balanced_over_the_tokens_of_padded_rows(build, tokenizer, tmp_path, coefficient, history):
    def script(session, turn):
        return "<think>well</think>" + conversation(session, turn)

    size = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": len(tokenizer)}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, **size, **heads))
    model.save_pretrained(tmp_path / "model")
    losses, gradients = [], []
    for forward in ("tree", "padded"):
        options = {"forward": forward, "router_aux_loss_coef": coefficient, "history": history}
        trainer = build(script, model=str(tmp_path / "model"), **options)
        trainer.compute_loss(trainer.model, batch(trainer)).backward()
        losses += trainer._metrics["eval" if not trainer.model.training else "train"].get("aux_loss", [])
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[1].norm()
    assert len(losses) == 2 * (coefficient > 0) and losses[:1] == pytest.approx(losses[1:], rel=1e-5)


@pytest.mark.parametrize("kind", ["phimoe", "llama 4"])
def test_experts_of_any_name_are_balanced_by_default(build, tokenizer, kind):
    losses, gradients = [], []
    for forward in ("tree", "padded"):
        trainer = build(model=build_random(kind, vocab_size=len(tokenizer)), forward=forward)
        trainer.compute_loss(trainer.model, batch(trainer)).backward()
        losses += trainer._metrics["eval" if not trainer.model.training else "train"]["aux_loss"]
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[1].norm()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0] > 0


def test_a_granite_without_experts_balances_none(build, tokenizer):
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    layers = {"layer_types": ["attention"], "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 4}
    config = GraniteMoeHybridConfig(vocab_size=len(tokenizer), shared_intermediate_size=16, **size, **layers)
    trainer = build(model=GraniteMoeHybridForCausalLM(config))
    trainer.compute_loss(trainer.model, batch(trainer)).backward()
    assert "aux_loss" not in trainer._metrics["train"]
    with pytest.raises(ConfigError, match="`router_aux_loss_coef: 0.1` balances experts, and this model has none"):
        build(model=GraniteMoeHybridForCausalLM(config), router_aux_loss_coef=0.1)


@pytest.mark.parametrize("kind", ["mamba 2", "bloom"])
def test_models_without_an_end_of_context_sample(build, tokenizer, kind):
    models = {"mamba 2": build_hybrid, "bloom": build_random}
    trainer = build(None, models[kind](kind, vocab_size=len(tokenizer)), max_turn_length=4)
    batch(trainer)
    assert all(trajectory.turns and not trajectory.failed for trajectory in trainer.batch.trajectories)


def test_a_model_that_samples_what_it_is_not_trained_on_ends(build, tokenizer):
    model = build_hybrid("minimax", vocab_size=len(tokenizer))  # goes on from its cache by other numbers
    build(model=model).evaluate()  # with an engine that is given
    trainer = build(None, model)
    with pytest.raises(
        ConfigError, match="MiniMaxForCausalLM with rows of several lengths is sampled.*`use_vllm: true"
    ):
        trainer.train()
    assert trainer.state.global_step == 0 and trainer.batch.trajectories == []


def test_balancing_experts_is_refused_turn_by_turn(build, tokenizer):
    size = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": len(tokenizer)}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, **size, **heads))
    with pytest.raises(ConfigError, match="set `router_aux_loss_coef: 0.0`, or `forward: tree`"):
        build(model=model, forward="turn_by_turn")


def test_flex_is_refused_on_a_cpu_before_any_work(build):
    with pytest.raises(ConfigError, match="`tree_attention: flex` needs a GPU.*`tree_attention: segment`"):
        build(tree_attention="flex")


def test_the_rows_of_a_group_meet_in_one_micro_batch(build):
    trainer = build(steps_per_generation=2, gradient_accumulation_steps=2)
    trainer.current_gradient_accumulation_steps = 2
    rows = [trainer.train_dataset[number] for number in (0, 1) for _ in range(4)]
    trainer.model.train()
    trainer._prepare_inputs(rows)
    assert sorted(set(map(tuple, (part["group_ids"].tolist() for part in trainer._buffered_inputs)))) == [
        (0, 0, 0, 0),
        (1, 1, 1, 1),
    ]


def window(trainer):
    """Loss and gradient of one optimiser step of two micro-batches, and what each of them adds."""
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    rows = [trainer.train_dataset[number] for number in (0, 1) for _ in range(4)]
    losses = []
    for _ in range(2):
        inputs = trainer._prepare_inputs(rows)
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        losses.append(loss.detach())
        trainer._step += 1
    return sum(losses), torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])


BY_MICRO_BATCH = [
    {"loss_type": "bnpo"},
    *({"loss_type": loss_type, "entropy_coef": 0.5} for loss_type in ("grpo", "dapo")),
    *({"loss_type": loss_type, "top_entropy_quantile": 0.3} for loss_type in ("grpo", "dapo")),
]


@pytest.mark.parametrize(
    "options", [*({"loss_type": kind} for kind in LOSS_TYPES if kind != "bnpo"), *BY_MICRO_BATCH], ids=str
)
@pytest.mark.slow
def test_a_moved_row_changes_only_the_gradients_it_moved_between(build, options):
    """In which micro-batch a row comes is drawn by lot in TRL, and chosen by `forward: tree`."""
    results = []
    for forward in ("tree", "padded"):
        trainer = build(forward=forward, steps_per_generation=2, gradient_accumulation_steps=2, **options)
        torch.manual_seed(0)
        results.append(window(trainer))
    groups = [set(part["group_ids"].tolist()) for part in trainer._buffered_inputs]
    assert groups == [{0, 1}, {0, 1}]  # TRL's lots: the two forwards see other micro-batches
    (loss, gradient), (other_loss, other) = results
    distance = (gradient - other).norm() / other.norm()
    if options in BY_MICRO_BATCH:
        assert distance > 1e-3
    else:
        assert distance <= 1e-5
        torch.testing.assert_close(loss, other_loss, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", BY_MICRO_BATCH, ids=str)
def test_on_one_micro_batch_these_have_trl_gradients_too(build, options):
    gradients = []
    for forward in ("tree", "padded"):
        trainer = build(forward=forward, **options)
        trainer.compute_loss(trainer.model, batch(trainer)).backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[1].norm()


@pytest.mark.parametrize(
    ("history", "loss_type", "env_mask"),
    [
        *(("strip_thinking", loss_type, 0) for loss_type in LOSS_TYPES),
        ("compact", "dapo", 0),
        ("template", "grpo", 0),
        ("strip_thinking", "dapo", 1),
        ("compact", "grpo", 1),
    ],
)
def test_rewritten_histories_have_the_loss_of_a_forward_a_turn(build, loss_type, history, env_mask):
    def script(session, turn):
        return "<think>well</think>" + conversation(session, turn)

    options = {"history": history, "compact_every": 2, "loss_type": loss_type, "turn_advantage_coef": 0.7}
    trainer = build(script, **options)
    trainer.env.env_mask = env_mask
    inputs = batch(trainer)
    assert max(len(item.tree.sequences()) for item in trainer.batch.trajectories) > 1
    trainer.compute_loss(trainer.model, inputs).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])

    oracle = build(script, **{**options, "forward": "turn_by_turn"})
    oracle.env.env_mask = env_mask
    oracle.compute_loss(oracle.model, batch(oracle)).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in oracle.model.parameters()])
    assert (gradient - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("kind", ONE_OF_EACH_KIND)
@pytest.mark.slow
def test_layers_with_a_state_train_as_turn_by_turn(build, tokenizer, tmp_path, kind):
    def script(session, turn):
        return "<think>well</think>" + conversation(session, turn)

    build_hybrid(kind, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    options = {"history": "strip_thinking", "beta": 0.1, "num_iterations": 2, "optim": "sgd", "max_steps": 3}
    runs = []
    for forward, checkpointing in (("tree", True), ("turn_by_turn", False)):
        trainer = build(
            script,
            model=str(tmp_path / "model"),
            forward=forward,
            gradient_checkpointing=checkpointing,
            **options,
        )
        trainer.train()
        logged = [row for row in trainer.state.log_history if "loss" in row]
        runs.append(torch.tensor([[row["loss"], row["grad_norm"], row["entropy"], row["kl"]] for row in logged]))
    assert len(runs[0]) == 3
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("history", ["strip_thinking", "compact"])
def test_padded_rows_have_the_loss_of_a_forward_a_turn(build, history):
    """A trajectory whose history was rewritten is a row for each of its sequences."""

    def script(session, turn):
        return "<think>well</think>" + conversation(session, turn)

    losses, gradients = [], []
    for forward in ("padded", "turn_by_turn"):
        trainer = build(script, history=history, compact_every=2, forward=forward)
        inputs = batch(trainer)
        assert "parent" in inputs
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        losses.append(loss.detach())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()]))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-7)
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[1].norm()


@pytest.mark.parametrize("kind", ["gpt-oss", "gemma 2", "cohere 2", "granite", "llama 4", "gpt-2", "bloom"])
@pytest.mark.slow
def test_every_kind_of_attention_trains_as_turn_by_turn(build, tokenizer, tmp_path, kind):
    def script(session, turn):
        return "<think>well</think>" + conversation(session, turn)

    tokens = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    build_random(kind, **tokens, eos_token_id=tokenizer.eos_token_id).save_pretrained(tmp_path / "model")
    runs = []
    for forward in ("tree", "turn_by_turn"):
        options = {"history": "strip_thinking", "beta": 0.1, "optim": "sgd", "max_steps": 3}
        trainer = build(script, model=str(tmp_path / "model"), forward=forward, router_aux_loss_coef=0.0, **options)
        trainer.train()
        assert trainer.args.forward == forward
        logged = [row for row in trainer.state.log_history if "loss" in row]
        runs.append(torch.tensor([[row["loss"], row["grad_norm"], row["entropy"], row["kl"]] for row in logged]))
    assert len(runs[0]) == 3
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_forks_that_a_template_makes_are_trained_alike(tmp_path):
    """gpt-oss's turns end in another token once they are past, so its contexts fork under `history: keep`."""
    tokenizer, replies = tokenizer_of("gptoss"), turns_of("replies, thinking", "gptoss")
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    model = build_random("gpt-oss", **tokens, eos_token_id=tokenizer.eos_token_id)

    def script(session, turn):
        words = "a" * (1 + int(session[-1]))
        return written("gptoss", "", replies[turn]._replace(words=words))

    losses = {}
    for forward in ("tree", "padded", "turn_by_turn"):
        args = MTGRPOConfig(
            str(tmp_path / forward),
            **CPU_RUN,
            forward=forward,
            max_steps=3,
            max_completion_length=900,
            router_aux_loss_coef=0.0,
            learning_rate=1e-3,
        )
        trainer = MTGRPOEnvTrainer(
            copy.deepcopy(model),
            Exchange("replies, thinking"),
            [],
            [Letters()],
            args,
            Dataset.from_list([{"prompt": [{"role": "user", "content": ASKED}]}]),
            engine=ScriptedEngine(tokenizer, script),
            processing_class=tokenizer,
        )
        trainer.train()
        assert all(trajectory.tree.num_sequences > 1 for trajectory in trainer.batch.trajectories)
        losses[forward] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert any(losses["tree"])
    assert losses["padded"] == pytest.approx(losses["turn_by_turn"], abs=1e-6)
    assert losses["tree"] == pytest.approx(losses["turn_by_turn"], abs=1e-6)
