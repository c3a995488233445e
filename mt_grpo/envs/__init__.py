"""Environments: the rules of a conversation."""

from mt_grpo.envs.multi_turn_tool_env import MultiTurnToolEnv

__all__ = ["MultiTurnToolEnv"]
