"""A number that is not finite ends the run before it reaches a weight or a file."""

import math

import pytest
import torch
from support.models import build_model
from support.registered import keep_estimators
from support.trainers import batch, same, weights

from mt_grpo.credit import CreditError, advantage_estimator, mt_grpo
from mt_grpo.training.model import NonFiniteError


@pytest.fixture
def rule(monkeypatch):
    """Registers a rule that spoils what `mt_grpo` returns."""
    keep_estimators(monkeypatch)

    def register(spoil):
        @advantage_estimator("spoilt")
        def spoilt(batch, *, turn_coef=1.0, scale_rewards="group"):
            return spoil(mt_grpo(batch), batch)

        return "spoilt"

    return register


def train_into(trainer, error, said):
    """Training ends with an error, and no weight has changed."""
    before = [weight.nan_to_num() for weight in weights(trainer)]
    with pytest.raises(error, match=said):
        trainer.train()
    assert same(before, [weight.nan_to_num() for weight in weights(trainer)])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda advantages, batch: advantages.index_fill(1, torch.tensor([1]), math.nan), "nan to turn 2"),
        (lambda advantages, batch: torch.full_like(advantages, math.inf), "inf to turn 1"),
        (lambda advantages, batch: advantages.double() * 1e300, "inf to turn 1"),
        (lambda advantages, batch: advantages[:, 0], r"shape \(4,\).*\(4, 3\)"),
        (lambda advantages, batch: advantages[:, :1], r"shape \(4, 1\).*\(4, 3\)"),
        (lambda advantages, batch: advantages.tolist(), "a list"),
    ],
)
def test_what_a_rule_returns_is_checked_before_any_step(build, rule, spoil, said):
    train_into(build(advantage_estimator=rule(spoil)), CreditError, f"'spoilt'.*{said}")


def test_what_a_rule_says_of_turns_that_do_not_exist_is_ignored(build, rule):
    name = rule(lambda advantages, batch: advantages.masked_fill(~batch.turn_mask, math.nan))
    spoilt, plain = batch(build(advantage_estimator=name)), batch(build())
    torch.testing.assert_close(spoilt["advantages"], plain["advantages"])


def test_a_spoilt_weight_is_named_when_the_loss_is_not_finite(build, tokenizer):
    model = build_model(tokenizer)
    model.model.norm.weight.data[0] = math.nan
    train_into(build(model=model), NonFiniteError, "loss of step 1 is nan.*'model.norm.weight'")


def test_what_the_loss_was_made_of_is_named(build):
    trainer = build()
    score = trainer._generate_and_score_completions

    def spoilt(inputs):
        output = score(inputs)
        output["old_per_token_logps"] = torch.full_like(output["sampling_per_token_logps"], -math.inf)
        return output

    trainer._generate_and_score_completions = spoilt
    train_into(trainer, NonFiniteError, "`old_per_token_logps`")


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_a_gradient_that_is_not_finite_is_not_stepped(build, max_grad_norm):
    trainer = build(max_grad_norm=max_grad_norm)
    trainer.model.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    train_into(trainer, NonFiniteError, "gradient of step 1 has the norm")


@pytest.mark.parametrize("options", [{}, {"save_strategy": "steps", "save_steps": 1}], ids=["end", "between"])
def test_weights_that_a_step_spoilt_are_not_saved(build, tmp_path, options):
    trainer = build(learning_rate=1e38, optim="sgd", max_grad_norm=0.0, max_steps=1, **options)
    trainer.model.model.norm.weight.register_hook(lambda gradient: gradient * 1e4)  # finite
    with pytest.raises(NonFiniteError, match="after step 1 .model.norm.weight.*not saved"):
        trainer.train()
    assert not list(tmp_path.glob("*.safetensors")) and not list(tmp_path.glob("checkpoint-*"))
