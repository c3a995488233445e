"""A server through which any agent talks to the policy, with OpenAI's and Anthropic's APIs, and what runs agents."""

from mt_grpo.integrations.openai_api.agent import AgentClient, AgentEnv, AgentSource, Command
from mt_grpo.integrations.openai_api.server import Endpoint

__all__ = ["AgentClient", "AgentEnv", "AgentSource", "Command", "Endpoint"]
