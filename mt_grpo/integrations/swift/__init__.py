"""
ms-swift's multi-turn schedulers, gym environments and reward classes, see docs/schedulers.md. Files that subclass them
run here unchanged, also under ms-swift's own module names (`mt_grpo.imports`).
"""

from mt_grpo.integrations.swift.builtin import (
    GymScheduler,
    OpenEnvScheduler,
    OpenEnvWrapper,
    RetryScheduler,
    ThinkingTipsScheduler,
    ToolCallScheduler,
)
from mt_grpo.integrations.swift.env import SchedulerEnv, SchedulerSource
from mt_grpo.integrations.swift.rewards import (
    ORM,
    Accuracy,
    AsyncORM,
    DefaultRMPlugin,
    TransformersEngine,
    orms,
    rm_plugins,
    to_device,
)
from mt_grpo.integrations.swift.scheduler import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    Env,
    Messages,
    MultiTurnScheduler,
    RequestConfig,
    ResponseError,
    RolloutInferRequest,
    RolloutOutput,
    Template,
    envs,
    get_logger,
    multi_turns,
    remove_response,
)

# ms-swift's names of the same classes
GYMScheduler, MathAccuracy = GymScheduler, Accuracy
RolloutScheduler, InferRequest = MultiTurnScheduler, RolloutInferRequest

__all__ = ["ORM", "Accuracy", "AsyncORM", "DefaultRMPlugin", "MathAccuracy", "TransformersEngine", "orms"]
__all__ += ["ChatCompletionResponse", "ChatCompletionResponseChoice", "ChatMessage", "InferRequest", "Messages"]
__all__ += ["RequestConfig", "ResponseError", "RolloutInferRequest", "RolloutOutput", "Template", "rm_plugins"]
__all__ += ["Env", "GYMScheduler", "GymScheduler", "OpenEnvScheduler", "OpenEnvWrapper", "envs"]
__all__ += ["MultiTurnScheduler", "RetryScheduler", "RolloutScheduler", "ThinkingTipsScheduler", "ToolCallScheduler"]
__all__ += ["SchedulerEnv", "SchedulerSource", "get_logger", "multi_turns", "remove_response", "to_device"]
