"""Log-probabilities with every token computed once: packed token trees through decoders of transformers."""

from mt_grpo.forward.logps import token_logps

__all__ = ["token_logps"]
