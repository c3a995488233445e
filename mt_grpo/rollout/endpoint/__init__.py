"""A door to the policy for any agent: an OpenAI-compatible server, and what runs agents against it."""

from mt_grpo.rollout.endpoint.agent import AgentEnv, AgentSource
from mt_grpo.rollout.endpoint.client import AgentClient
from mt_grpo.rollout.endpoint.command import Command
from mt_grpo.rollout.endpoint.server import Endpoint
from mt_grpo.rollout.endpoint.verifiers import VerifiersSource

__all__ = ["AgentClient", "AgentEnv", "AgentSource", "Command", "Endpoint", "VerifiersSource"]
