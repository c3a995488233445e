"""What top_k, top_p and min_p leave to be sampled is what is trained: values, gradients and ratios."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.forests import truncations
from support.models import build_model, lookup
from support.sampling import truncated
from support.trainers import Length, Spelling, logged, trained_tokens

from mt_grpo.forward import lm_head as head
from mt_grpo.forward.lm_head import Truncation, chunked_logps
from mt_grpo.rollout.engines.transformers import TransformersEngine
from mt_grpo.training import ConfigError
from mt_grpo.training.forward_plan import _read_truncation

TRUNCATIONS = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "min_p and top_p": {"min_p": 0.3, "top_p": 0.7},
    "all": {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
}


@settings(deadline=None)
@given(st.integers(0, 2**31), truncations)
def test_the_tokens_left_are_those_of_the_definition(seed, truncation):
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    best = logits.argmax(dim=1)
    for row, ours in zip(logits, truncation.apply(logits, best).softmax(dim=1), strict=True):
        options = {**vars(truncation), "top_k": min(truncation.top_k, 50)}
        torch.testing.assert_close(ours, truncated(row, [], **options))


@pytest.mark.parametrize(
    "options", [{"top_p": 0.0}, {"top_p": float("nan")}, {"min_p": 1.5}, {"min_p": -0.1}], ids=str
)
def test_a_truncation_that_leaves_nothing_or_too_much_is_refused(options):
    with pytest.raises(ConfigError, match="set `top_p` to a number above 0 and at most 1, and `min_p` from 0 to 1"):
        Truncation(**options)


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_k": 2, "top_p": 0.9}, {"top_p": 0.6}, {"min_p": 1.0}])
def test_a_tie_with_the_last_token_left_is_left_too(options):
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    ours = Truncation(**options).apply(logits, torch.tensor([1])).softmax(dim=1)
    torch.testing.assert_close(ours, torch.tensor([[0, 1, 1, 1, 0]]) / 3)


def test_a_sampled_token_is_left_whatever_rounding_says():
    logits, label, cut = torch.tensor([[2.0, 1.0, 0.9999999]]), torch.tensor([2]), Truncation(top_k=2)
    logps = cut.apply(logits, label).log_softmax(dim=1)
    torch.testing.assert_close(logps, logits.log_softmax(dim=1))
    states = torch.eye(3)[:1].requires_grad_()
    ours, entropy = chunked_logps(states, logits.T @ torch.eye(3)[:1], None, label, 1.0, cut)
    torch.testing.assert_close(ours, logps[:, 2])
    (ours + entropy).sum().backward()
    assert states.grad.isfinite().all()


# The output layer


def problem(dtype=torch.float64):
    torch.manual_seed(0)
    inputs = torch.randn(37, 6), 2 * torch.randn(50, 6), torch.randn(50)
    labels = torch.randint(50, (37,))  # within and without what is left
    return [tensor.to(dtype).requires_grad_() for tensor in inputs], labels


@pytest.mark.parametrize("options", [{}, *TRUNCATIONS.values()], ids=["none", *TRUNCATIONS])
@pytest.mark.parametrize("elements", [1, 2**24], ids=["many chunks", "one chunk"])
@pytest.mark.parametrize("uses", ["logps", "entropies", "both"])
def test_the_head_is_log_softmax_and_entropy_of_the_tokens_left(monkeypatch, elements, uses, options):
    monkeypatch.setitem(head.CHUNK_ELEMENTS, "cpu", elements)
    leaves, labels = problem()

    def learnt(logps, entropies):
        weights = torch.linspace(-1, 1, 37, dtype=torch.float64)
        values = {"logps": (logps * weights).sum(), "entropies": (entropies * weights).cos().sum()}
        return torch.autograd.grad(values[uses] if uses in values else sum(values.values()), leaves)

    logits = (leaves[0] @ leaves[1].T + leaves[2]) / 0.7
    left = torch.stack([truncated(row, [], **options) > 0 for row in logits.detach()])
    left.scatter_(1, labels[:, None], True)
    plain = logits.masked_fill(~left, -torch.inf).log_softmax(dim=-1)
    entropies = -(plain.exp() * plain.masked_fill(~left, 0.0)).sum(dim=1)
    expected = plain.gather(1, labels[:, None])[:, 0], entropies
    ours = chunked_logps(*leaves, labels, 0.7, Truncation(**options) if options else None)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(learnt(*ours), learnt(*expected))


@pytest.mark.parametrize("options", TRUNCATIONS.values(), ids=TRUNCATIONS)
def test_the_head_in_float32_is_that_in_float64(options):
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves, labels = problem(dtype)
        logps, entropies = chunked_logps(*leaves, labels, 0.7, Truncation(**options))
        results.append((logps, entropies, *torch.autograd.grad((logps * entropies).sum(), leaves)))
    for single, double in zip(*results, strict=True):
        torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-4)


# A run


@pytest.fixture
def sampled(build, tokenizer):
    """A trainer on what another engine samples of a model like its own, and the batches of its loss."""

    def make(model=None, **options):
        policy, batches = build_model(tokenizer), []
        engine = TransformersEngine(policy, tokenizer)
        env = Spelling([lookup], protocol="learnt_tags", max_steps=2)
        options = {"max_steps": 1, "use_vllm": True, "advantage_estimator": None, **options}
        trainer = build(None, model or policy, ([], [Length()]), env=env, engine=engine, **options)
        loss = trainer.compute_loss
        trainer.compute_loss = lambda model, inputs, **others: batches.append(inputs) or loss(model, inputs, **others)
        return trainer, batches

    return make


@pytest.mark.parametrize("options", TRUNCATIONS.values(), ids=TRUNCATIONS)
@pytest.mark.parametrize("forward", ["tree", "turn_by_turn"])
def test_what_the_engine_sampled_has_a_ratio_of_one(sampled, forward, options):
    trainer, batches = sampled(forward=forward, temperature=0.8, **options)
    trainer.train()
    (batch,) = batches
    assert trainer.args.vllm_importance_sampling_mode == "sequence_mask"
    torch.testing.assert_close(batch["importance_sampling_ratio"], torch.ones(4, 1), rtol=1e-4, atol=0.0)
    difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[trained_tokens(batch)]
    assert difference.abs().max() <= 1e-4 and batch["turn_ids"][trained_tokens(batch)].max() >= 1


def test_a_reference_equal_to_the_policy_is_at_no_distance(sampled, model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    trainer, batches = sampled(str(tmp_path / "model"), top_p=0.8, beta=0.1)
    trainer.train()
    (batch,) = batches
    torch.testing.assert_close(batch["ref_per_token_logps"], batch["old_per_token_logps"], rtol=0.0, atol=1e-6)
    assert abs(logged(trainer, "kl")[0][0]) <= 1e-6


def test_the_entropy_shown_is_of_what_can_be_sampled(sampled):
    trainer, _ = sampled(top_k=3)
    trainer.train()
    assert 0 < logged(trainer, "entropy")[0][0] <= torch.tensor(3.0).log().item() + 1e-6


PENALTY, PADDED = {"repetition_penalty": 1.2}, {"forward": "padded"}
INEXACT = [
    (PENALTY, "`repetition_penalty: 1.2` changes what is sampled", "leave it out"),
    (PADDED | {"top_p": 0.9}, "`top_p: 0.9` changes what is sampled", "set `forward: tree`"),
    (PADDED | PENALTY | {"top_k": 3}, "`repetition_penalty: 1.2` with `top_k: 3` changes", "leave them out"),
]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            (options | {"vllm_importance_sampling_mode": mode}, f"^{what}.*`vllm_imp.*_mode: {mode}`.*: {mend}")
            for options, what, mend in INEXACT
            for mode in ("sequence_mask", "sequence_truncate")
        ),
        ({"top_p": 0.0}, "`top_p` is 0.0; set a number above 0 and at most 1"),
        ({"top_p": 1.5}, "`top_p` is 1.5"),
        ({"min_p": -0.1}, "`min_p` is -0.1; set a number from 0 to 1"),
    ],
)
def test_sampling_that_training_cannot_follow_is_refused(sampled, options, message):
    with pytest.raises(ConfigError, match=message):
        sampled(**options)


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "mt_grpo.training.forward_plan"]


UNCORRECTED = [
    {"vllm_importance_sampling_mode": "token_truncate"},
    {"vllm_importance_sampling_correction": False},
    {"use_vllm": False},
]


@pytest.mark.parametrize(("inexact", "options"), zip(INEXACT, UNCORRECTED, strict=True))
def test_sampling_that_training_cannot_follow_is_said_once(sampled, caplog, inexact, options):
    unlike, what, mend = inexact
    with caplog.at_level(logging.WARNING, "mt_grpo.training.forward_plan"):
        sampled(**unlike, **options)[0].train()
    (message,) = said(caplog)
    assert message.startswith(what) and mend in message


@pytest.mark.parametrize("options", [{}, PADDED, {"top_k": 3}, {"top_k": -1, "forward": "padded"}])
def test_sampling_that_training_follows_is_not_talked_about(sampled, caplog, options):
    with caplog.at_level(logging.WARNING, "mt_grpo.training.forward_plan"):
        trainer, _ = sampled(**options)
    assert not said(caplog)
    assert (_read_truncation(trainer.args) is None) == (options.get("top_k", 0) <= 0)
