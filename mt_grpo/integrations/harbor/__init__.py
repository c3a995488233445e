"""Tasks of Harbor, for the policy in a shell of the task's container, or for Harbor's own agents that ask it."""

from mt_grpo.integrations.harbor.env import HarborAgents, HarborEnv, HarborTasks

__all__ = ["HarborAgents", "HarborEnv", "HarborTasks"]
