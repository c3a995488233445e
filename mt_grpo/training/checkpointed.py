"""TRL's trainer whose checkpoints hold the generated batch, so that a resumed run does not sample another one."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any
from zlib import crc32

from datasets import Dataset, IterableDataset
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from mt_grpo.envs.source import tool_names
from mt_grpo.runlog.files import to_json
from mt_grpo.training.checkpoint import (
    batch_options,
    is_whole,
    load_rollouts,
    save_rollouts,
    says_what_cannot_be_written,
)
from mt_grpo.training.counted import CountedTrainer
from mt_grpo.training.reference import load_reference, save_reference

MADE_WITH = "made_with.json"
"""What a checkpoint says about the run that made it: tools, rewards with their weights, and data."""
ROWS = 8
"""Rows at each end of a dataset by which it is known again."""

logger = logging.getLogger(__name__)


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
            with says_what_cannot_be_written(folder, self.args.output_dir):
                super()._save_checkpoint(model, trial)
                save_reference(folder, self.args, self.accelerator, self.ref_model)
                if self.is_world_process_zero():
                    (folder / MADE_WITH).write_text(to_json(self._made_with()), encoding="utf-8")
                options = batch_options(self.args)
                save_rollouts(folder, self.accelerator, self._step, self._buffered_inputs, options)
        except BaseException:  # a checkpoint is whole or absent, whatever stops its writing
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            if self.is_world_process_zero():
                self._tell_differences(Path(checkpoint) / MADE_WITH)
            load_reference(Path(checkpoint), self.args, self.accelerator, self.ref_model)
            self._step, self._buffered_inputs = load_rollouts(Path(checkpoint), self.accelerator)

    def _made_with(self) -> dict[str, str]:
        """What the run learns from, in words."""
        rewards = (f"{reward['name']} ({reward['weight']:g})" for reward in self.records.rewards)
        return {
            "tools": ", ".join(tool_names(self.env)) or "none",
            "rewards": ", ".join(rewards),
            "system_prompt": repr(self.args.system_prompt),
            "data": _known_by(self.train_dataset),
        }

    def _tell_differences(self, path: Path) -> None:
        """Warns where a checkpoint was made with other tools, rewards or data; one that does not say is taken."""
        if not path.is_file():
            return
        made, here = json.loads(path.read_text(encoding="utf-8")), self._made_with()
        other = [
            f"{name}: {made[name]}; here {here[name]}" for name in here if made.get(name, here[name]) != here[name]
        ]
        if other:
            logger.warning(
                "The checkpoint %s was made with other %s. The resumed run goes on with what is here.",
                path.parent,
                " | ".join(other),
            )


def _known_by(rows: Dataset | IterableDataset) -> str:
    """A dataset as its number of rows, and a digest of those at its ends."""
    if isinstance(rows, IterableDataset):
        return "a stream"
    ends = sorted({*range(min(ROWS, len(rows))), *range(max(0, len(rows) - ROWS), len(rows))})
    digest = crc32(to_json([rows[index] for index in ends]).encode("utf-8", "backslashreplace"))
    return f"{len(rows)} rows ({digest:08x})"
