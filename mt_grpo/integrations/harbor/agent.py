"""The policy as an agent of Harbor's: a trial starts the container, lets it work there, and verifies what it did."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

CONVERSATIONS: dict[str, Callable[[BaseEnvironment], Awaitable[None]]] = {}
"""What the agent of a trial does in its container, by the key that its configuration has."""


class PolicyAgent(BaseAgent):
    """
    Holds one conversation of a run.

    Args:
        conversation (`str`): Its key in `CONVERSATIONS`.
    """

    def __init__(self, *arguments: Any, conversation: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._conversation = conversation

    @staticmethod
    def name() -> str:
        return "mt-grpo"

    def version(self) -> str:
        return metadata.version("mt-grpo")

    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing is installed: commands come from outside."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Holds the conversation in the started container."""
        await CONVERSATIONS[self._conversation](environment)
