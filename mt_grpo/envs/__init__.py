"""Environments: the rules of a conversation."""

from mt_grpo.envs.env import ConversationEnded, Env, Outcome, Policy, Step, StepEnv
from mt_grpo.envs.source import EnvLike, EnvSource
from mt_grpo.envs.tool_env import MultiTurnToolEnv

__all__ = ["ConversationEnded", "Env", "EnvLike", "EnvSource", "MultiTurnToolEnv", "Outcome", "Policy", "Step"]
__all__ += ["StepEnv"]
