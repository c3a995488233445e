"""TRL's trainer whose checkpoints hold the generated batch, so that a resumed run does not sample another one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from mt_grpo.training.checkpoint import batch_options, is_whole, load_rollouts, save_rollouts
from mt_grpo.training.counted import CountedTrainer
from mt_grpo.training.reference import load_reference, save_reference


class CheckpointedTrainer(CountedTrainer):
    """TRL's `GRPOTrainer`; takes the same arguments."""

    def save_checkpoint(self) -> Path:
        """
        Writes a checkpoint of the last finished step, also if training stopped in the middle of the next one. A
        checkpoint that is already there is kept. This is a collective call.

        Returns:
            `Path`: The checkpoint's folder.
        """
        folder = self._checkpoint_folder()
        saved = is_whole(folder)
        self.accelerator.wait_for_everyone()  # every process looks before one writes
        if not saved:
            self._step -= self._step % self.args.gradient_accumulation_steps  # an unfinished step begins again
            self._save_checkpoint(self.model, trial=None)
        return folder

    def _checkpoint_folder(self, trial: Any = None) -> Path:
        return Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = self._checkpoint_folder(trial)
        try:
            super()._save_checkpoint(model, trial)
            save_reference(folder, self.args, self.accelerator, self.ref_model)
            options = batch_options(self.args)
            save_rollouts(folder, self.accelerator, self._step, self._buffered_inputs, options)
        except BaseException:  # a checkpoint is whole or absent, whatever stops its writing
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            load_reference(Path(checkpoint), self.args, self.accelerator, self.ref_model)
            self._step, self._buffered_inputs = load_rollouts(Path(checkpoint), self.accelerator)
