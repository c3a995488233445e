"""TRL's trainer with exact counts: means over trajectories, each evaluated row once, no run without a step."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather, is_peft_model
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers.integrations import TensorBoardCallback

from mt_grpo.errors import ConfigError
from mt_grpo.options import check_eval_batch
from mt_grpo.training.checkpoint import (
    batch_options,
    check_adapter,
    check_checkpoint,
    check_weights_fit,
    find_checkpoint,
)
from mt_grpo.training.checks import check_training, tell_device
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.evaluation import EvaluationRows
from mt_grpo.training.folder import left_by_runs
from mt_grpo.training.nonfinite import FiniteTrainer, check_weights
from mt_grpo.training.step_log.console import Activity
from mt_grpo.training.step_log.metrics import Tally
from mt_grpo.training.step_log.table import ConversationLog
from mt_grpo.training.step_log.warnings import AuditLog

logger = logging.getLogger(__name__)


class NumbersToTensorBoard(TensorBoardCallback):
    """Leaves out what has no number, such as the reward of a batch that failed, of which TensorBoard would warn."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        numbers = {name: value for name, value in (logs or {}).items() if value is not None}
        super().on_log(args, state, control, logs=numbers, **kwargs)


class CountedTrainer(FiniteTrainer):
    """TRL's `GRPOTrainer`; takes the same arguments."""

    args: MTGRPOConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        tell_device(self.args)
        self._earlier = left_by_runs(self.args.output_dir)
        self._tallies = {"train": Tally(), "eval": Tally()}
        self._evaluation: EvaluationRows | None = None
        self._evaluated: list[int] = []
        """Rows that count in each batch of the latest evaluation."""
        self.activity = Activity()
        self.conversations = ConversationLog(self)
        self.add_callback(self.conversations)
        self.audits = AuditLog()
        self.add_callback(self.audits)
        if any(isinstance(callback, TensorBoardCallback) for callback in self.callback_handler.callbacks):
            self.remove_callback(TensorBoardCallback)
            self.add_callback(NumbersToTensorBoard)
        self.num_completions_to_print = 0  # TRL's own table in the terminal, instead of which there is ours

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """
        Trains as TRL does. If the folder has records of an earlier run that is not resumed, warns and adds to them.

        Raises:
            ConfigError: If the options or the rows do not suffice for one step, or a stream ends before it.
            NonFiniteError: If weights are NaN or infinite at a checkpoint or at the end.
        """
        check_training(self.args, self.train_dataset)
        checkpoint = find_checkpoint(resume_from_checkpoint, self.args.output_dir)
        if checkpoint is not None:
            adapter = self.model.peft_config["default"].to_dict() if is_peft_model(self.model) else None
            check_adapter(Path(checkpoint), adapter)
            check_weights_fit(Path(checkpoint), self.accelerator.unwrap_model(self.model))
        earlier = [path.name for path in self._earlier if path.exists()]
        if earlier and not resume_from_checkpoint and self.is_world_process_zero():
            logger.warning(
                "`output_dir: %s` holds an earlier run (%s), to whose records this one adds, in place of "
                "conversations of the same steps: give each run an `output_dir` of its own.",
                self.args.output_dir,
                ", ".join(earlier[:3]),
            )
        self._earlier = []
        result = super().train(resume_from_checkpoint, *args, **kwargs)
        if self._initial_global_step == self.state.global_step < self.state.max_steps:
            raise ConfigError(
                f"The dataset ended before step {self.state.global_step + 1} of {self.state.max_steps}, so nothing "
                "was trained: give it more rows."
            )
        check_weights(self.model, self.accelerator, self.state.global_step)
        return result

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Weights that are tied to others are in no checkpoint, and are not missing."""
        tied = self.accelerator.unwrap_model(self.model).all_tied_weights_keys
        load_result.missing_keys[:] = [key for key in load_result.missing_keys if key not in tied]
        super()._issue_warnings_after_load(load_result)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL's; a model of a folder has no page to link to."""
        super().create_model_card(*args, **kwargs)
        card = Path(self.args.output_dir, "README.md")
        if self.is_world_process_zero():
            name = Path(self.model.config.name_or_path).name
            text = card.read_text(encoding="utf-8").replace("[None](https://huggingface.co/None)", f"`{name}`")
            text = text.replace('model="None"', f'model="{Path(self.args.output_dir).name}"')
            card.write_text(text, encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            rank, processes = self.accelerator.process_index, self.accelerator.num_processes
            check_checkpoint(Path(checkpoint), batch_options(self.args), rank, processes)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _init_training_state(self, max_steps: int, updates: int, num_epochs: int, *args: Any) -> tuple[int, int]:
        """Stops a resumed run that has taken all its steps; TRL's trainer would take one more."""
        begin = super()._init_training_state(max_steps, updates, num_epochs, *args)
        if self.state.global_step < max_steps:
            return begin
        if self.is_world_process_zero():
            logger.warning(
                "The run had finished: it is at step %d of %d, and takes no further step. Raise `max_steps` to train "
                "on.",
                self.state.global_step,
                max_steps,
            )
        return num_epochs, 0

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        self.audits.observe_gradient(norm, self.is_world_process_zero())
        return norm

    # Metrics: TRL's are means over batches, ours are sums until they are logged

    def _record(self, mode: str, metrics: Tally) -> None:
        self._tallies[mode].merge(metrics)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        metrics = self._metrics[mode]
        if mode == "eval":  # batches of an evaluation differ in size
            for name, values in metrics.items():
                if len(values) == len(self._evaluated):
                    metrics[name] = [_weighted_mean(values, self._evaluated)]
        metrics.update({name: [value] for name, value in self._tallies[mode].means().items()})
        self._tallies[mode] = Tally()
        super().log(logs, start_time)

    def get_eval_dataloader(self, eval_dataset: str | Dataset | IterableDataset | None = None) -> DataLoader:
        check_eval_batch(vars(self.args), self.args.world_size)
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        rows = self._evaluation = EvaluationRows(dataset, self.num_generations_eval, self.accelerator)
        self._evaluated = []
        return super().get_eval_dataloader(eval_dataset if rows.dataset is dataset else rows.dataset)

    def _filling(self, mode: str, size: int) -> list[bool]:
        """Per row of this process's batch, whether it only fills up the last batch of an evaluation."""
        if mode == "train" or self._evaluation is None:
            return [False] * size
        fills = self._evaluation.fills(size)
        counts = gather(torch.tensor([size - sum(fills)], device=self.accelerator.device))
        self._evaluated.append(int(counts.sum()))
        return fills


def _weighted_mean(values: list[float], weights: list[int]) -> float:
    """A mean without NaN, which marks batches to which a metric does not apply."""
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if not math.isnan(value)]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else math.nan
