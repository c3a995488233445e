"""Rules by name, with the options of a recipe, and what a rule of one's own may return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from support.registered import keep_estimators
from support.reward_batches import NONE

from mt_grpo.credit import (
    ADVANTAGE_ESTIMATORS,
    Credit,
    CreditError,
    RewardBatch,
    advantage_estimator,
    bind_rule,
    estimate,
    estimate_parts,
    get_estimator,
    in_parts,
    mt_grpo,
    parse_rule,
    reward_to_go,
    rule_label,
    rule_name,
    whole_rule,
)
from mt_grpo.errors import ConfigError

EXISTS = torch.ones(2, 2, dtype=torch.bool)
SMALL = RewardBatch(torch.tensor([[0.4, 0.2], [0.2, 0.0]]), torch.tensor([1.0, 0.0]), EXISTS, EXISTS, 2)


@dataclass
class Window:
    """An option of a user's rule, which a script gives as an object."""

    turns: int = 2


@pytest.fixture
def register(monkeypatch):
    """`advantage_estimator`, whose rules are forgotten."""
    keep_estimators(monkeypatch)
    return advantage_estimator


@pytest.fixture
def decayed(register):
    """Registers a rule that notes what it was called with."""
    calls = []

    @register("decayed")
    def decayed(
        batch,
        *,
        scale_rewards="group",
        gamma: float = 0.9,
        mode: Literal["sum", "mean"] = "sum",
        steps: int | None = None,
        weights: list[float] = (),
        whole: bool = False,
        untyped="x",
    ):
        calls.append({"gamma": gamma, "mode": mode, "steps": steps, "scale_rewards": scale_rewards})
        return torch.zeros_like(batch.turn_rewards)

    return calls


def test_one_more_estimator_is_one_more_function(register, monkeypatch):
    zero = register("zero")(lambda batch, **options: torch.zeros_like(batch.turn_rewards))
    assert get_estimator("zero") is zero and get_estimator("mt_grpo") is mt_grpo
    monkeypatch.undo()
    assert "zero" not in ADVANTAGE_ESTIMATORS
    with pytest.raises(ValueError, match="'mtgrpo' is not one of branch_to_go, .*, turn_gae; .* 'mt_grpo'"):
        get_estimator("mtgrpo")


def test_options_reach_the_rule_and_the_rest_keeps_its_default(decayed):
    estimate("decayed", SMALL, scale_rewards="none")
    estimate({"name": "decayed", "gamma": 1, "mode": "mean"}, SMALL)
    assert decayed == [
        {"gamma": 0.9, "mode": "sum", "steps": None, "scale_rewards": "none"},
        {"gamma": 1, "mode": "mean", "steps": None, "scale_rewards": "group"},
    ]


def test_the_coefficient_of_the_run_and_that_of_the_rule_are_one():
    expected = mt_grpo(SMALL, turn_coef=0.5)
    assert torch.equal(estimate("mt_grpo", SMALL, turn_coef=0.5), expected)
    assert torch.equal(estimate({"name": "mt_grpo", "turn_coef": 0.5}, SMALL), expected)
    assert torch.equal(estimate("mt_grpo", SMALL), mt_grpo(SMALL))


def test_a_rule_with_open_options_gets_all_of_them(register):
    seen = []

    @register("open")
    def takes_any(batch, **options):
        seen.append(options)
        return torch.zeros_like(batch.turn_rewards)

    estimate({"name": "open", "depth": 3}, SMALL, turn_coef=2.0, scale_rewards="none")
    assert seen == [{"depth": 3, "turn_coef": 2.0, "scale_rewards": "none"}]


def test_values_that_fit_their_types_are_taken(decayed):
    values = [{"steps": steps} for steps in (None, 3)] + [{"gamma": 1}, {"weights": [1, 0.5]}, {"whole": True}]
    rules = [{"name": "decayed", **value} for value in (*values, {"untyped": [{}]}, {"mode": "mean"})]
    for rule in (*rules, *({"name": "gtpo", "gamma": gamma} for gamma in (0, 0.5, 1))):
        bind_rule(rule, turn_coef=None, scale_rewards="group")


def test_an_option_may_be_of_a_dataclass(register):
    @register("windowed")
    def windowed(batch, *, window: Window):
        return torch.full_like(batch.turn_rewards, float(window.turns))

    assert (estimate({"name": "windowed", "window": Window(3)}, SMALL) == 3).all()
    with pytest.raises(ConfigError, match="'window' .* is {'turns': 3}: input should be an instance of Window"):
        estimate({"name": "windowed", "window": {"turns": 3}}, SMALL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gama": 0.5}, "has no option 'gama'; the nearest is 'gamma': its options are gamma, mode, steps, "),
        ({3: 0.5}, "has no option 3: its options are"),
        ({"turn_coef": 0.5}, "has no option 'turn_coef'"),
        ({"gamma": "high"}, "'gamma' of the advantage estimator 'decayed' is 'high': input should be a valid number."),
        ({"gamma": True}, "'gamma' .* is True"),
        ({"gamma": None}, "'gamma' .* is None"),
        ({"steps": 0.5}, "'steps' .* is 0.5: input should be a valid integer"),
        ({"weights": [1, "a"]}, "'weights' .*: input should be a valid number"),
        ({"whole": 1}, "'whole' .* is 1: input should be a valid boolean"),
        ({"mode": "meen"}, "'mode' .* is 'meen'; the nearest is 'mean': input should be "),
        ({"scale_rewards": "none"}, "`scale_rewards` is an option of the run"),
        ({"name": "gtpo", "gamma": 1.5}, "'gamma' .* 'gtpo' is 1.5: input should be less than or equal to 1."),
        ({"name": "gigpo", "gamma": -0.1}, "'gamma' .* is -0.1: input should be greater than or equal to 0."),
        ({"name": "turn_gae", "lam": 95}, "'lam' .* is 95: input should be less than"),
        ({"name": "gtpo", "gamma": float("nan")}, "'gamma' .* is nan: give a number."),
        ({"name": "gtpo", "gamma": "high"}, "'gamma' .* is 'high': input should be a valid number."),
        ({"name": "bare", "gamma": 1.0}, "'bare' has no option 'gamma': it has none"),
        ({"name": "strict"}, "'strict' needs its option 'gamma': write .*name: strict, gamma: ..."),
        ({"name": "unread", "gamma": 1}, "'unread' cannot be checked.*'Missing'.*import it"),
        ({"name": "untyped", "gamma": 1}, "'untyped' cannot be checked.*AttributeError: .*'Tenso'.*mend the annotati"),
    ],
)
def test_options_the_rule_does_not_take_are_refused(decayed, register, options, message):
    register("bare")(lambda batch: batch.turn_rewards)

    @register("strict")
    def strict(batch, *, gamma: float):
        return torch.full_like(batch.turn_rewards, gamma)

    @register("unread")
    def unread(batch, *, gamma: Missing = 1):  # noqa: F821
        return batch.turn_rewards

    @register("untyped")
    def untyped(batch, *, gamma: torch.Tenso = 1):
        return batch.turn_rewards

    with pytest.raises(ConfigError, match=message) as caught:
        estimate({"name": "decayed", **options}, SMALL)
    assert "\n" not in str(caught.value)
    assert estimate("bare", SMALL).equal(SMALL.turn_rewards)
    assert estimate({"name": "strict", "gamma": 0.5}, SMALL).unique().item() == 0.5


def test_what_is_said_twice_or_in_vain_is_refused(decayed, register):
    register("bare")(lambda batch: batch.turn_rewards)
    for rule, of_run, message in (
        ({"name": "mt_grpo", "turn_coef": 0.5}, {"turn_coef": 1.0}, "`turn_coef: 0.5` of .*_coef: 1.0` contradict"),
        ("decayed", {"turn_coef": 1.0}, "`turn_advantage_coef` is 1.0, and .* 'decayed' takes no `turn_coef`"),
        ("bare", {"scale_rewards": "none"}, "`scale_rewards` is 'none', and .* 'bare' takes no `scale_rewards`"),
    ):
        with pytest.raises(ConfigError, match=message):
            estimate(rule, SMALL, **of_run)


def test_a_rule_is_a_name_a_mapping_or_json():
    whole = {"name": "decayed", "gamma": 0.9, "steps": 2}
    for given, parsed, label in (
        ("decayed", "decayed", "decayed"),
        ({"name": "decayed"}, {"name": "decayed"}, "decayed"),
        ('{"name": "decayed", "gamma": 0.9, "steps": 2}', whole, "decayed (gamma 0.9, steps 2)"),
    ):
        assert (parse_rule(given), rule_name(parsed), rule_label(parsed)) == (parsed, "decayed", label)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{name: decayed}", "not valid JSON"),
        ({"gamma": 0.9}, "a mapping of its `name`"),
        ('{"name": 3}', "a mapping of its `name`"),
        (None, "is None: give the name"),
        (["decayed"], "give the name of a rule"),
    ],
)
def test_what_names_no_rule_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        parse_rule(given)


def test_a_rule_is_told_whole_with_its_defaults():
    options = {"name": "gtpo", "turn_coef": 2.0, "gamma": 0.5, "scale_rewards": "batch"}
    assert whole_rule({"name": "gtpo", "gamma": 0.5}, turn_coef=2.0, scale_rewards="batch") == options
    assert whole_rule("grpo_or", turn_coef=None, scale_rewards="group")["turn_coef"] == 1.0


# What it returns


def test_a_rule_of_ones_own_may_return_parts(register):
    @register("told")
    def told(batch):
        rewards = batch.turn_rewards.nan_to_num(nan=0.0)
        mean = rewards.mean()
        return Credit((rewards - mean) * batch.turn_mask, {"turn reward": rewards, "baseline": -mean})

    register("wrapped")(in_parts(told))
    for rule in ("told", "wrapped"):
        credit = estimate_parts(rule, SMALL)
        parts = {name: round(part[0, 0].item(), 6) for name, part in credit.parts.items()}
        assert (parts, credit.scales) == ({"turn reward": 0.4, "baseline": -0.2}, {})
        assert torch.equal(in_parts(told)(SMALL).float(), credit.advantages)
    register("plain")(lambda batch: 2 * reward_to_go(batch))
    plain = estimate_parts("plain", SMALL)
    assert plain.parts == {} and plain.advantages.equal(2 * estimate("reward_to_go", SMALL))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"reward": torch.zeros(2, 2)}, "gave 0.6 to turn 1 of trajectory 0, and parts whose sum is 0 \\(reward 0\\)"),
        (
            {"reward": torch.zeros(3, 2)},
            "returned a tensor of shape \\(3, 2\\) for the part 'reward': return a tensor of the shape",
        ),
        ({1: torch.zeros(2, 2)}, "returned parts without names: return a tensor by name"),
        ([torch.zeros(2, 2)], "returned parts without names"),
        ({"reward": [0.6, 0.2]}, "returned a list for the part 'reward'"),
        ({"reward": torch.full((2, 2), NONE)}, "parts whose sum is nan"),
    ],
)
def test_parts_that_do_not_add_up_are_refused(register, parts, message):
    register("wrong")(lambda batch: Credit(torch.tensor([[0.6, 0.2], [0.2, 0.0]]), parts))
    with pytest.raises(CreditError, match=message):
        estimate_parts("wrong", SMALL)
    register("unnamed")(lambda batch: Credit(torch.zeros(2, 2), {}, [torch.ones(2, 2)]))
    with pytest.raises(CreditError, match="'unnamed' returned scales without names"):
        estimate_parts("unnamed", SMALL)


def test_a_rule_that_raises_is_named_with_its_line(register):
    @register("broken")
    def broken(batch):
        return batch.turn_rewards.view(7)

    line = broken.__code__.co_firstlineno + 2
    raised = rf"'broken' raised RuntimeError: .*, in {__file__}, line {line}, in broken\."
    with pytest.raises(CreditError, match=raised):
        estimate_parts("broken", SMALL)


def test_a_bug_of_a_built_in_rule_keeps_its_traceback():
    batch = RewardBatch(SMALL.turn_rewards, torch.zeros(3), EXISTS, EXISTS, 2)
    with pytest.raises(RuntimeError) as caught:
        estimate_parts("grpo_or", batch)
    assert not isinstance(caught.value, CreditError)
