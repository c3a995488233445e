"""Small things that ms-swift's files import from its `template` and `utils`."""

from __future__ import annotations

import logging

from mt_grpo.trajectory import Message

Messages = list[Message]


def get_logger() -> logging.Logger:
    """The logger of plugins."""
    return logging.getLogger("mt_grpo.plugins")


def remove_response(messages: Messages) -> str | None:
    """Takes off the assistant's message at the end, where there is one; its content."""
    return messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else None
