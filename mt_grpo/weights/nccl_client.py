"""TRL's client of a server, for the transfer by NCCL, with the key of our server."""

from __future__ import annotations

from typing import Any

from trl.generation.vllm_client import VLLMClient

from mt_grpo.rollout.engines.vllm.http import find_key


class KeyedClient(VLLMClient):
    """
    Sends the server's key with every request.

    Args:
        args, options: Those of TRL's client.
        api_key (`str`, *optional*): The key; by default that of `find_key`.
    """

    def __init__(self, *args: Any, api_key: str | None, **options: Any) -> None:
        self._api_key = api_key
        super().__init__(*args, **options)

    def check_server(self, *args: Any, **kwargs: Any) -> None:
        """Finds the key, which exists when the server is up. TRL calls this before any request that needs the key."""
        super().check_server(*args, **kwargs)
        key = self._api_key or find_key(self.base_url)
        if key is not None:
            self.session.headers["Authorization"] = f"Bearer {key}"
