"""
ms-swift's multi-turn schedulers, gym environments and reward classes: files that subclass them run here with only
their import lines changed. Names and behaviour are those of its documentation; see docs/schedulers.md.
"""

from mt_grpo.compat.swift.builtin import RetryScheduler, ThinkingTipsScheduler, ToolCallScheduler
from mt_grpo.compat.swift.env import SchedulerEnv, SchedulerSource
from mt_grpo.compat.swift.gym import GymScheduler
from mt_grpo.compat.swift.orm import ORM, Accuracy
from mt_grpo.compat.swift.records import ResponseError
from mt_grpo.compat.swift.registry import envs, multi_turns, orms
from mt_grpo.compat.swift.scheduler import MultiTurnScheduler
from mt_grpo.compat.swift.types import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    Env,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
)

__all__ = [
    "Accuracy",
    "ChatCompletionResponse",
    "ChatCompletionResponseChoice",
    "ChatMessage",
    "Env",
    "GymScheduler",
    "MultiTurnScheduler",
    "ORM",
    "RequestConfig",
    "ResponseError",
    "RetryScheduler",
    "RolloutInferRequest",
    "RolloutOutput",
    "SchedulerEnv",
    "SchedulerSource",
    "ThinkingTipsScheduler",
    "ToolCallScheduler",
    "envs",
    "multi_turns",
    "orms",
]
