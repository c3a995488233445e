"""A few conversations of each log step, for trackers as a table and for the terminal as text."""

from __future__ import annotations

import importlib
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text
from torch import Tensor
from transformers import Trainer, TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

from mt_grpo.training.readable import as_markdown, numbers, plain, prompt_pieces, table_row, turn_pieces
from mt_grpo.training.rollout_batch import RolloutBatch
from mt_grpo.trajectory import Trajectory, visible

ROWS = 4
"""Conversations of a log step where `num_completions_to_print` is unset."""
STYLES = {"turn": "cyan", "assistant": "green"}
"""Of messages, by author; others are the environment's."""


class ConversationLog(TrainerCallback):
    """
    Shows conversations of the main process when metrics are logged: of the latest batch, and of the first batch of an
    evaluation, so that evaluations show the same questions. `report_to` gets a table of them, and with
    `log_completions` the terminal their text. `num_completions_to_print` says how many.

    Args:
        trainer (`Trainer`): Whose callbacks are the trackers.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.console = Console()
        """Where the terminal's are printed; another one where something else is drawn."""
        self._trainer = trainer
        self._latest: dict[str, tuple[RolloutBatch, Tensor]] = {}

    def observe(self, batch: RolloutBatch, advantages: Tensor) -> None:
        """Takes note of a batch of this process and the advantages of its trajectories, shape `(B, K)`."""
        if batch.mode == "train" or batch.mode not in self._latest:
            self._latest[batch.mode] = batch, advantages

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        latest = self._latest.pop("train" if self._trainer.model.training else "eval", None)
        if latest is None or not state.is_world_process_zero:
            return
        batch, advantages = latest
        ran = [index for index, trajectory in enumerate(batch.trajectories) if trajectory.stop_reason is not None]
        most = ROWS if args.num_completions_to_print is None else args.num_completions_to_print
        count = min(most, len(ran))
        chosen = [ran[number * len(ran) // count] for number in range(count)]
        if not chosen:
            return
        rows, texts = [], []
        for index in chosen:
            trajectory = batch.trajectories[index]
            of_turns = advantages[index, : len(trajectory.turns)].tolist()
            extra = {name: values[index] for name, values in batch.extra.items()}
            rows.append(table_row(state.global_step, trajectory, of_turns, extra))
            texts.append(_text(trajectory, of_turns))
        self._send(f"{batch.mode}/conversations", rows, state.global_step)
        if args.log_completions:
            self._print(texts, batch.mode, state.global_step)

    def _send(self, key: str, rows: list[dict[str, Any]], step: int) -> None:
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback):
                text = "\n---\n\n".join(map(as_markdown, rows))
                callback.tb_writer.add_text(key, text, step)
                callback.tb_writer.flush()
            elif isinstance(callback, TrackioCallback | WandbCallback):
                tracker = importlib.import_module("trackio" if isinstance(callback, TrackioCallback) else "wandb")
                table = tracker.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
                tracker.log({key: table, "train/global_step": step})  # as these callbacks log metrics

    def _print(self, texts: list[Text], mode: str, step: int) -> None:
        what = "step" if mode == "train" else "evaluation at step"
        for number, text in enumerate(texts, 1):
            self.console.print(Rule(f"{what} {step}: conversation {number} of {len(texts)}"), soft_wrap=False)
            self.console.print(text, soft_wrap=True)


def _text(trajectory: Trajectory, advantages: list[float]) -> Text:
    text = Text()
    for piece in [*prompt_pieces(trajectory), *turn_pieces(trajectory)]:
        text.append(plain([piece]) + "\n", style=STYLES.get(piece[0], "bright_black"))
    text.append(trajectory.stop_reason.value, style="bold")
    if trajectory.error:
        text.append(f": {visible(trajectory.error)}", style="red")
    if trajectory.where:
        text.append(f"\n{visible(trajectory.traceback)}", style="red")
    for kind, rewards in trajectory.rewards.items():
        for name, value in rewards.items():
            values = value if isinstance(value, list) else [value]
            text.append(f"\n  {kind} reward {visible(name)}: ", style="cyan").append(numbers(values))
    return text.append("\n  advantage per turn: ", style="cyan").append(numbers(advantages)).append("\n")
