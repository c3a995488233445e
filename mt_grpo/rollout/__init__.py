"""Rollouts: from prompts to trajectories."""

from mt_grpo.errors import EngineError
from mt_grpo.rollout.chat_template import TemplateError
from mt_grpo.rollout.engines import Engine, RolloutError, Sample, SamplingParams, ScriptedEngine
from mt_grpo.rollout.policy import RolloutLimits, RolloutRequest, derive_seed
from mt_grpo.rollout.rendering import ChatRenderer
from mt_grpo.rollout.runner import RolloutRunner, generate
from mt_grpo.rollout.token_row import TokenRow

Limits, Sampling = RolloutLimits, SamplingParams
"""Short names of the two above."""

__all__ = [
    "Limits",
    "Sampling",
    "ChatRenderer",
    "TokenRow",
    "Engine",
    "EngineError",
    "RolloutLimits",
    "RolloutError",
    "RolloutRequest",
    "RolloutRunner",
    "Sample",
    "SamplingParams",
    "ScriptedEngine",
    "TemplateError",
    "derive_seed",
    "generate",
]
