"""Log-probabilities with every token computed once: packed token trees through decoders of transformers."""

from mt_grpo.forward.lm_head import Truncation
from mt_grpo.forward.logps import token_logps

__all__ = ["Truncation", "token_logps"]
