"""The trainer's forward over packed trees learns what TRL's padded forward learns, and what a forward a turn does."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support import template_matrix
from support.architectures import build_random
from support.hybrids import ONE_OF_EACH_KIND, build_hybrid
from support.mixtures import build_mixture
from support.template_matrix import ASKED, Exchange, Said, tokenizer_of, turns_of, written
from support.trainers import (
    LOSS_TYPES,
    Calls,
    Length,
    Letters,
    assert_learnt_alike,
    assert_near,
    batch,
    check_log_probs,
    gradient,
    logged,
    member,
    thinking,
    two_groups,
)
from transformers import (
    AutoModelForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Qwen3_5TextConfig,
)

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.errors import ConfigError
from mt_grpo.rollout import ScriptedEngine

TREE, PADDED, BY_TURN = "tree", "padded", "turn_by_turn"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8},
        {"num_iterations": 2},
        {"beta": 0.1},
    ],
)
@pytest.mark.slow
def test_tree_and_padded_runs_are_the_same(build, model, tmp_path, options):
    model.save_pretrained(tmp_path / "model")
    options = {"model": str(tmp_path / "model"), "optim": "sgd", "max_steps": 3, **options}
    trainers = [build(forward=forward, **options) for forward in (TREE, PADDED, BY_TURN)]
    assert_learnt_alike(trainers, "loss", "grad_norm", "entropy", weights=True)


def test_lora_and_gradient_checkpointing_go_through_the_tree(build):
    gradients = []
    for forward in (TREE, PADDED):
        torch.manual_seed(0)
        adapter = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        trainer = build(forward=forward, peft_config=adapter)
        if forward == TREE:
            trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
            assert trainer.model.is_gradient_checkpointing
        gradients.append(gradient(trainer)[1])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


# Mixtures of experts


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3_moe", {"router_aux_loss_coef": 0.0}),
        ("qwen3_moe", {"router_aux_loss_coef": 0.5}),
        ("qwen3_moe", {"router_aux_loss_coef": 0.5, "history": "strip_thinking"}),
        ("qwen3_moe", {"router_aux_loss_coef": 0.0, "history": "strip_thinking"}),
        ("phimoe", {}),
        ("llama 4", {}),
    ],
    ids=str,
)
def test_experts_are_balanced_over_the_tokens_of_padded_rows(build, tokenizer, kind, options):
    """Experts of any name, and by default."""
    losses, gradients = [], []
    for forward in (TREE, PADDED):
        model = build_mixture(kind, len(tokenizer)) if "_" in kind else build_random(kind, vocab_size=len(tokenizer))
        trainer = build(thinking, model, forward=forward, **options)
        gradients.append(gradient(trainer)[1])
        losses += trainer._metrics["train" if trainer.model.training else "eval"].get("aux_loss", [])
    assert_near(*gradients)
    balanced = options.get("router_aux_loss_coef") != 0.0
    assert len(losses) == 2 * balanced and losses[:1] == pytest.approx(losses[1:], rel=1e-5)
    assert all(loss > 0 for loss in losses)


def test_a_granite_without_experts_balances_none(build, tokenizer):
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    layers = {"layer_types": ["attention"], "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 4}
    config = GraniteMoeHybridConfig(vocab_size=len(tokenizer), shared_intermediate_size=16, **size, **layers)
    gradient(trainer := build(model=GraniteMoeHybridForCausalLM(config)))
    assert "aux_loss" not in trainer._metrics["train"]
    with pytest.raises(ConfigError, match="`router_aux_loss_coef: 0.1` balances experts, and this model has none"):
        build(model=GraniteMoeHybridForCausalLM(config), router_aux_loss_coef=0.1)


def test_balancing_experts_is_refused_turn_by_turn(build, tokenizer):
    with pytest.raises(ConfigError, match="set `router_aux_loss_coef: 0.0`, or `forward: tree`"):
        build(model=build_mixture("qwen3_moe", len(tokenizer)), forward=BY_TURN)


# Models that sample


@pytest.mark.parametrize(("kind", "make"), [("mamba 2", build_hybrid), ("bloom", build_random)])
def test_models_without_an_end_of_context_sample(build, tokenizer, kind, make):
    batch(trainer := build(None, make(kind, vocab_size=len(tokenizer)), max_turn_length=4))
    assert all(trajectory.turns and not trajectory.failed for trajectory in trainer.batch.trajectories)


def test_a_model_that_samples_what_it_is_not_trained_on_ends(build, tokenizer):
    model = build_hybrid("minimax", vocab_size=len(tokenizer))  # goes on from its cache by other numbers
    build(model=model).evaluate()  # with an engine that is given
    trainer = build(None, model)
    problem = "MiniMaxForCausalLM with rows of several lengths is sampled.*`use_vllm: true"
    with pytest.raises(ConfigError, match=problem):
        trainer.train()
    assert trainer.state.global_step == 0 and trainer.batch.trajectories == []


def test_flex_is_refused_on_a_cpu_before_any_work(build):
    with pytest.raises(ConfigError, match="`tree_attention: flex` needs a GPU.*`tree_attention: segment`"):
        build(tree_attention="flex")


# Micro-batches


def test_the_rows_of_a_group_meet_in_one_micro_batch(build):
    parts = two_groups(build(steps_per_generation=2, gradient_accumulation_steps=2))
    assert {tuple(part["group_ids"].tolist()) for part in parts} == {(0, 0, 0, 0), (1, 1, 1, 1)}


def window(trainer):
    """Loss and gradient of one optimiser step of two micro-batches, and what each of them adds."""
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    rows = [trainer.train_dataset[number] for number in (0, 1) for _ in range(4)]
    losses = []
    for _ in range(2):
        loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(rows))
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
    for forward in (TREE, PADDED):
        trainer = build(forward=forward, steps_per_generation=2, gradient_accumulation_steps=2, **options)
        torch.manual_seed(0)
        results.append(window(trainer))
    groups = [set(part["group_ids"].tolist()) for part in trainer._buffered_inputs]
    assert groups == [{0, 1}, {0, 1}]  # TRL's lots: the two forwards see other micro-batches
    (loss, learnt), (other_loss, other) = results
    if options in BY_MICRO_BATCH:
        assert (learnt - other).norm() / other.norm() > 1e-3
        assert_near(
            *(gradient(build(forward=forward, **options))[1] for forward in (TREE, PADDED))
        )  # on one they agree
    else:
        assert_near(learnt, other)
        torch.testing.assert_close(loss, other_loss, rtol=1e-5, atol=1e-7)


# Against a forward a turn


@pytest.mark.parametrize(
    ("history", "loss_type", "env_mask", "forward"),
    [
        *(("strip_thinking", loss_type, 0, TREE) for loss_type in LOSS_TYPES),
        ("compact", "dapo", 0, TREE),
        ("template", "grpo", 0, TREE),
        ("strip_thinking", "dapo", 1, TREE),
        ("compact", "grpo", 1, TREE),
        # a trajectory whose history was rewritten is a row for each of its sequences
        ("strip_thinking", "grpo", 0, PADDED),
        ("compact", "grpo", 0, PADDED),
    ],
)
def test_rewritten_histories_have_the_loss_of_a_forward_a_turn(build, loss_type, history, env_mask, forward):
    found = []
    for way in (forward, BY_TURN):
        options = {"history": history, "compact_every": 2, "loss_type": loss_type, "turn_advantage_coef": 0.7}
        trainer = build(thinking, forward=way, **options)
        trainer.env.env_mask = env_mask
        found.append(gradient(trainer, inputs := batch(trainer)))
        assert max(len(item.tree.sequences()) for item in trainer.batch.trajectories) > 1 and "parent" in inputs
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-7)
    assert_near(found[0][1], found[1][1])


@pytest.mark.parametrize("kind", ONE_OF_EACH_KIND)
@pytest.mark.slow
def test_layers_with_a_state_train_as_turn_by_turn(build, tokenizer, tmp_path, kind):
    build_hybrid(kind, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    options = {"history": "strip_thinking", "beta": 0.1, "num_iterations": 2, "optim": "sgd", "max_steps": 3}
    options |= {"model": str(tmp_path / "model")}
    tree = build(thinking, forward=TREE, gradient_checkpointing=True, **options)
    assert_learnt_alike([tree, build(thinking, forward=BY_TURN, **options)], "loss", "grad_norm", "entropy", "kl")


@pytest.mark.parametrize("kind", ["gpt-oss", "gemma 2", "cohere 2", "granite", "llama 4", "gpt-2", "bloom"])
@pytest.mark.slow
def test_every_kind_of_attention_trains_as_turn_by_turn(build, tokenizer, tmp_path, kind):
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    build_random(kind, **tokens, eos_token_id=tokenizer.eos_token_id).save_pretrained(tmp_path / "model")
    options = {"history": "strip_thinking", "beta": 0.1, "optim": "sgd", "max_steps": 2, "router_aux_loss_coef": 0.0}
    trainers = [build(thinking, str(tmp_path / "model"), forward=forward, **options) for forward in (TREE, BY_TURN)]
    assert_learnt_alike(trainers, "loss", "grad_norm", "entropy", "kl")
    assert [trainer.args.forward for trainer in trainers] == [TREE, BY_TURN]


@pytest.mark.slow
def test_forks_that_a_template_makes_are_trained_alike(build):
    """gpt-oss's turns end in another token once they are past, so its contexts fork under `history: keep`."""
    tokenizer, replies = tokenizer_of("gptoss"), turns_of("replies, thinking", "gptoss")
    model = build_random("gpt-oss", **tokens_of(tokenizer))

    def script(session, turn):
        return written("gptoss", "", replies[turn]._replace(words="a" * (1 + int(session[-1]))))

    given = {
        "env": Exchange("replies, thinking"),
        "train_dataset": Dataset.from_list([{"prompt": [{"role": "user", "content": ASKED}]}]),
        "engine": ScriptedEngine(tokenizer, script),
        "processing_class": tokenizer,
    }
    options = {"max_steps": 2, "max_completion_length": 900, "router_aux_loss_coef": 0.0, "learning_rate": 1e-3}
    trainers = [
        build(model=copy.deepcopy(model), rewards=((), (Letters(),)), forward=forward, **given, **options)
        for forward in (BY_TURN, TREE, PADDED)
    ]
    assert_learnt_alike(trainers, "loss")
    assert all(each.tree.num_sequences > 1 for trainer in trainers for each in trainer.batch.trajectories)
    assert any(loss for (loss,) in logged(trainers[0], "loss"))


# Today's families with their own templates and native tools, from rollout to update


def tokens_of(tokenizer):
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    return {"vocab_size": len(tokenizer), "bos_token_id": None, **ids}


SIZE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}
CONFIGS = {
    "qwen3_5_think": lambda **tokens: Qwen3_5TextConfig(
        **SIZE,
        **tokens,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "gptoss": lambda **tokens: GptOssConfig(
        **SIZE,
        **tokens,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        router_aux_loss_coef=0.0,
    ),
    "gemma4": lambda **tokens: Gemma4TextConfig(
        **SIZE,
        **tokens,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=64,
        vocab_size_per_layer_input=tokens["vocab_size"],
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=0,
        global_head_dim=8,
    ),
}


@pytest.fixture
def of_family(build):
    """Makes a trainer of a small random model of a family."""

    def make(family, script, **options):
        torch.manual_seed(0)
        tokenizer, tools = tokenizer_of(family), [template_matrix.look, template_matrix.find]
        return build(
            model=AutoModelForCausalLM.from_config(CONFIGS[family](**tokens_of(tokenizer))),
            env=MultiTurnToolEnv(tools, protocol="native", max_steps=3),
            rewards=((Calls(),), (Length(),)),
            train_dataset=Dataset.from_list([{"prompt": "What is the weather?"}] * 4),
            engine=ScriptedEngine(tokenizer, script) if script else None,
            processing_class=tokenizer,
            **{"max_completion_length": 600, "max_steps": 1, "advantage_estimator": None, **options},
        )

    return make


@pytest.mark.slow
@pytest.mark.parametrize("history", ["keep", "template"])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_step_on_native_calls_is_that_of_a_forward_a_turn(of_family, family, history):
    header = "<think>\n" if family == "qwen3_5_think" else ""

    def script(session: str, turn: int) -> str:
        number = member(session) % 4
        calls = (("look", {"city": f"Lima {number}", "days": turn}),) if turn < number else ()
        return written(family, header, Said("" if calls else f"Answer {number}.", "I think.", calls))

    found = []
    for forward in (TREE, BY_TURN):
        trainer = of_family(family, script, forward=forward, history=history)
        trainer.train()
        found.append(
            (logged(trainer, "loss"), torch.cat([each.detach().flatten() for each in trainer.model.parameters()]))
        )
        (trajectory, *_) = [each for each in trainer.batch.trajectories if len(each.turns) == 4]
        assert [[call.error for call in turn.tool_calls] for turn in trajectory.turns] == [[None]] * 3 + [[]]
    assert found[0][0] == [pytest.approx(loss, rel=1e-4, abs=1e-6) for loss in found[1][0]]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_is_trained_on_what_it_sampled_natively(of_family, family):
    trainer = of_family(family, None, max_completion_length=24, temperature=1.0)
    check_log_probs(trainer, batch(trainer))
