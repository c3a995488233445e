"""A door to the policy for any agent: an OpenAI-compatible server, and what runs agents against it."""

from mt_grpo.integrations.openai_api.agent import AgentClient, AgentEnv, AgentSource, Command
from mt_grpo.integrations.openai_api.server import Endpoint

__all__ = ["AgentClient", "AgentEnv", "AgentSource", "Command", "Endpoint"]
