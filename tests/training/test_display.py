"""What trackers and the terminal are shown of conversations; the trackers are real, and work offline."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from rich.console import Console
from support.models import lookup
from support.trainers import member
from transformers import PrinterCallback, ProgressCallback

from mt_grpo.app.train import run_training
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rewards import OutcomeReward
from mt_grpo.runlog import files
from mt_grpo.training import resuming
from mt_grpo.training.rollout_batch import as_text
from mt_grpo.training.step_log import (
    MOST_CHARACTERS,
    MOST_MESSAGES,
    FewerPrinter,
    FewerProgress,
    _as_markdown,
    _plain,
    _printed,
    _table_row,
    _turn_pieces,
    print_fewer,
)
from mt_grpo.trajectory import StopReason, Trajectory, Turn

EVALUATES = {"eval_strategy": "steps", "num_generations_eval": 1}


def shown(trainer) -> str:
    trainer.step_log.table.console = Console(file=io.StringIO(), width=80)
    trainer.train()
    return trainer.step_log.table.console.file.getvalue()


def test_the_terminal_shows_whole_conversations(build, capfd, tmp_path):
    """And those of the same question in each evaluation."""
    trainer = build(log_completions=True, num_completions_to_print=2, eval_steps=1, **EVALUATES)
    text = shown(trainer)
    assert "step 1: conversation 1 of 2" in text and "conversation 3" not in text
    first = text.split("step 1: conversation 1 of 2")[1].split("conversation 2 of 2")[0]
    for line in (
        "[user] What is",
        '--- turn 1 ---\n<tool>{"name": "lookup", "args": {"query": "Lima"}}</tool>\n[user] <result>',
        "about Lima",
        "--- turn 3 ---\n<answer>Lima</answer>\nanswered\n",
        "  outcome reward Answered: 1.4",
        "  turn reward Calls: 1, 1, -",
        "  advantage per turn: ",
    ):
        assert line in first, text
    of_steps = [text.split(f"evaluation at step {step}: conversation 1 of 2")[1] for step in (1, 2)]
    assert len({re.search(r"\[user\] What is \d", part)[0] for part in of_steps}) == 1
    assert "Completion" not in capfd.readouterr().out  # TRL's table
    assert list((tmp_path / "completions").glob("*.parquet"))


@pytest.mark.parametrize("options", [{}, {"log_completions": True, "num_completions_to_print": 0}])
def test_nothing_is_shown_where_none_are_asked_for(build, options):
    assert shown(build(max_steps=1, **options)) == ""


def test_arguments_of_several_types_are_written_to_parquet(build, tmp_path):
    """A model writes what it likes, also nothing, and a column of a Parquet file has one type."""
    arguments = [{"query": 3}, {"query": "Lima", "more": [{}]}, {}, {"query": 2**70}]

    def script(session, turn):
        call = {"name": "lookup", "arguments": arguments[member(session) % 4]}
        return "<answer>Lima</answer>" if turn else f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    given = {"env": None, "tools": [lookup], "reward_funcs": lambda completions, **columns: [0.0] * len(completions)}
    options = {"call_protocol": "native", "log_completions": True, "advantage_estimator": None, "max_steps": 1}
    build(script, **given, **options).train()
    (path,) = (tmp_path / "completions").glob("*.parquet")
    calls = [json.loads(row[0]["tool_calls"]) for row in pq.read_table(path)["completion"].to_pylist()]
    assert [call["function"]["arguments"] for (call,) in calls] == arguments


def test_contents_in_parts_are_text_in_parquet():
    parts = [{"type": "image", "image": b"..."}, {"type": "text", "text": "look\x1b"}]
    answer, result = {"role": "assistant", "content": None}, {"role": "tool", "content": "a cat", "name": "see"}
    written = as_text([{"role": "user", "content": parts}, answer | {"tool_calls": []}, result])
    assert written == [{"role": "user", "content": "[image]\nlook\\x1b"}, answer | {"tool_calls": "[]"}, result]
    assert as_text("a\x1b") == "a\\x1b"


def test_what_is_shown_of_a_conversation_is_bounded():
    messages = [{"role": "assistant", "content": f"\x1b[2J{index} " + "a" * 9000} for index in range(200)]
    turns = [Turn(n, message, replies=[{"role": "tool", "content": "b"}]) for n, message in enumerate(messages)]
    trajectory = Trajectory([{"role": "user", "content": "q"}], turns, stop_reason=StopReason.ANSWERED)
    assert len(_turn_pieces(trajectory)) == MOST_MESSAGES + 1
    row = _table_row(1, trajectory, [0.5] * 200, {"note": "n" * 9000})
    text = row["conversation"]
    assert len(text) < (MOST_MESSAGES + 1) * (MOST_CHARACTERS + 100) and len(row["note"]) < MOST_CHARACTERS + 100
    said = ("7009 characters left out", "384 messages left out", "--- turn 200 ---", "\\x1b[2J0 a")
    assert all(words in text for words in said) and "\x1b" not in text


def test_calls_of_a_model_and_its_thoughts_are_shown():
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "Perú"}}}
    message = {"role": "assistant", "reasoning_content": "hm", "content": "", "tool_calls": [call]}
    trajectory = Trajectory([], [Turn(0, message, replies=[{"role": "tool", "content": "Lima"}])])
    assert _plain(_turn_pieces(trajectory)) == '--- turn 1 ---\nhm\nsearch({"query": "Perú"})\n[tool] Lima'


def test_markdown_takes_conversations_literally():
    row = {"step": 3, "prompt": "# q", "conversation": "```\n**a**", "reward": 1.0, "error": "", "other": None}
    assert _as_markdown(row) == "    # q\n    ```\n    **a**\n\n- step: `3`\n- reward: `1.0`\n"


NEEDS = "this tracker is not installed; `pip install {}` in an environment of its own, beside this one, runs the test"


def test_tensorboard_gets_conversations_as_text(build, tmp_path):
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason=NEEDS.format("tensorboard")
    )
    build(report_to="tensorboard", eval_steps=2, **EVALUATES).train()
    (folder,) = (tmp_path / "runs").iterdir()
    events = reading.EventAccumulator(str(folder), {"tensors": 0}).Reload()
    train, evaluated = (events.Tensors(f"{mode}/conversations/text_summary") for mode in ("train", "eval"))
    assert [[event.step for event in each] for each in (train, evaluated)] == [[1, 2], [2]]
    text = train[0].tensor_proto.string_val[0].decode()
    assert text.count("- stop_reason: `answered`") == 4 and "- Calls: `1, 1, -`" in text
    assert '    <tool>{"name": "lookup"' in text and "train/reward" in events.Tags()["scalars"]


def test_what_people_read_is_printed_and_the_rest_is_not(capsys):
    read = ["loss", "reward", "rewards/mine/mean", "eval_reward", "eval_hard_reward", "epoch"]
    rest = ["sampling/ratio/max", "rewards/mine/std", "stops/length", "eval_stops/length"]
    assert _printed(dict.fromkeys([*read, *rest], 1.0)) == dict.fromkeys(read, 1.0)
    logs = {"reward": 0.5, "stops/length": 0.25, "train_runtime": 3.0}
    FewerPrinter().on_log(None, SimpleNamespace(is_local_process_zero=True), None, logs)
    assert capsys.readouterr().out == "{'reward': '0.5', 'train_runtime': '3'}\n" and len(logs) == 3


def test_printers_of_others_are_left_as_they_are():
    class Own(PrinterCallback):
        pass

    callbacks = [ProgressCallback(), PrinterCallback(), Own()]
    print_fewer(callbacks)
    assert list(map(type, callbacks)) == [FewerProgress, FewerPrinter, Own]


def test_what_a_log_says_of_progress_names_the_work_under_way(build, monkeypatch):
    """A step is one while it samples too, and a checkpoint is no part of the step after it."""
    said = []

    def lookup(query: str) -> str:
        """
        Finds a page.

        Args:
            query: What to find.
        """
        said.append(trainer.describe_progress().split(";")[0])
        return "about Lima"

    def clear(folder, args, clear=resuming.clear_checkpoint):
        said.append(trainer.describe_progress())
        clear(folder, args)

    monkeypatch.setattr(resuming, "clear_checkpoint", clear)
    env = MultiTurnToolEnv([lookup], protocol="learnt_tags", max_steps=3)
    trainer = build(env=env, max_steps=2, save_strategy="steps", save_steps=1, eval_steps=2, **EVALUATES)
    assert trainer.describe_progress() == "before the first step"
    trainer.train()
    found = [re.match(r"(\D+\d/2|evaluation): (waiting for checkpoint-\d$|\d of \d)", one).groups() for one in said]
    kinds = list(dict.fromkeys((where, what.partition("of")[1]) for where, what in found))
    first, second = [(f"step {number}/2", "of") for number in (1, 2)]
    assert kinds == [first, ("step 1/2", ""), second, ("evaluation", "of"), ("step 2/2", "")]


def test_the_proof_of_an_engine_is_waited_for_by_its_name(build, monkeypatch):
    said = []

    async def prove(engine, mixed_precision):
        said.append(trainer.step_log.activity.describe())

    monkeypatch.setattr("mt_grpo.training.trainer.prove_engine", prove)
    trainer = build(script=None, max_turn_length=8)
    trainer.rollout(1)
    assert said == ["waiting for the proof of the engine"]


@pytest.mark.parametrize("way", ["train", "evaluate", "command", "rollout"])
def test_a_slow_step_says_once_how_far_it_is(build, monkeypatch, way):
    """The reward waits until somebody has said that it is waited for."""
    said, watching = threading.Event(), set()
    monkeypatch.setattr(files, "QUIET", 0.01)

    def watchers():
        return sum(thread.name == "silence" for thread in threading.enumerate())

    class Log(io.StringIO):
        def write(self, text):
            if re.search(r"(step 1/1: |evaluation: |^)waiting for rewards", text):
                said.set()
            return super().write(text)

    class Slow(OutcomeReward):
        def score(self, trajectory, **row):
            watching.add(watchers())
            assert said.wait(30)
            return 1.0

    log = Log()
    trainer = build(rewards=((), (Slow(),)), max_steps=1)
    monkeypatch.setattr(sys, "stderr" if way == "rollout" else "stdout", log)
    if way == "command":
        trainer.eval_dataset = None
        run_training(trainer, {}, Console(file=log))
    else:
        getattr(trainer, way)(*([2] if way == "rollout" else []))
    assert said.is_set() and watching == {1} and watchers() == 0
