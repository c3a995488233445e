"""What the name of a model or a dataset says of itself."""

from __future__ import annotations

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
"""The files that a dataset can be, each with the name of its reader in `datasets`."""


def looks_like_path(name: str) -> bool:
    """Whether a name can only be that of a file or a folder, and not a Hub id."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1
