"""GRPO for multi-turn tool-using agents, as a plugin to Hugging Face TRL."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mt_grpo.forward import token_logps
    from mt_grpo.token_tree import TokenTree
    from mt_grpo.training.config import MTGRPOConfig
    from mt_grpo.training.trainer import MTGRPOEnvTrainer
    from mt_grpo.trajectory import Trajectory

__version__ = "0.1.0"

__all__ = ["MTGRPOConfig", "MTGRPOEnvTrainer", "TokenTree", "Trajectory", "token_logps"]

_MODULES = {
    "MTGRPOConfig": "mt_grpo.training.config",
    "MTGRPOEnvTrainer": "mt_grpo.training.trainer",
    "TokenTree": "mt_grpo.token_tree",
    "Trajectory": "mt_grpo.trajectory",
    "token_logps": "mt_grpo.forward",
}


def __getattr__(name: str) -> object:
    """Imports what `__all__` names when it is first asked for, because torch and TRL take seconds to import."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
