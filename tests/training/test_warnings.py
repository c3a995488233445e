"""What is wrong with rewards and credit is said in words: once, and where it can be counted at the end."""

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from support.models import CPU_RUN
from support.trainers import Calls, Letters, Never, Same, Share, audited, conversation, logged, member

from mt_grpo.credit import RewardBatch
from mt_grpo.rewards import OutcomeReward, TurnReward
from mt_grpo.rollout import EngineError
from mt_grpo.runlog.findings import Counts
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training.step_log import Update, warnings
from mt_grpo.training.step_log.warnings import CUT, STILL, _why_still, says_uncredited

DEFAULT = "`advantage_estimator: {name: lambda_to_go, lam: 0.8, scales: batch}`, the default"
ONE = {"name": "reward_to_go", "scales": "one"}


class Late(OutcomeReward):
    """Applies from the second batch on."""

    def score(self, trajectory, **row):
        return None if "-000000-" in trajectory.session[:14] else float(member(trajectory.session))


class RightInTheEnd(OutcomeReward):
    """Members of a group differ in the first batch; from the second on all are right."""

    def score(self, trajectory, **row):
        return float(member(trajectory.session) % 2) if "-000000-" in trajectory.session[:14] else 1.0


def gone_at_first(session, turn):
    return EngineError("gone") if session.startswith("train-000000") else conversation(session, turn)


def said(caplog):
    return [record.message for record in caplog.records if record.name == "mt_grpo.training.step_log.warnings"]


def rewarded(*outcomes, turns=(), **options):
    return {"rewards": (turns, outcomes), **options}


CALLS = rewarded(Letters(), turns=(Calls(),))
CASES = {
    "a run that learns": (rewarded(Letters(), max_steps=2), []),
    "a reward that never applies": (
        rewarded(Letters(), turns=(Never(),)),
        ["'Never' applied to none of the 4 trajectories of the first", "applied to no trajectory of this run's 3"],
    ),
    "a reward that applies later": (
        rewarded(Late(), Letters(), max_steps=2),
        ["'Late' applied to none of the 4 trajectories of the first batch"],
    ),
    "equal groups": (rewarded(Same()), ["members of each group earn the same", "3 of 3 batches taught nothing"]),
    "equal groups are judged by themselves": (
        rewarded(RightInTheEnd()),
        [
            "members of each group earn the same",
            "2 of 3 batches taught nothing: the members of each of their groups earned the same. Every conversation "
            "is right: the questions are too easy.",
        ],
    ),
    "failed conversations are no silent rewards": (
        rewarded(Letters(), script=gone_at_first, max_steps=2),
        [
            "In a training batch: 4 of 4 conversations failed (engine_error), the first with: gone.",
            "In 2 training batches: 4 of 8 conversations failed (engine_error)",
        ],
    ),
    "all conversations are cut off by length": (
        rewarded(Same(), max_turn_length=2, max_steps=1),
        ["4 of 4 conversations were cut off by length: a turn used up `max_turn_length`", "cut off by length."],
    ),
    "a turn reward that needs the future": (
        rewarded(Letters(), turns=(Calls(), Share()), advantage_estimator=ONE),
        ["'Share' of turns depends on later turns (turn "],
    ),
    "a rule of sums": (rewarded(Letters(), turns=(Share(),), max_steps=2, advantage_estimator="grpo_mr"), []),
    "another rule is not biased": (CALLS | {"advantage_estimator": ONE}, []),
    "turn rewards out of proportion": (
        CALLS | {"advantage_estimator": "reward_to_go"},
        [
            "`reward_to_go` divides outcome and turn rewards by a deviation each, so that turn rewards count 3.5 "
            "times as much beside the outcome as their weights say. To keep the proportion that your rewards have, "
            "take `advantage_estimator: {name: lambda_to_go, lam: 0.8, scales: batch}`, the default."
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_stands_out_is_said_once_and_counted_at_the_end(build, caplog, case):
    options, sentences = CASES[case]
    build(**{"max_steps": 3, **options}).train()
    found = said(caplog)
    assert len(found) == len(sentences)
    assert all(part in sentence for part, sentence in zip(sentences, found, strict=True))
    assert "length" not in case or all("question" not in sentence for sentence in found)


def test_evaluation_is_not_watched(build, caplog):
    build(rewards=((), (Same(),)), num_generations_eval=1).evaluate()
    assert not said(caplog)


def test_a_turn_reward_is_asked_again_for_a_few_trajectories(build):
    class Counting(TurnReward):
        asked = 0

        def score(self, turn, trajectory, **row):
            self.asked += 1
            return 0.5

    plain, checked = Counting(), Counting()
    build(rewards=((plain,), (Letters(),)), max_steps=4).train()
    build(rewards=((checked,), (Letters(),)), advantage_estimator="reward_to_go", max_steps=4).train()
    assert checked.asked == plain.asked + 2 * CUT


def test_bias_and_missing_credit_of_mt_grpo_are_said_once(build, caplog):
    """Of four calls that earn 1, one is made after the first tool result."""
    (trainer := build(**CALLS, turn_advantage_coef=0.5, max_steps=3)).train()
    biased, uncredited, _ = said(caplog)
    assert "is biased on this batch" in biased
    assert "1 of 4 trajectories have no tool result, and weigh turn rewards by 1 instead of `turn_coef` 0.5" in biased
    assert uncredited == (
        "`mt_grpo` leaves 25% of the turn rewards of this batch without credit at the turn that earned them: take "
        f"{DEFAULT} (`leave_one_out` if turn rewards depend on later turns)."
    )
    assert logged(trainer, "credit/uncredited_at_turn", "credit/uncredited_up_to_turn")[0] == [0.25, 0.0]


@pytest.mark.parametrize(
    ("options", "take"),
    [
        ({"advantage_estimator": "grpo_or"}, f"{DEFAULT} (`leave_one_out` if turn rewards depend on later turns)."),
        ({"advantage_estimator": ONE, "turn_advantage_coef": 0.0}, "a `turn_advantage_coef` other than 0."),
        ({"advantage_estimator": {**ONE, "turn_coef": 0.0}}, "a `turn_coef` other than 0."),
        (
            {"advantage_estimator": "grpo_or", "importance_sampling_level": "sequence"},
            "`advantage_estimator: leave_one_out`.",
        ),
    ],
)
def test_the_rule_to_take_fits_the_run(tmp_path, options, take):
    args = MTGRPOConfig(str(tmp_path), **CPU_RUN, **options)
    found = says_uncredited({"uncredited_at_turn": 1.0, "uncredited_up_to_turn": 1.0}, args.credit_rule(True), args)
    assert "leaves 100% of the turn rewards" in found and f"and 100% at all turns up to it: take {take}" in found


def long_conversations(turns: int, shaping: float) -> RewardBatch:
    """Two groups; every second member succeeds, and every call is paid by chance."""
    draw = torch.Generator().manual_seed(0)
    exists = torch.ones(16, turns, dtype=torch.bool)
    rewards = shaping * (torch.rand(16, turns, generator=draw) < 0.5).double()
    return RewardBatch(rewards, (torch.arange(16) % 2).double(), exists, exists, 8)


@pytest.mark.parametrize(
    ("rule", "turns", "shaping", "said_of_it"),
    [
        ({"name": "gtpo", "gamma": 0.5}, 12, 0.1, ["gives the first turn 0.05% of what it gives the turn that gets"]),
        ({"name": "gtpo", "gamma": 0.5}, 3, 0.1, []),
        ({"name": "gtpo", "gamma": 0.9}, 12, 0.1, []),
        ("lambda_to_go", 12, 0.02, ["count 11.8 times as much beside the outcome as their weights say. To keep"]),
        ("mt_grpo_discounted", 12, 0.02, ["times as much beside the outcome as their weights say. To keep"]),
        ("lambda_to_go", 12, 5.0, ["count 0.05 times as much beside the outcome as their weights say. To keep"]),
        ({"name": "lambda_to_go", "lam": 0.8, "scales": "one"}, 12, 0.02, []),
        ({"name": "lambda_to_go", "lam": 0.8, "scales": "batch"}, 64, 0.02, []),
        ("grpo_or", 12, 0.02, []),
        ("turn_gae", 12, 0.1, []),
        ("turn_gae", 64, 0.1, ["conversations of 64 turns: what an early turn decides is hardly learnt from the out"]),
        ({"name": "turn_gae", "lam": 0.985}, 64, 0.1, []),
    ],
)
def test_a_rule_that_loses_proportions_is_named(rule, turns, shaping, said_of_it, caplog, tmp_path):
    """It is, too, if no outcome differs at first; and each thing once."""
    watch, batch = watching(rule, tmp_path), long_conversations(turns, shaping)
    for outcomes in (torch.zeros(16), batch.outcome_rewards, batch.outcome_rewards):
        watch._find_proportions(replace(batch, outcome_rewards=outcomes), batch.turn_rewards)
    found = said(caplog)
    assert len(found) == len(said_of_it)
    assert all(part in sentence for part, sentence in zip(said_of_it, found, strict=True))


def watching(rule, folder, *rewards):
    args = MTGRPOConfig(str(folder), use_cpu=True, bf16=False, advantage_estimator=rule)
    return warnings.Warnings(rewards or [Calls(), Letters()], args, [], [])


def test_a_lost_outcome_is_named_where_only_it_pays(caplog, tmp_path):
    batch = long_conversations(12, 0.0)
    for rule in ({"name": "gtpo", "gamma": 0.5}, None):
        watching(rule, tmp_path, Letters())._find_proportions(batch, batch.outcome_rewards)
    (message,) = said(caplog)
    assert "`gtpo` gives the first turn 0.05% of what" in message
    assert message.endswith("Take `advantage_estimator: grpo_or`, the default.")


@pytest.mark.parametrize(
    ("rule", "take"), [("lambda_to_go", f"take {DEFAULT}"), (None, "weigh turn rewards less (`reward_weights`)")]
)
def test_outcomes_that_fall_while_calls_are_paid_are_said_once(rule, take, caplog, tmp_path):
    """Weights cancel in a deviation of turn rewards alone."""
    watch, paid = watching(rule, tmp_path), long_conversations(4, 0.1)
    watch._find_proportions(paid, paid.turn_rewards)
    caplog.clear()
    for step in range(8 * warnings.APART):  # outcomes rise at first
        turns, outcomes = paid.turn_rewards + 0.02 * step, paid.outcome_rewards - 0.03 * abs(step - 15)
        watch._find_apart(replace(paid, turn_rewards=turns, outcome_rewards=outcomes))
    (message,) = said(caplog)
    assert message.startswith("Over 40 steps the mean outcome went from 0.050 to -0.220, and the mean sum of turn rew")
    assert f"If the outcome is what you want, {take}, or pay" in message


def test_outcomes_that_rise_while_less_is_paid_are_no_fault(caplog, tmp_path):
    watch, paid = watching(None, tmp_path), long_conversations(4, 0.1)
    for step in range(4 * warnings.APART):
        turns, outcomes = paid.turn_rewards - 0.02 * step, paid.outcome_rewards + 0.03 * step
        watch._find_apart(replace(paid, turn_rewards=turns, outcome_rewards=outcomes))
    assert not said(caplog)


# A gradient that stays zero


def test_a_gradient_that_stays_zero_is_spoken_of_once(build, caplog, monkeypatch):
    monkeypatch.setattr(warnings, "STILL", 2)
    build(rewards=((Never(),), (Same(),)), max_steps=3).train()
    (message,) = [message for message in said(caplog) if "gradient" in message]
    assert message == (
        "The gradient has been exactly 0 for 2 steps, so nothing is learnt: the advantages of all groups were 0 at "
        "every turn; the reward 'Never' returned `None` for every conversation; the reward 'Same' gave all members "
        "of each group the same. No conversation is right: the questions may be too hard, or the reward for an answer "
        "too strict."
    )


def test_a_gradient_that_comes_back_is_not_spoken_of(build, caplog):
    trainer = build()
    for norm in [*[0.0] * (STILL - 1), 0.1, *[0.0] * (STILL - 1), None]:
        trainer.step_log.warnings.update(Update(gradient_norm=norm))
    assert not said(caplog)


def ended(stop: str, **changes) -> Counts:
    """Four conversations that all ended so."""
    return Counts(conversations=4, stops=Counter({stop: 4}), turns=4, calls=4, **changes)


EQUAL = {"equal_groups": 1.0}
WRONG = ended("answered", right={False})


@pytest.mark.parametrize(
    ("records", "counts", "causes"),
    [
        ([], Counts(), "^no conversation was sampled.$"),
        (
            [audited(a={})],
            ended("engine_error", first_failure="gone"),
            r"^4 of 4 .* failed \(engine_error\), .* with: gone\.",
        ),
        ([audited(a={}), audited(silent=0.5, a={})], WRONG, "are not trained: they are masked"),
        (
            [audited(a=EQUAL, b=EQUAL, c={})],
            WRONG,
            "the rewards 'a', 'b' gave all members of each group the same; what other rewards told apart has no "
            "weight, or the credit rule does not use it.$",
        ),
        (
            [audited(a=EQUAL)],
            WRONG,
            "'a' gave all members of each group the same. No conversation is right: the quest",
        ),
        ([audited(a=EQUAL)], ended("length"), "4 of 4 conversations were cut off by length.$"),
    ],
)
def test_a_still_gradient_has_the_causes_of_audits(records, counts, causes):
    assert re.search(causes, _why_still(records, counts))
