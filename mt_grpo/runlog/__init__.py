"""What a run leaves of its conversations: files in Parquet, their index, and how to read them."""

from mt_grpo.runlog.reader import Run, open_run, read_trajectories
from mt_grpo.runlog.writer import Batch, RunLogError, RunWriter

__all__ = ["Batch", "Run", "RunLogError", "RunWriter", "open_run", "read_trajectories"]
