"""What a run leaves behind: trajectories and metrics, one JSON object per line, written as soon as they exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from mt_grpo.training.jsonl import to_json
from mt_grpo.training.rollout_batch import RolloutBatch
from mt_grpo.trajectory import Trajectory


class TrajectoryWriter:
    """
    Appends trajectories to `trajectories.jsonl` in a folder; the ranks of a distributed run write a file each.

    Args:
        folder (`str`): Output folder.
        rank (`int`): Process index.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self.path = Path(folder) / ("trajectories.jsonl" if rank == 0 else f"trajectories.rank{rank}.jsonl")

    def write_batch(self, batch: RolloutBatch, step: int) -> None:
        """Appends the trajectories of a batch; those that were sampled again have the mode `"discarded"`."""
        self.write(batch.discarded, "discarded", step)
        self.write(batch.counted, batch.mode, step)

    def write(self, trajectories: list[Trajectory], mode: str, step: int) -> None:
        """Appends trajectories with their mode (`"train"`, `"eval"` or `"discarded"`) and their optimiser step."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [to_json({"step": step, "mode": mode, **trajectory.to_dict()}) for trajectory in trajectories]
        # half a character, which an environment may write, as the escape that JSON has for it
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write("".join(line + "\n" for line in lines))


class MetricsCallback(TrainerCallback):
    """Appends what the trainer logs to `metrics.jsonl` in its output folder."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if state.is_world_process_zero:
            path = Path(args.output_dir) / "metrics.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(to_json({"step": state.global_step, **logs}) + "\n")
