"""Metrics are means over what their names say, in training over a whole log window, in evaluation over every row."""

import json
import math

import pytest
from datasets import IterableDataset
from support.models import build_model, lookup
from support.trainers import SEARCH

from mt_grpo.app.train import write_json
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rewards import OutcomeReward, TurnReward
from mt_grpo.rollout import EngineError
from mt_grpo.runlog import read_trajectories
from mt_grpo.training.step_log.metrics import _rollout_metrics, _Tally, means_over_rows
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


def test_a_log_window_of_several_steps_is_one_mean(run, tmp_path, questions):
    """Which evaluations in between leave alone. A cause counts as zero in steps without it."""
    trainer = run(questions.select(range(4)), eval_strategy="steps", eval_steps=1, **EVALUATES)
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
    lengths = [
        line["turns"][0]["num_tokens"] for line in read_trajectories(tmp_path) if line["session"].startswith("train")
    ]
    expected = {"stop/answered": 1 / 3, "stop/max_steps": 2 / 3, "turn_1/reward": 1.0, "turn_2/reward": 2.0}
    expected |= {"turn_1/tool_calls": 8 / 12, "turn_2/tool_calls": 1.0}  # 12 trajectories have a first turn, 8 another
    expected |= {"turn_3/malformed": 1.0, "turn_1/length": sum(lengths) / 12}
    expected |= {"tokenization/another_template": 1 / 12, "forks/compact": 1 / 12}
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert sum(value for name, value in row.items() if name.startswith("stop/")) == pytest.approx(1)
    assert [each["eval_stop/answered"] for each in logged(tmp_path, "eval_stop/answered")] == [1.0] * 3


def test_an_evaluation_weighs_rows_not_batches(run, questions):
    """Two conversations of each of seven rows in batches of four: the last batch has two."""
    trainer, losses = run(questions.select(range(7)), **{**EVALUATES, "num_generations_eval": 2}), []
    compute = trainer.compute_loss
    trainer.compute_loss = lambda *given, **more: losses.append(compute(*given, **more)) or losses[-1]
    metrics, made = trainer.evaluate(), trainer.eval_trajectories
    answers = [len(trajectory.answer) for trajectory in made]
    lengths = [trajectory.turns[0].num_tokens for trajectory in made]
    assert len(answers) == 14 and len(set(answers)) > 1 and trainer.evaluated_step == 0
    assert metrics["eval_loss"] == pytest.approx((4 * sum(losses[:3]) + 2 * losses[3]).item() / 14, rel=1e-5)
    assert metrics["eval_rewards/Length/mean"] == metrics["eval_reward"] == pytest.approx(sum(answers) / 14)
    assert metrics["eval_completions/mean_length"] == metrics["eval_turn_1/length"] == pytest.approx(sum(lengths) / 14)
    assert trainer.evaluate()["eval_reward"] == metrics["eval_reward"]  # nothing is left of the first evaluation
    trainer.evaluate(questions.select([2, 3]), metric_key_prefix="test")
    assert trainer.evaluated_step is None  # its conversations do not stand for the run's own rows


def test_a_streamed_evaluation_counts_each_row_once(run, questions):
    trainer = run(IterableDataset.from_generator(lambda: iter(questions.select(range(5)))), **EVALUATES)
    trainer.evaluate()
    assert sorted(row.row["answer"][0] for row in trainer.eval_trajectories) == [f"Lima {n}" for n in range(5)]


def trajectory(*turns: Turn) -> Trajectory:
    return Trajectory([], list(turns), stop_reason=StopReason.MAX_STEPS)


CALL, FAILED = ToolCall("lookup", executed=True), ToolCall("lookup", error="timeout")
UNREAD = trajectory(*(Turn(index, {}, error="neither a call nor an answer") for index in range(5)))
COUNTED = ("tools/call_frequency", "tools/failure_frequency", "tools/malformed_frequency", "turn_1/failures")
COUNTED += ("turn_1/tool_calls",)


@pytest.mark.parametrize(
    ("trajectories", "counted"),
    [
        ([UNREAD], [0, 0, 5, 0, 0]),
        ([trajectory(Turn(0, {}, [CALL, FAILED]), Turn(1, {}, [CALL])), UNREAD], [3 / 2, 1 / 3, 5 / 2, 1 / 2, 1]),
    ],
)
def test_calls_are_counted_and_turns_without_one_are_not(trajectories, counted):
    means = _rollout_metrics(trajectories).means()
    assert [means[name] for name in COUNTED] == counted


def test_a_tally_adds_up_what_batches_have_and_have_not():
    whole = _Tally()
    for size, answered in ((8, 6), (4, 0)):
        batch = _Tally()
        batch.count("trajectory", size)
        if answered:
            batch.add("stop/answered", answered, per="trajectory")
        batch.largest("difference/max", size / 10)
        whole.merge(batch)
    whole.add("failures", 0, per="call")
    assert whole.means() == {"stop/answered": 6 / 12, "difference/max": 0.8, "failures": 0.0}
    metrics = {"entropy": [1.0, 4.0], "kl": [math.nan, 3.0], "of one batch": [1.0]}
    assert means_over_rows(metrics, [4, 2]) == {"entropy": [2.0], "kl": [3.0]}


def test_numbers_that_are_not_finite_are_written_as_null(run, tmp_path):
    def strict(name):
        return json.loads((tmp_path / name).read_text(), parse_constant=lambda one: pytest.fail(f"{one} is not JSON"))

    run().log({"grad_norm": math.nan, "nested": [1.0, -math.inf]})
    row = strict("metrics.jsonl")
    assert row["grad_norm"] is None and row["nested"] == [1.0, None]
    write_json(tmp_path / "summary.json", {"after": {"reward": math.nan}})
    assert strict("summary.json") == {"after": {"reward": None}}


@pytest.mark.parametrize("turn", ["", EngineError("the server is gone")], ids=["nothing said", "failed"])
def test_tokens_that_are_not_trained_are_in_no_mean(build, questions, tokenizer, tmp_path, turn):
    """Where no conversation of a process has two tokens, TRL would take its columns for one value per sequence."""
    teacher = {"model": "self", "teacher_model_kind": "base", "sees": ["answer"]}
    options = {"teacher": teacher, "distillation_coef": 0.5, "distillation_topk": 2, "forward": "padded", "beta": 0.1}
    options |= {"model": str(tmp_path / "model"), "eval_dataset": questions.select(range(2))}
    build_model(tokenizer).save_pretrained(tmp_path / "model")
    trainer = build(lambda session, number: turn, **EVALUATES, **options)
    assert trainer.evaluate()["eval_kl"] == 0
