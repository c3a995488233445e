"""What an agent gets to reach the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class AgentClient:
    """
    Where an agent's conversation takes place, for any client that speaks OpenAI's language.

    Args:
        base_url (`str`): OpenAI's base URL; it ends in `/v1`.
        api_key (`str`): The key for it, which finds no other conversation.
        session (`str`): Name of the conversation.
        add_session (`Callable`): Gives the conversation a further name, which requests may have in `X-Session-ID`.
    """

    base_url: str
    api_key: str = field(repr=False)
    session: str
    add_session: Callable[[str], None] = field(repr=False)
    _opened: list[Any] = field(default_factory=list, repr=False)

    @property
    def host(self) -> str:
        """Where the server is."""
        return urlsplit(self.base_url).hostname

    def openai(self, **options: Any) -> Any:
        """
        An `openai.AsyncOpenAI`, closed after the conversation.

        Args:
            **options: Further arguments of it, such as `timeout` and `max_retries`.

        Raises:
            ImportError: If the package is missing; `pip install "mt-grpo[openai]"` brings it.
        """
        import openai

        if "http_client" not in options:  # loopback needs neither a proxy nor certificates, which take long to load
            options["http_client"] = openai.DefaultAsyncHttpxClient(trust_env=False, verify=False)
        self._opened.append(openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, **options))
        return self._opened[-1]

    async def close(self) -> None:
        """Closes what `openai` opened."""
        while self._opened:
            await self._opened.pop().close()
