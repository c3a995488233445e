"""What top_k, top_p and min_p leave to be sampled is what is trained: values, gradients and ratios."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.forests import FOREST, distance, make_tree, measure, truncations
from support.models import CPU_RUN, build_model, lookup
from support.sampling import truncated
from support.trainers import Length, Spelling

from mt_grpo.forward import lm_head as head
from mt_grpo.forward.lm_head import Truncation, chunked_logps
from mt_grpo.rollout.engines.transformers import TransformersEngine
from mt_grpo.training import ConfigError, MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.training.forward_plan import read_truncation

TRUNCATIONS = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "min_p and top_p": {"min_p": 0.3, "top_p": 0.7},
    "all": {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
}
every_truncation = pytest.mark.parametrize("options", TRUNCATIONS.values(), ids=TRUNCATIONS)


@settings(deadline=None)
@given(st.integers(0, 2**31), truncations)
def test_the_tokens_left_are_those_of_the_definition(seed, truncation):
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    best = logits.argmax(dim=1)
    for row, ours in zip(logits, truncation.apply(logits, best).softmax(dim=1), strict=True):
        options = {**vars(truncation), "top_k": min(truncation.top_k, 50)}
        torch.testing.assert_close(ours, truncated(row, [], **options))


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_k": 2, "top_p": 0.9}, {"top_p": 0.6}, {"min_p": 1.0}])
def test_a_tie_with_the_last_token_left_is_left_too(options):
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    ours = Truncation(**options).apply(logits, torch.tensor([1])).softmax(dim=1)
    torch.testing.assert_close(ours, torch.tensor([[0, 1, 1, 1, 0]]) / 3)


def test_a_sampled_token_is_left_whatever_rounding_says():
    logits = torch.tensor([[2.0, 1.0, 0.9999999]])
    logps = Truncation(top_k=2).apply(logits, torch.tensor([2])).log_softmax(dim=1)
    torch.testing.assert_close(logps, logits.log_softmax(dim=1))
    states = torch.eye(3)[:1].requires_grad_()
    ours, entropy = chunked_logps(
        states, logits.T @ torch.eye(3)[:1], None, torch.tensor([2]), 1.0, Truncation(top_k=2)
    )
    torch.testing.assert_close(ours, logps[:, 2])
    (ours + entropy).sum().backward()
    assert states.grad.isfinite().all()


# The output layer


def problem():
    torch.manual_seed(0)
    inputs = [torch.randn(37, 6), 2 * torch.randn(50, 6), torch.randn(50)]
    return [tensor.double() for tensor in inputs], torch.randint(50, (37,))  # labels within and without what is left


@pytest.mark.parametrize("options", [{}, *TRUNCATIONS.values()], ids=["none", *TRUNCATIONS])
@pytest.mark.parametrize("elements", [1, 2**24], ids=["many chunks", "one chunk"])
@pytest.mark.parametrize("uses", ["logps", "entropies", "both"])
def test_the_head_is_log_softmax_and_entropy_of_the_tokens_left(monkeypatch, elements, uses, options):
    monkeypatch.setitem(head.CHUNK_ELEMENTS, "cpu", elements)
    inputs, labels = problem()

    def value(logps, entropies):
        weights = torch.linspace(-1, 1, 37, dtype=torch.float64)
        return (logps * weights).sum() * (uses != "entropies") + (entropies * weights).cos().sum() * (uses != "logps")

    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    logits = (leaves[0] @ leaves[1].T + leaves[2]) / 0.7
    left = torch.stack([truncated(row, [], **options) > 0 for row in logits.detach()])
    left.scatter_(1, labels[:, None], True)
    plain = logits.masked_fill(~left, -torch.inf).log_softmax(dim=-1)
    entropies = -(plain.exp() * plain.masked_fill(~left, 0.0)).sum(dim=1)
    expected = plain.gather(1, labels[:, None])[:, 0], entropies
    oracle = torch.autograd.grad(value(*expected), leaves)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    ours = chunked_logps(*leaves, labels, 0.7, Truncation(**options) if options else None)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(torch.autograd.grad(value(*ours), leaves), oracle)


@every_truncation
def test_the_gradient_of_the_head_is_the_slope_of_its_values(options):
    (inputs, labels), truncation = problem(), Truncation(**options)
    leaves = [inputs[0][:5].requires_grad_(), *(tensor.requires_grad_() for tensor in inputs[1:])]
    # a second backward makes the logits again, which may round otherwise
    options = {"nondet_tol": 1e-12, "check_undefined_grad": False}
    torch.autograd.gradcheck(lambda *leaves: chunked_logps(*leaves, labels[:5], 0.7, truncation), leaves, **options)


@every_truncation
def test_the_head_in_float32_is_that_in_float64(options):
    inputs, labels = problem()
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
        logps, entropies = chunked_logps(*leaves, labels, 0.7, Truncation(**options))
        results.append((logps, entropies, *torch.autograd.grad((logps * entropies).sum(), leaves)))
    for single, double in zip(*results, strict=True):
        torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-4)


# Every forward


def test_truncated_log_probs_differ_from_those_of_all_tokens(shared_model):
    trees = [make_tree(timesteps) for timesteps in FOREST]
    values = [measure(shared_model, trees, truncation=cut)[0] for cut in (None, Truncation(top_k=5))]
    assert distance(*values) > 0.1


# A run


@pytest.fixture
def build(tmp_path, tokenizer, questions):
    def build(model=None, **options):
        sampled = build_model(tokenizer)
        options = {"max_completion_length": 400, "max_steps": 1, "use_vllm": True, **CPU_RUN, **options}
        trainer = MTGRPOEnvTrainer(
            model or sampled,
            Spelling([lookup], protocol="learnt_tags", max_steps=2),
            [],
            [Length()],
            MTGRPOConfig(str(tmp_path), **options),
            train_dataset=questions,
            engine=TransformersEngine(sampled, tokenizer),
            processing_class=tokenizer,
        )
        batches = []
        loss = trainer.compute_loss
        trainer.compute_loss = lambda model, inputs, **others: batches.append(inputs) or loss(model, inputs, **others)
        return trainer, batches

    return build


@every_truncation
@pytest.mark.parametrize("forward", ["tree", "turn_by_turn"])
def test_what_the_engine_sampled_has_a_ratio_of_one(build, forward, options):
    trainer, batches = build(forward=forward, temperature=0.8, **options)
    trainer.train()
    (batch,) = batches
    assert trainer.args.vllm_importance_sampling_mode == "sequence_mask"
    torch.testing.assert_close(batch["importance_sampling_ratio"], torch.ones(4, 1), rtol=1e-4, atol=0.0)
    trained = (batch["completion_mask"] * batch["tool_mask"]).bool()
    difference = batch["old_per_token_logps"] - batch["sampling_per_token_logps"]
    assert difference[trained].abs().max() <= 1e-4 and batch["turn_ids"][trained].max() >= 1


def test_a_reference_equal_to_the_policy_is_at_no_distance(build, model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    trainer, batches = build(model=str(tmp_path / "model"), top_p=0.8, beta=0.1)
    trainer.train()
    (batch,) = batches
    torch.testing.assert_close(batch["ref_per_token_logps"], batch["old_per_token_logps"], rtol=0.0, atol=1e-6)
    logged = {name: value for row in trainer.state.log_history for name, value in row.items()}
    assert abs(float(logged["kl"])) <= 1e-6


def test_the_entropy_shown_is_of_what_can_be_sampled(build):
    trainer, _ = build(top_k=3)
    trainer.train()
    logged = {name: value for row in trainer.state.log_history for name, value in row.items()}
    assert 0 < float(logged["entropy"]) <= torch.tensor(3.0).log().item() + 1e-6


INEXACT = [
    ({"repetition_penalty": 1.2}, "`repetition_penalty: 1.2` changes what is sampled", "leave it out"),
    ({"top_p": 0.9, "forward": "padded"}, "`top_p: 0.9` changes what is sampled", "set `forward: tree`"),
    (
        {"repetition_penalty": 1.2, "top_k": 3, "forward": "padded"},
        "`repetition_penalty: 1.2` with `top_k: 3` changes",
        "leave them out",
    ),
]


@pytest.mark.parametrize(("options", "what", "mend"), INEXACT)
@pytest.mark.parametrize("mode", ["sequence_mask", "sequence_truncate"])
def test_sampling_that_training_cannot_follow_is_refused(build, options, what, mend, mode):
    with pytest.raises(ConfigError, match=f"^{what}.*`vllm_importance_sampling_mode: {mode}`.*: {mend}"):
        build(vllm_importance_sampling_mode=mode, **options)


@pytest.mark.parametrize(
    ("options", "what", "mend"),
    [
        ({**options, **others}, what, mend)
        for (options, what, mend), others in zip(
            INEXACT,
            [
                {"vllm_importance_sampling_mode": "token_truncate"},
                {"vllm_importance_sampling_correction": False},
                {"use_vllm": False},
            ],
            strict=True,
        )
    ],
)
def test_sampling_that_training_cannot_follow_is_said_once(build, caplog, options, what, mend):
    with caplog.at_level(logging.WARNING, "mt_grpo.training.forward_plan"):
        trainer, _ = build(**options)
        trainer.train()
    name = "mt_grpo.training.forward_plan"
    (message,) = [record.getMessage() for record in caplog.records if record.name == name]
    assert message.startswith(what) and mend in message


@pytest.mark.parametrize("options", [{}, {"forward": "padded"}, {"top_k": 3}, {"top_k": -1, "forward": "padded"}])
def test_sampling_that_training_follows_is_not_talked_about(build, caplog, options):
    with caplog.at_level(logging.WARNING, "mt_grpo.training.forward_plan"):
        trainer, _ = build(**options)
    assert not [record for record in caplog.records if record.name == "mt_grpo.training.forward_plan"]
    assert (read_truncation(trainer.args) is None) == (options.get("top_k", 0) <= 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.0}, "`top_p` is 0.0; set a number above 0 and at most 1"),
        ({"top_p": 1.5}, "`top_p` is 1.5"),
        ({"min_p": -0.1}, "`min_p` is -0.1; set a number from 0 to 1"),
    ],
)
def test_a_bound_out_of_range_is_refused(build, options, message):
    with pytest.raises(ConfigError, match=message):
        build(**options)
