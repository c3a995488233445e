"""Tells at once whether a model or a dataset can be fetched from the Hugging Face Hub."""

from __future__ import annotations

import httpx
from huggingface_hub import constants

from mt_grpo.errors import ConfigError

PATIENCE = 10.0  # seconds


class HubUnreachable(ConfigError):
    """Something is not cached, and the Hub cannot be asked for it."""


def hub_fault() -> str | None:
    """
    Why the Hub cannot be asked, as the end of a sentence; `None` where it can. The Hub's own client tries six times
    for each file, in half a minute, before it says that there is no network.
    """
    if constants.HF_HUB_OFFLINE:
        return "`HF_HUB_OFFLINE` is set"
    try:
        httpx.head(constants.ENDPOINT, timeout=PATIENCE)
    except httpx.TransportError as error:
        return f"{constants.ENDPOINT} cannot be reached ({error})"
    return None


def check_hub(what: str) -> None:
    """
    Makes sure that something which is not in the cache can be fetched.

    Args:
        what (`str`): What is to be fetched, as the beginning of the sentence.

    Raises:
        HubUnreachable: If the Hub cannot be asked.
    """
    fault = hub_fault()
    if fault is not None:
        raise HubUnreachable(
            f"{what} is neither a folder here nor in the cache ({constants.HF_HUB_CACHE}), and cannot be fetched, "
            f"since {fault}: name a folder, or fetch it where the Hugging Face Hub can be reached (`hf download`)."
        )
