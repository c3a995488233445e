"""
Shows the progress of a run: a bar in a terminal, elsewhere a line for each step and each evaluation. Apart from
`train`, which would be the same without it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text
from transformers import TrainerCallback

from mt_grpo.training.trainer import MTGRPOEnvTrainer

REFRESHES = 4
"""Of the bar, per second."""


class RunProgress(TrainerCallback):
    """
    Shows step, reward, loss, turns, seconds and the time that is left; in a terminal also what the step waits for.
    Only the main process shows anything.

    Args:
        trainer (`MTGRPOEnvTrainer`): The run.
        console (`Console`): Where to show it.
    """

    def __init__(self, trainer: MTGRPOEnvTrainer, console: Console) -> None:
        self._console = console
        self._shows = trainer.accelerator.is_main_process
        self._bar = _Bar(trainer, console) if console.is_terminal and self._shows else None
        self._step_log = trainer.step_log
        self._begun = time.monotonic()
        self._first_step = 0

    def begin(self) -> None:
        """Takes the terminal."""
        if self._bar is not None:
            self._bar.start()

    def end(self) -> None:
        """Gives the terminal back."""
        if self._bar is not None:
            self._bar.stop()

    @contextmanager
    def measuring(self, label: str) -> Iterator[None]:
        """The agent is measured in the block."""
        if self._bar is None:
            yield
            return
        task = self._bar.add_task(f"measuring the agent {label} training", total=None, count="")
        try:
            yield
        finally:
            self._bar.remove_task(task)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begun, self._first_step = time.monotonic(), state.global_step
        if self._bar is not None:
            self._bar.follow(state.global_step, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.follow(state.global_step, state.max_steps, self._left(state))
        elif self._shows and not control.should_log:
            self._print(state, [f"{self._step_log.latest.seconds:.1f} s"])

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if not self._shows:
            return
        if "eval_reward" in logs:
            seconds = next(value for name, value in logs.items() if name.endswith("_runtime"))
            words = [_number("reward", logs["eval_reward"]), _number("turns", logs["eval_turns/mean"], 2)]
            self._print(state, [*words, f"{seconds:.1f} s"], "evaluation at ")
        elif "reward" in logs:
            loss = [_number("loss", logs["loss"], 4)] if "loss" in logs else []
            words = [_number("reward", logs["reward"]), *loss, _number("turns", logs["turns/mean"], 2)]
            if self._bar is not None:
                self._bar.show("  ".join(words))
            else:
                self._print(state, [*words, *([f"{self._step_log.latest.seconds:.1f} s"] if loss else [])])

    def _print(self, state: Any, words: list[str], prefix: str = "") -> None:
        width = len(str(state.max_steps))
        left = [] if prefix else [self._left(state)]
        line = "  ".join([f"{prefix}step {state.global_step:>{width}}/{state.max_steps}", *words, *filter(None, left)])
        self._console.print(line, highlight=False, markup=False)

    def _left(self, state: Any) -> str:
        """The time that the remaining steps take, at the pace of the steps that this process did."""
        done, left = state.global_step - self._first_step, state.max_steps - state.global_step
        if not done or not left:
            return ""
        return f"{timedelta(seconds=round((time.monotonic() - self._begun) / done * left))} left"


class _Bar(Progress):
    """A bar of steps, below it the latest metrics, and what the step waits for, looked up whenever it is drawn."""

    def __init__(self, trainer: MTGRPOEnvTrainer, console: Console) -> None:
        self._activity = trainer.step_log.activity
        processes = trainer.accelerator.num_processes
        self._whose = f" (process 1 of {processes})" if processes > 1 else ""
        self._training: TaskID | None = None
        self._metrics = ""
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}", style="green"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=REFRESHES,
        )

    def follow(self, step: int, steps: int, left: str = "") -> None:
        """Training has come to a step; `left` is the time that is left, in words."""
        if self._training is None:
            self._training = self.add_task("training", total=steps, count="")
        description = f"training, {left}" if left else "training"
        self.update(self._training, completed=step, description=description, count=f"{step}/{steps}")

    def show(self, metrics: str) -> None:
        """Shows metrics below the bar."""
        self._metrics = metrics
        self.refresh()

    def get_renderables(self) -> Iterable[RenderableType]:
        """What rich draws: the bar, and the lines below it, none wider than a terminal of 80 columns shows."""
        yield self.make_tasks_table(self.tasks)
        if self._metrics:
            yield Text(f"  {self._metrics}", no_wrap=True, overflow="ellipsis")
        if self.tasks:
            activity = f"  {self._activity.describe()}{self._whose}"
            yield Text(activity, style="bright_black", no_wrap=True, overflow="ellipsis")


def _number(name: str, value: float | None, digits: int = 3) -> str:
    """A metric in words; of a batch to which it does not apply there is no number."""
    return f"{name} {'-' if value is None else format(value, f'.{digits}f')}"
