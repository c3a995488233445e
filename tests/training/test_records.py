"""What a trainer leaves of its conversations: credit, what it computed per token, and where the time went."""

from __future__ import annotations

import json
import time

import pytest
import torch
from support.trainers import Calls, Letters, batch

from mt_grpo.credit import Audit, RewardAudit, Uncredited, estimate
from mt_grpo.rewards import OutcomeReward, TurnReward
from mt_grpo.runlog import RunLogError, open_run
from mt_grpo.runlog.heartbeat import read_state
from mt_grpo.runlog.writer import RunWriter
from mt_grpo.token_tree import TokenTree
from mt_grpo.training.step_log import Outputs
from mt_grpo.training.step_log.records import (
    as_record,
    mean_record,
    number_rows,
    read_audit,
    split_number,
    update_rows,
)
from mt_grpo.trajectory import Trajectory


@pytest.fixture(scope="module")
def passes(tmp_path_factory, tokenizer, questions):
    """Two batches, each trained in two passes, of what the model itself sampled."""
    from support.trainers import trainer_builder

    folder = tmp_path_factory.mktemp("passes")
    trainer = trainer_builder(folder, tokenizer, questions)(
        None, rewards=((), (Letters(),)), max_steps=4, num_iterations=2, max_turn_length=12, epsilon=0.02
    )
    start = time.time()
    trainer.train()
    return open_run(folder), start, time.time()


def test_every_update_of_a_conversation_is_kept(passes):
    run, *_ = passes
    state = read_state(run.folder)
    assert (state["state"], state["step"], state["of"], state["under_way"]) == ("finished", 4, 4, [])
    assert run.about["versions"].keys() >= {"trl", "torch"} and run.about["options"]["num_iterations"] == 2
    assert [row["step"] for row in run.rows] == [0] * 4 + [2] * 4
    for row in run.rows:
        assert [update["step"] for update in row["updates"]] == [row["step"], row["step"] + 1]
        whole = run.trajectory(row["session"])
        first, second = (update["ratios"] for update in whole["updates"])
        sampled = [place for place, turn in enumerate(whole["tokens"]["turn"]) if turn >= 0]
        assert [place for place, ratio in enumerate(first) if ratio is not None] == sampled
        assert all(first[place] == pytest.approx(1, abs=2e-3) for place in sampled)
        assert any(abs(second[place] - 1) > 0.01 for place in sampled) or not any(row["advantages"])


def test_the_trainer_computes_what_its_engine_sampled(passes):
    run, *_ = passes
    for row in run.rows:
        tokens = run.trajectory(row["session"])["tokens"]
        pairs = [pair for pair in zip(tokens["trainer"], tokens["logprobs"], strict=True) if None not in pair]
        assert len(pairs) == sum(row["tokens"])
        assert max(abs(trainer - engine) for trainer, engine in pairs) < 1e-3 and row["mismatch"] < 1e-3


def test_clipped_tokens_are_those_of_the_loss(passes):
    run, *_ = passes
    logged = [line["clip_ratio/region_mean"] for line in run.metrics() if "loss" in line]
    wholes = [run.trajectory(row["session"]) for row in run.rows]
    for step, share in enumerate(logged):
        flags = [
            flag
            for whole in wholes
            for update in whole["updates"]
            if update["step"] == step
            for flag in update["clipped"]
            if flag is not None
        ]
        assert sum(flags) / len(flags) == pytest.approx(share, abs=1e-6)
    assert any(logged)


def test_entropies_are_those_that_are_logged(passes):
    run, *_ = passes
    logged = [line["entropy"] for line in run.metrics() if "loss" in line]
    for row in run.rows:
        assert row["entropy"] == pytest.approx(logged[row["step"]], rel=0.3)


def test_times_are_absolute_and_parts_of_a_step_add_up(passes):
    run, start, end = passes
    assert [line["step"] for line in run.steps()] == [0, 1, 2, 3]
    for line in run.steps():
        parts = [line[name] for name in ("sampling", "rewards", "sync", "training")]
        assert sum(parts) == pytest.approx(line["seconds"], abs=1e-3) and min(parts) >= 0
        assert start - 1 <= line["start"] <= end
    assert run.steps()[0]["sampling"] > 0 and run.steps()[1]["sampling"] == 0  # the second pass samples nothing
    for row in run.rows:
        assert start - 1 <= row["start"] <= run.trajectory(row["session"])["turns"][0]["start"] <= end


def test_the_tokenizer_is_saved_and_shows_the_tokens(passes, tokenizer):
    run, *_ = passes
    tokens = run.trajectory(run.rows[0]["session"])["tokens"]
    assert "".join(tokens["texts"]) == tokenizer.decode(tokens["ids"])


def test_the_parts_of_each_advantage_are_kept_with_the_rule(build, tmp_path):
    rule = {"name": "turn_gae", "lam": 0.5}
    trainer = build(max_steps=1, advantage_estimator=rule, turn_advantage_coef=2.0, scale_rewards="batch")
    trainer.train()
    run = open_run(tmp_path)
    assert run.about["estimator"] == rule
    assert run.about["rule"] == {**rule, "turn_coef": 2.0, "gamma": 1.0, "scale_rewards": "batch"}
    assert run.about["rule_says"].startswith("Generalised advantage estimation over turns")
    turns = [turn for row in run.rows for turn in run.trajectory(row["session"])["turns"]]
    assert any(turn["advantage"] for turn in turns)
    for turn in turns:
        parts = {part["name"]: part for part in turn["parts"]}
        assert list(parts) == ["outcome", "turn reward Calls", "later values", "baseline"]
        assert sum(part["value"] for part in parts.values()) == pytest.approx(turn["advantage"], abs=1e-6)
        assert len({part["scale"] for part in parts.values()}) == 1
    first = run.trajectory(run.rows[0]["session"])
    earned = first["turns"][0]["parts"][1]
    wanted = sum(value * 0.5**turn for turn, value in enumerate(first["rewards"]["turn"]["Calls"]) if value)
    assert earned["value"] * earned["scale"] == pytest.approx(2.0 * first["weights"]["Calls"] * wanted)


def test_credit_and_weights_are_those_that_are_trained(build, tmp_path):
    trainer = build(reward_weights=[3.0, 0.5], max_steps=1)
    trainer.train()
    run = open_run(tmp_path)
    expected = estimate("mt_grpo", trainer.batch.rewards, turn_coef=1.0, scale_rewards="group")
    for row, wanted in zip(run.rows, expected, strict=True):
        assert row["advantages"] == pytest.approx(wanted[: row["turns"]].tolist(), abs=1e-5)
    totals = trainer.batch.rewards.outcome_rewards + trainer.batch.rewards.turn_rewards.nansum(dim=1)
    assert [row["reward"] for row in run.rows] == pytest.approx(totals.tolist(), abs=1e-6)
    weights = {reward["name"]: reward["weight"] for reward in run.about["rewards"]}
    assert weights == {"Calls": 3.0, "Answered": 0.5} == run.trajectory(run.rows[0]["session"])["weights"]
    assert {row["group"] for row in run.rows} == {0} and [row["member"] for row in run.rows] == [0, 1, 2, 3]
    called = run.trajectory(run.rows[0]["session"])["turns"][0]["tool_calls"][0]
    assert called["start"] >= run.trajectory(run.rows[0]["session"])["turns"][0]["start"]


def test_an_exported_trajectory_is_the_one_that_was_sampled(build, tmp_path):
    trainer = build(max_steps=1)
    trainer.train()
    for made, data in zip(trainer.batch.trajectories, open_run(tmp_path).trajectories(), strict=True):
        data = {name: value for name, value in data.items() if name not in ("step", "mode")}
        assert list(data) == list(made.to_dict())
        read = Trajectory.from_dict(data)
        for node, other in zip(read.tree.nodes, made.tree.nodes, strict=True):
            assert node.tokens == other.tokens and node.logprobs == pytest.approx(other.logprobs, rel=1e-6)
        read.tree = made.tree = TokenTree()
        made.environment = None
        assert read == made


def test_evaluations_of_a_step_stay_apart(build, tmp_path, questions):
    trainer = build(per_device_eval_batch_size=4)
    trainer.evaluate(questions.select(range(1)))
    trainer.evaluate(questions.select(range(1)))
    run = open_run(tmp_path)
    assert run.column("mode") == ["eval"] * 8 and run.column("k").tolist() == [0] * 4 + [1] * 4
    assert all(row["advantages"] is not None for row in run.rows)


def test_a_sequence_level_ratio_clips_whole_conversations(build):
    trainer = build(importance_sampling_level="sequence", epsilon=0.1, advantage_estimator="grpo_or")
    inputs = batch(trainer)
    logps = torch.zeros(inputs["completion_ids"].shape)
    inputs["old_per_token_logps"] = logps - 1.0
    rows, summaries = update_rows([Outputs.of(inputs, logps, logps, trainer.args)])
    for row, summary, advantages in zip(rows, summaries, inputs["advantages"], strict=True):
        assert len(set(row["clipped"].tolist())) == 1
        assert summary["clipped"] == pytest.approx(
            (advantages[torch.tensor(row["columns"], dtype=torch.long)] > 0).float().mean().item()
        )


def test_row_numbers_name_conversations():
    numbers = number_rows(70_000, 65_000, torch.tensor([0, 9_000_000]))
    assert [split_number(number) for number in numbers.tolist()] == [(70_000, 65_000, 0), (70_000, 65_000, 9_000_000)]


def test_a_folder_that_cannot_be_written_ends_a_run(build, tmp_path):
    trainer = build()
    trainer.step_log.records.writer = RunWriter("/dev/null")
    with pytest.raises(RunLogError, match="The run's conversations cannot be written to /dev/null/rollouts"):
        trainer.train()


def test_a_failure_after_scoring_loses_no_conversation(build, tmp_path, monkeypatch):
    def fail(*arguments):
        raise MemoryError("full")

    monkeypatch.setattr("mt_grpo.training.rollout_batch.token_columns", fail)
    with pytest.raises(MemoryError):
        build(max_steps=1).train()
    rows = open_run(tmp_path).rows
    assert [row["stop"] for row in rows] == ["answered"] * 4 and all(row["reward"] is not None for row in rows)


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_index(build, tmp_path):
    build(max_steps=2, save_strategy="steps", save_steps=1).train()
    build(max_steps=3, save_strategy="steps", save_steps=1).train(str(tmp_path / "checkpoint-1"))
    run = open_run(tmp_path)
    assert [row["step"] for row in run.rows] == [step for step in range(3) for _ in range(4)]
    assert [line["step"] for line in run.steps()] == [0, 1, 2]
    assert all(row["advantages"] is not None and len(row["updates"]) == 1 for row in run.rows)
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "rollouts/index.jsonl").read_text().splitlines()]
    assert kinds.count("run") == 2


REWARD = {name: 0.5 for name in RewardAudit.__dataclass_fields__}


def record(silent=1.0, **rewards):
    audits = tuple(RewardAudit(**{**REWARD, **changes}) for changes in rewards.values())
    return as_record(Audit(2, silent, None, audits), Uncredited(None, None), list(rewards), {})


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
        "credit/uncredited_at_turn",
        "credit/uncredited_up_to_turn",
    }


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
