"""What a run leaves of its conversations: files in Parquet, their index, and how to read them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mt_grpo.runlog.reader import Run, open_run, read_trajectories
    from mt_grpo.runlog.writer import Batch, RunLogError, RunWriter

__all__ = ["Batch", "Run", "RunLogError", "RunWriter", "open_run", "read_trajectories"]


def __getattr__(name: str) -> object:
    """Who writes a run needs nothing that reads one."""
    if name in ("Batch", "RunLogError", "RunWriter"):
        from mt_grpo.runlog import writer

        return getattr(writer, name)
    if name in __all__:
        from mt_grpo.runlog import reader

        return getattr(reader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
