"""Metrics are means over what their names say, in training over a whole log window, in evaluation over every row."""

from __future__ import annotations

import json
import math

import pytest
from datasets import IterableDataset
from support.models import lookup
from support.trainers import SEARCH

from mt_grpo.app.train import write_json
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rewards import OutcomeReward, TurnReward
from mt_grpo.runlog import read_trajectories
from mt_grpo.training.step_log.metrics import Tally, rollout_metrics
from mt_grpo.trajectory import StopReason, ToolCall, Trajectory, Turn


class Called(TurnReward):
    """The number of the turn, for a turn that called."""

    def score(self, turn, trajectory, **row):
        return float(turn.index + 1) if turn.tool_calls else None


class Length(OutcomeReward):
    """The length of the answer; `None` where there is none."""

    def score(self, trajectory, **row):
        return float(len(trajectory.answer)) if trajectory.answer else None


def script(session: str, turn: int) -> str:
    """In the first step every conversation answers at once; later ones search, and never answer."""
    mode, *_, number = session.split("-")
    step = int(session.split("-")[1]) if mode == "train" else 0
    if step == 0:
        return f"<answer>{'Lima' * (1 + int(number) % 3)}</answer>"
    return SEARCH if turn < 2 else "well"


@pytest.fixture
def run(build):
    def make(eval_dataset=None, **options):
        env = MultiTurnToolEnv([lookup], protocol="learnt_tags", max_steps=2)
        options = {"max_steps": 3, "logging_steps": 3, **options}
        return build(script, rewards=((Called(),), (Length(),)), env=env, eval_dataset=eval_dataset, **options)

    return make


EVALUATES = {"num_generations_eval": 1, "per_device_eval_batch_size": 4, "do_eval": True}


def logged(folder, key="loss"):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [row for row in rows if key in row]


def test_a_log_window_of_several_steps_is_one_mean(run, tmp_path):
    trainer = run()
    trainer.train()
    (row,) = logged(tmp_path)
    assert row["stop/answered"] == pytest.approx(1 / 3) and row["stop/max_steps"] == pytest.approx(2 / 3)
    assert sum(value for name, value in row.items() if name.startswith("stop/")) == pytest.approx(1)
    assert row["turn_1/tool_calls"] == pytest.approx(8 / 12)  # 12 trajectories have a first turn
    assert row["turn_2/tool_calls"] == 1.0  # 8 have a second one
    assert row["turn_1/reward"] == 1.0 and row["turn_2/reward"] == 2.0
    assert row["turn_3/malformed"] == 1.0
    lines = list(read_trajectories(tmp_path))
    lengths = [line["turns"][0]["num_tokens"] for line in lines]
    assert row["turn_1/length"] == pytest.approx(sum(lengths) / 12)


def test_a_cause_counts_as_zero_in_steps_without_it(run, tmp_path):
    trainer = run()
    sample = trainer.runner.run

    async def differing(requests, *args, **kwargs):
        trajectories = await sample(requests, *args, **kwargs)
        if trainer.state.global_step == 0:
            trajectories[0].render_mismatch = "another template"
            trajectories[0].turns[0].fork_cause = "compact"
        return trajectories

    trainer.runner.run = differing
    trainer.train()
    (row,) = logged(tmp_path)
    assert row["tokenization/another_template"] == row["forks/compact"] == pytest.approx(1 / 12)


def test_an_evaluation_weighs_rows_not_batches(run, tmp_path, questions):
    """Seven rows in batches of four: the second batch has three."""
    trainer = run(questions.select(range(7)), **EVALUATES)
    metrics = trainer.evaluate()
    answers = [len(trajectory.answer) for trajectory in trainer.eval_trajectories]
    assert len(answers) == 7 and len(set(answers)) > 1
    assert metrics["eval_rewards/Length/mean"] == metrics["eval_reward"] == pytest.approx(sum(answers) / 7)
    lengths = [trajectory.turns[0].num_tokens for trajectory in trainer.eval_trajectories]
    assert metrics["eval_completions/mean_length"] == metrics["eval_turn_1/length"] == pytest.approx(sum(lengths) / 7)
    assert trainer.evaluate()["eval_reward"] == metrics["eval_reward"]  # nothing is left of the first evaluation


def test_an_evaluation_leaves_a_log_window_of_training_alone(run, tmp_path, questions):
    run(questions.select(range(4)), eval_strategy="steps", eval_steps=1, **EVALUATES).train()
    (row,) = logged(tmp_path)
    assert row["stop/answered"] == pytest.approx(1 / 3)
    assert [each["eval_stop/answered"] for each in logged(tmp_path, "eval_stop/answered")] == [1.0] * 3


def trajectory(*turns: Turn) -> Trajectory:
    return Trajectory([], list(turns), stop_reason=StopReason.MAX_STEPS)


def test_calls_are_counted_and_turns_without_one_are_not():
    unread = [Turn(index, {}, error="neither a call nor an answer") for index in range(5)]
    call, failed = ToolCall("lookup", executed=True), ToolCall("lookup", error="timeout")
    means = rollout_metrics([trajectory(*unread)]).means()
    assert means["tools/call_frequency"] == means["tools/failure_frequency"] == means["turn_1/tool_calls"] == 0.0
    assert means["tools/malformed_frequency"] == 5.0
    means = rollout_metrics(
        [trajectory(Turn(0, {}, [call, failed]), Turn(1, {}, [call])), trajectory(*unread)]
    ).means()
    assert means["tools/call_frequency"] == 3 / 2 and means["tools/failure_frequency"] == 1 / 3
    assert means["tools/malformed_frequency"] == 5 / 2 and means["turn_1/failures"] == 1 / 2


def test_a_tally_adds_up_what_batches_have_and_have_not():
    whole = Tally()
    for size, answered in ((8, 6), (4, 0)):
        batch = Tally()
        batch.count("trajectory", size)
        if answered:
            batch.add("stop/answered", answered, per="trajectory")
        batch.largest("difference/max", size / 10)
        whole.merge(batch)
    whole.add("failures", 0, per="call")
    assert whole.means() == {"stop/answered": 6 / 12, "difference/max": 0.8, "failures": 0.0}


def test_numbers_that_are_not_finite_are_written_as_null(run, tmp_path):
    def strict(text):
        return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    trainer = run()
    trainer.log({"grad_norm": math.nan, "nested": [1.0, -math.inf]})
    row = strict((tmp_path / "metrics.jsonl").read_text())
    assert row["grad_norm"] is None and row["nested"] == [1.0, None]
    spoiled = trajectory(Turn(0, {}))
    spoiled.tree.add_turn([1], [2], [math.nan])
    write_json(tmp_path / "summary.json", {"after": {"reward": math.nan}})
    assert strict((tmp_path / "summary.json").read_text()) == {"after": {"reward": None}}


def test_a_streamed_evaluation_counts_each_row_once(run, questions):
    rows = IterableDataset.from_generator(lambda: iter(questions.select(range(5))))
    trainer = run(rows, **EVALUATES)
    trainer.evaluate()
    assert sorted(row.row["answer"][0] for row in trainer.eval_trajectories) == [f"Lima {n}" for n in range(5)]


def test_an_evaluation_of_other_rows_is_not_the_last_one(run, questions):
    """Whose conversations stand for the run's own evaluation rows."""
    trainer = run(questions.select([0, 1]), **EVALUATES)
    trainer.evaluate()
    assert trainer.evaluated_step == 0
    trainer.evaluate(questions.select([2, 3]), metric_key_prefix="test")
    assert trainer.evaluated_step is None
