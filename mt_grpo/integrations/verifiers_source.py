"""Environments of verifiers: their loops talk to the policy over HTTP, and their rewards are the conversation's."""

from __future__ import annotations

from typing import Any

from datasets import Dataset

from mt_grpo.envs.env import Outcome
from mt_grpo.envs.protocols import CallProtocol
from mt_grpo.integrations.openai_api.agent import AgentClient, AgentSource
from mt_grpo.integrations.verifiers import load_environment


class VerifiersSource(AgentSource):
    """
    Makes the environments of one of verifiers': an `EnvSource`.

    Args:
        name (`str`): Of the environment.
        config (`dict`, *optional*): Its options, see `mt_grpo.integrations.verifiers.load_environment`.
        protocol (`CallProtocol`, *optional*): See `AgentSource`.

    Raises:
        ConfigError: If verifiers is not installed, or cannot load the environment.
    """

    def __init__(self, name: str, config: dict[str, Any] | None = None, protocol: CallProtocol | None = None) -> None:
        self.environment = load_environment(name, config or {})
        super().__init__(self._play, protocol)

    async def _play(self, row: dict[str, Any], client: AgentClient) -> Outcome:
        return await self.environment.play(row, client, self.endpoint.relay_key)

    def rows(self, split: str = "train") -> Dataset:
        """Its own data: `train`, or `eval`."""
        return Dataset.from_list(self.environment.rows(split))
