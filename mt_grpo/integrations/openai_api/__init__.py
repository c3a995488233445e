"""A door to the policy for any agent: an OpenAI-compatible server, and what runs agents against it."""

from mt_grpo.integrations.openai_api.agent import AgentEnv, AgentSource
from mt_grpo.integrations.openai_api.client import AgentClient
from mt_grpo.integrations.openai_api.command import Command
from mt_grpo.integrations.openai_api.server import Endpoint

__all__ = ["AgentClient", "AgentEnv", "AgentSource", "Command", "Endpoint"]
