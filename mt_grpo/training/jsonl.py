"""Records as JSON that every reader takes; see `mt_grpo.runlog.jsonl`."""

from mt_grpo.runlog.jsonl import to_json

__all__ = ["to_json"]
