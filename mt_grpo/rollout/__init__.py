"""Prompts in, trajectories out."""

from mt_grpo.rollout.chat import ChatRenderer, TemplateError
from mt_grpo.rollout.engine import Engine, EngineError, RolloutError, Sample, Sampling
from mt_grpo.rollout.runner import Completion, Limits, RolloutRequest, RolloutRunner, derive_seed
from mt_grpo.rollout.scripted import ScriptedEngine

__all__ = [
    "ChatRenderer",
    "Completion",
    "Engine",
    "EngineError",
    "Limits",
    "RolloutError",
    "RolloutRequest",
    "RolloutRunner",
    "Sample",
    "Sampling",
    "ScriptedEngine",
    "TemplateError",
    "derive_seed",
]
