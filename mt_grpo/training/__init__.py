"""TRL's trainer with rollouts of several turns."""

from mt_grpo.errors import ConfigError
from mt_grpo.forward import token_logps
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.trainer import MTGRPOEnvTrainer

__all__ = ["ConfigError", "MTGRPOConfig", "MTGRPOEnvTrainer", "token_logps"]
