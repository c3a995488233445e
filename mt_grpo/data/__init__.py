"""Dataset loaders and the embedded task."""

from mt_grpo.data.loaders import load_rows
from mt_grpo.data.schemas import DatasetError

__all__ = ["DatasetError", "load_rows"]
