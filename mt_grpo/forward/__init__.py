"""Every token computed once: packed token trees through any decoder of transformers."""

from mt_grpo.forward.logps import token_logps

__all__ = ["token_logps"]
