"""
ms-swift's multi-turn schedulers, gym environments and reward classes: files that subclass them run here as they are,
also under ms-swift's own module names (`mt_grpo.peers`). Names and behaviour are those of its documentation; see
docs/schedulers.md.
"""

from mt_grpo.integrations.swift.builtin import RetryScheduler, ThinkingTipsScheduler, ToolCallScheduler
from mt_grpo.integrations.swift.engine import Template
from mt_grpo.integrations.swift.env import SchedulerEnv, SchedulerSource
from mt_grpo.integrations.swift.gym import GymScheduler
from mt_grpo.integrations.swift.names import Messages, get_logger, remove_response
from mt_grpo.integrations.swift.openenv import OpenEnvScheduler, OpenEnvWrapper
from mt_grpo.integrations.swift.orm import ORM, Accuracy, AsyncORM
from mt_grpo.integrations.swift.records import ResponseError
from mt_grpo.integrations.swift.registry import envs, multi_turns, orms, rm_plugins
from mt_grpo.integrations.swift.reward_models import DefaultRMPlugin, TransformersEngine, to_device
from mt_grpo.integrations.swift.scheduler import MultiTurnScheduler
from mt_grpo.integrations.swift.types import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    Env,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
)

GYMScheduler, MathAccuracy = GymScheduler, Accuracy
RolloutScheduler, InferRequest = MultiTurnScheduler, RolloutInferRequest
"""Names that ms-swift has for these."""

__all__ = [
    "AsyncORM",
    "DefaultRMPlugin",
    "GYMScheduler",
    "InferRequest",
    "MathAccuracy",
    "Messages",
    "OpenEnvScheduler",
    "OpenEnvWrapper",
    "RolloutScheduler",
    "Template",
    "TransformersEngine",
    "get_logger",
    "remove_response",
    "rm_plugins",
    "to_device",
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
