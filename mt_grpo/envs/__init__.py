"""What the model acts in."""

from mt_grpo.envs.multi_turn_tool_env import MultiTurnToolEnv

__all__ = ["MultiTurnToolEnv"]
