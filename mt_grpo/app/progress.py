"""One progress bar for a whole run, instead of a line of sixty metrics a step."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback


class ProgressBar(TrainerCallback):
    """
    Shows step, reward and turns while the trainer works.

    Args:
        console (`Console`): Where to draw.
    """

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"),
            console=console,
        )
        self._task: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._task = self._progress.add_task("training", total=state.max_steps, metrics="")
            self._progress.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if self._task is not None and "reward" in logs:
            text = f"reward {logs['reward']:.3f}  turns {logs['turns/mean']:.2f}"
            self._progress.update(self._task, metrics=text)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._task is not None:  # `run_training` ends it as well, whatever ended the training
            self._progress.stop()
            self._task = None
