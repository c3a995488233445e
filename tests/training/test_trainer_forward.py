"""The trainer's forward over packed trees learns what TRL's padded forward learns, and what a forward a turn does."""

import copy

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support import template_matrix
from support.hybrids import ONE_OF_EACH_KIND, build_kind
from support.mixtures import build_mixture
from support.template_matrix import ASKED, Exchange, Said, tokenizer_of, turns_of, written
from support.trainers import (
    LETTERS,
    LOSS_TYPES,
    Calls,
    Length,
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
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.errors import ConfigError
from mt_grpo.rollout import ScriptedEngine

TREE, PADDED, BY_TURN = "tree", "padded", "turn_by_turn"
HALVES = {"steps_per_generation": 2, "gradient_accumulation_steps": 2}


def ids_of(tokenizer):
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    return {"vocab_size": len(tokenizer), "bos_token_id": None, **ids}


@pytest.mark.parametrize(
    "options", [{**HALVES, "per_device_train_batch_size": 8}, {"num_iterations": 2, "beta": 0.1}], ids=str
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


STRIPS = {"history": "strip_thinking"}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(("qwen3_moe", {"router_aux_loss_coef": coef, **more}) for coef in (0.0, 0.5) for more in ({}, STRIPS)),
        ("phimoe", {}),
        ("llama 4", {}),
    ],
    ids=str,
)
def test_experts_are_balanced_over_the_tokens_of_padded_rows(build, tokenizer, kind, options):
    """Experts of any name, and by default."""
    losses, gradients = [], []
    for forward in (TREE, PADDED):
        model = build_mixture(kind, len(tokenizer)) if "_" in kind else build_kind(kind, vocab_size=len(tokenizer))
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


def test_what_a_forward_cannot_do_is_refused_before_any_work(build, tokenizer):
    with pytest.raises(ConfigError, match="set `router_aux_loss_coef: 0.0`, or `forward: tree`"):
        build(model=build_mixture("qwen3_moe", len(tokenizer)), forward=BY_TURN)
    with pytest.raises(ConfigError, match="`tree_attention: flex` needs a GPU.*`tree_attention: segment`"):
        build(tree_attention="flex")


# Models that sample


@pytest.mark.parametrize("kind", ["mamba 2", "bloom"])
def test_models_without_an_end_of_context_sample(build, tokenizer, kind):
    batch(trainer := build(None, build_kind(kind, vocab_size=len(tokenizer)), max_turn_length=4))
    assert all(trajectory.turns and not trajectory.failed for trajectory in trainer.batch.trajectories)


def test_a_model_that_samples_what_it_is_not_trained_on_ends(build, tokenizer):
    model = build_kind("minimax", vocab_size=len(tokenizer))  # goes on from its cache by other numbers
    build(model=model).evaluate()  # with an engine that is given
    trainer = build(None, model)
    with pytest.raises(ConfigError, match="MiniMaxForCausalLM with rows of several lengths.*`use_vllm: true"):
        trainer.train()
    assert trainer.state.global_step == 0 and trainer.batch.trajectories == []


# Micro-batches


def test_the_rows_of_a_group_meet_in_one_micro_batch(build):
    parts = two_groups(build(**HALVES))
    assert {tuple(part["group_ids"].tolist()) for part in parts} == {(0, 0, 0, 0), (1, 1, 1, 1)}


BY_MICRO_BATCH = [{"entropy_coef": 0.5}, {"top_entropy_quantile": 0.3}]
BY_MICRO_BATCH = [{"loss_type": kind, **options} for kind in ("grpo", "dapo") for options in BY_MICRO_BATCH]
BY_MICRO_BATCH.append({"loss_type": "bnpo"})


def learnt_with(trainer, batches, loss_type, entropy_coef=0.0, top_entropy_quantile=1.0):
    """The loss and gradient of batches that a trainer has, with other options of TRL's loss."""
    trainer.loss_type, trainer.top_entropy_quantile = loss_type, top_entropy_quantile
    trainer.entropy_coef, trainer._entropy_bonus_enabled = entropy_coef, entropy_coef != 0
    return gradient(trainer, *batches)


def test_a_moved_row_changes_only_the_gradients_it_moved_between(build):
    """In which micro-batch a row comes is drawn by lot in TRL, and chosen by `forward: tree`."""
    of_halves, whole = [], []
    for forward in (TREE, PADDED):
        torch.manual_seed(0)
        of_halves.append(((trainer := build(forward=forward, **HALVES)), two_groups(trainer)))
        whole.append(((trainer := build(forward=forward)), [batch(trainer)]))
    groups = [set(part["group_ids"].tolist()) for part in of_halves[1][1]]
    assert groups == [{0, 1}, {0, 1}]  # TRL's lots: the two forwards see other micro-batches
    for options in [*({"loss_type": kind} for kind in LOSS_TYPES if kind != "bnpo"), *BY_MICRO_BATCH]:
        (loss, learnt), (other_loss, other) = (learnt_with(*each, **options) for each in of_halves)
        if options in BY_MICRO_BATCH:
            assert (learnt - other).norm() / other.norm() > 1e-3, options
            assert_near(*(learnt_with(*each, **options)[1] for each in whole))  # on one they agree
        else:
            assert_near(learnt, other)
            torch.testing.assert_close(loss, other_loss, rtol=1e-5, atol=1e-7)


# Against a forward a turn


@pytest.mark.parametrize("env_mask", [0, 1])
@pytest.mark.parametrize("history", ["strip_thinking", "compact", "template"])
def test_rewritten_histories_have_the_loss_of_a_forward_a_turn(build, history, env_mask):
    """In padded rows a trajectory whose history was rewritten has one for each of its sequences."""
    trainers = []
    for way in (BY_TURN, TREE, PADDED):
        options = {"history": history, "compact_every": 2 if history == "compact" else None}
        trainer = build(thinking, forward=way, turn_advantage_coef=0.7, **options)
        trainer.env.env_mask = env_mask
        trainers.append((trainer, inputs := [batch(trainer)]))
        assert max(len(item.tree.sequences()) for item in trainer.batch.trajectories) > 1 and "parent" in inputs[0]
    for loss_type in LOSS_TYPES:
        (expected, by_turn), *others = (learnt_with(*each, loss_type) for each in trainers)
        for loss, learnt in others:
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
            assert_near(learnt, by_turn)


ATTENTION = ("gpt-oss", "gemma 2", "granite", "bloom")


@pytest.mark.parametrize("kind", [*ONE_OF_EACH_KIND, *ATTENTION])
@pytest.mark.slow
def test_every_kind_of_layer_trains_as_turn_by_turn(build, tokenizer, tmp_path, kind):
    build_kind(kind, **ids_of(tokenizer)).save_pretrained(tmp_path / "model")
    options = {**STRIPS, "beta": 0.1, "optim": "sgd", "max_steps": 2, "router_aux_loss_coef": 0.0}
    if kind in ONE_OF_EACH_KIND:
        options["num_iterations"] = 2
    ways = {"forward": TREE, "gradient_checkpointing": kind in ONE_OF_EACH_KIND}, {"forward": BY_TURN}
    trainers = [build(thinking, str(tmp_path / "model"), **way, **options) for way in ways]
    assert_learnt_alike(trainers, "loss", "grad_norm", "entropy", "kl")
    assert [trainer.args.forward for trainer in trainers] == [TREE, BY_TURN]


@pytest.mark.slow
def test_forks_that_a_template_makes_are_trained_alike(build):
    """gpt-oss's turns end in another token once they are past, so its contexts fork under `history: keep`."""
    tokenizer, replies = tokenizer_of("gptoss"), turns_of("replies, thinking", "gptoss")
    model = build_kind("gpt-oss", **ids_of(tokenizer))

    def script(session, turn):
        return written("gptoss", "", replies[turn]._replace(words="a" * (1 + int(session[-1]))))

    given = {
        "env": Exchange("replies, thinking"),
        "train_dataset": Dataset.from_list([{"prompt": [{"role": "user", "content": ASKED}]}]),
        "engine": ScriptedEngine(tokenizer, script),
        "processing_class": tokenizer,
        "rewards": LETTERS,
    }
    options = {"max_steps": 2, "max_completion_length": 900, "router_aux_loss_coef": 0.0, "learning_rate": 1e-3}
    trainers = [
        build(model=copy.deepcopy(model), forward=forward, **given, **options) for forward in (BY_TURN, TREE, PADDED)
    ]
    assert_learnt_alike(trainers, "loss")
    assert all(each.tree.num_sequences > 1 for trainer in trainers for each in trainer.batch.trajectories)
    assert any(loss for (loss,) in logged(trainers[0], "loss"))


# Today's families with their own templates and native tools, from rollout to update


FAMILIES = {"qwen3_5_think": "qwen3.5", "gptoss": "gpt-oss", "gemma4": "gemma 4"}


@pytest.fixture
def of_family(build):
    """Makes a trainer of a small random model of a family."""

    def make(family, script, **options):
        tokenizer = tokenizer_of(family)
        own = {"gptoss": {"router_aux_loss_coef": 0.0}, "gemma4": {"vocab_size_per_layer_input": len(tokenizer)}}
        own["gemma4"] |= {"num_kv_shared_layers": 0, "num_hidden_layers": 2, "sliding_window": 64}
        own["gemma4"] |= {"layer_types": ["sliding_attention", "full_attention"]}
        tools = [template_matrix.look, template_matrix.find]
        return build(
            model=build_kind(FAMILIES[family], **ids_of(tokenizer), **own.get(family, {})),
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
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_on_native_calls_is_that_of_a_forward_a_turn(of_family, family, history):
    header = "<think>\n" if family == "qwen3_5_think" else ""

    def script(session: str, turn: int) -> str:
        number = member(session) % 4
        calls = (("look", {"city": f"Lima {number}", "days": turn}),) if turn < number else ()
        return written(family, header, Said("" if calls else f"Answer {number}.", "I think.", calls))

    losses, learnt = [], []
    for forward in (TREE, BY_TURN):
        (trainer := of_family(family, script, forward=forward, history=history)).train()
        losses += logged(trainer, "loss")
        learnt.append(torch.cat([each.detach().flatten() for each in trainer.model.parameters()]))
        (trajectory, *_) = [each for each in trainer.batch.trajectories if len(each.turns) == 4]
        assert [[call.error for call in turn.tool_calls] for turn in trajectory.turns] == [[None]] * 3 + [[]]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-6) and len(losses) == 2
    torch.testing.assert_close(*learnt, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_trained_on_what_it_sampled_natively(of_family, family):
    trainer = of_family(family, None, max_completion_length=24, temperature=1.0)
    check_log_probs(trainer, batch(trainer))
