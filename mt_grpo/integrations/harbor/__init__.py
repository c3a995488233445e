"""Tasks of Harbor, whose agent is the policy in a shell of the task's container; `pip install mt-grpo[harbor]`."""

from mt_grpo.integrations.harbor.env import HarborEnv, HarborTasks

__all__ = ["HarborEnv", "HarborTasks"]
