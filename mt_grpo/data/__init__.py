"""Dataset loaders and the embedded task."""

from mt_grpo.data.loaders import (
    DatasetError,
    as_messages,
    check_apart,
    had_text_prompts,
    load_rows,
    with_contents_of_one_kind,
)

__all__ = ["DatasetError", "as_messages", "check_apart", "had_text_prompts", "load_rows", "with_contents_of_one_kind"]
