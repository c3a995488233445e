"""What the agent is asked: dataset loaders and the embedded task."""

from mt_grpo.data.loaders import DatasetError, load_rows

__all__ = ["DatasetError", "load_rows"]
