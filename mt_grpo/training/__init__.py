"""Advantages in, weights out. The only room that imports TRL."""

from mt_grpo.training.config import ConfigError, MTGRPOConfig
from mt_grpo.training.logps import token_logps
from mt_grpo.training.trainer import MTGRPOEnvTrainer

__all__ = ["ConfigError", "MTGRPOConfig", "MTGRPOEnvTrainer", "token_logps"]
