"""What a run records of its rewards, and what it says when nothing is learnt."""

from __future__ import annotations

import json

import pytest
from support.trainers import Calls, Letters

from mt_grpo.credit import Audit, RewardAudit
from mt_grpo.rewards import OutcomeReward, TurnReward
from mt_grpo.training.step_log import warnings
from mt_grpo.training.step_log.warnings import STILL, as_record, mean_record, read_audit, why_still

REWARD = {name: 0.5 for name in RewardAudit.__dataclass_fields__}


def record(silent=1.0, **rewards):
    audits = tuple(RewardAudit(**{**REWARD, **changes}) for changes in rewards.values())
    return as_record(Audit(2, silent, None, audits), list(rewards), {})


class Same(OutcomeReward):
    def score(self, trajectory, **row):
        return 0.9


class Never(TurnReward):
    def score(self, turn, trajectory, **row):
        return None


class Share(TurnReward):
    """Its part of the turns of the whole trajectory."""

    def score(self, turn, trajectory, **row):
        return 1.0 / len(trajectory.turns)


def said(caplog):
    return [entry.message for entry in caplog.records if "gradient" in entry.message]


def test_a_run_records_what_its_rewards_tell_apart(build, tmp_path):
    rewards = ((Calls(), Share(), Never()), (Letters(), Same()))
    build(rewards=rewards, advantage_estimator="reward_to_go", logging_steps=2, max_steps=3).train()
    first, last = (json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines())
    assert (first["step"], first["groups"], last["step"], last["groups"]) == (2, 2, 3, 1)
    audited = last["rewards"]
    assert list(audited) == ["Calls", "Share", "Never", "Letters", "Same"]
    assert {name: each["causal"] for name, each in audited.items()} == {
        "Calls": True,
        "Share": False,
        "Never": True,
        "Letters": None,
        "Same": None,
    }
    assert audited["Letters"]["group_correlation"] == pytest.approx(1) and audited["Share"]["group_variance"] == 0.0
    assert audited["Never"]["applies"] == 0.0 and audited["Same"]["equal_groups"] == 1.0
    logged = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert {name for name in logged if name.startswith("credit/")} == {
        "credit/groups_without_signal",
        "credit/sign_agreement",
    }


def test_a_gradient_that_stays_zero_is_spoken_of_once(build, caplog, monkeypatch):
    monkeypatch.setattr(warnings, "STILL", 2)
    build(rewards=((Never(),), (Same(),)), max_steps=3).train()
    (message,) = said(caplog)
    assert message == (
        "The gradient has been exactly 0 for 2 steps, so nothing is learnt: the advantages of all groups were 0 at "
        "every turn; the reward 'Never' returned `None` for every conversation; the reward 'Same' gave all members "
        "of each group the same."
    )


def test_a_gradient_that_comes_back_is_not_spoken_of(build, caplog):
    trainer = build()
    for norm in [*[0.0] * (STILL - 1), 0.1, *[0.0] * (STILL - 1), None]:
        trainer.audits.observe_gradient(norm, True)
    assert not said(caplog)


def test_the_likely_causes_are_those_of_the_audits():
    assert why_still([]) == "no conversation was sampled"
    failed = dict.fromkeys(REWARD)
    assert why_still([record(a=failed, b=failed)]).startswith("every conversation failed")
    assert "are not trained: they are masked" in why_still([record(a={}), record(silent=0.5, a={})])
    equal = why_still([record(a={"equal_groups": 1.0}, b={"equal_groups": 1.0}, c={})])
    assert "the rewards 'a', 'b' gave all members of each group the same" in equal
    assert equal.endswith("what other rewards told apart has no weight, or the credit rule does not use it")


def test_means_are_over_the_records_that_have_a_number():
    causal = [True, None, False]
    records = [record(silent=silent, a={"mean": silent or None}) for silent in (0.0, 0.5, 1.0)]
    for each, value in zip(records, causal, strict=True):
        each["rewards"]["a"]["causal"] = value
    mean = mean_record(records)
    assert (mean["groups"], mean["groups_without_signal"], mean["sign_agreement"]) == (6, 0.5, None)
    assert mean["rewards"]["a"]["mean"] == 0.75 and mean["rewards"]["a"]["causal"] is False
    assert mean_record(records[:2])["rewards"]["a"]["causal"] is True


def test_of_a_step_that_was_taken_again_the_last_record_counts(tmp_path):
    assert read_audit(tmp_path) is None
    lines = [{"step": step, **record(silent=silent, a={})} for step, silent in ((1, 0.0), (2, 1.0), (2, 0.5))]
    (tmp_path / "audit.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    audit = read_audit(tmp_path)
    assert (audit["groups_without_signal"], audit["groups"]) == (0.25, 4)
    assert "step" not in audit
