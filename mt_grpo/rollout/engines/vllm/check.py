"""Checks that a vLLM server can serve a run: its model, its vocabulary, and the flags that the trainer needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from mt_grpo.rollout.engines.vllm.http import RequestFailed, ServerSetupError

_PROBE = 'The 3 quick-brown foxes\n\tsaid: «naïve café» → 東京 {"x": 1.5}'

Call = Callable[..., Awaitable[Any]]


async def check_server(url: str, model: str | None, tokenizer: Any, get: Call, post: Call) -> int:
    """
    Compares a server with what the trainer expects.

    Args:
        url (`str`): URL of the server, for messages.
        model (`str`, *optional*): Name or path of the model it must hold.
        tokenizer: The trainer's tokenizer. It must encode a text and every added token as the server does.
        get, post (`Callable`): Coroutine functions that call an endpoint of the server by its path.

    Returns:
        `int`: The server's context length in tokens.

    Raises:
        ServerSetupError: If they do not fit together.
    """
    try:
        models = (await get("/v1/models"))["data"]
    except RequestFailed as error:
        if error.status == 401:
            raise ServerSetupError(
                f"The vLLM server at {url} refuses the API key: start server and trainer with the same "
                "`VLLM_API_KEY`, or both without it, on one machine and as one user."
            ) from (error)
        raise
    served = next((entry for entry in models if model is None or _same(model, entry)), None)
    if served is None:
        raise ServerSetupError(
            f"The vLLM server at {url} serves {models[0]['root']!r}, not {model!r}: start it with this run's recipe."
        )
    text = _PROBE + "".join(sorted(tokenizer.get_added_vocab()))
    body = {"model": served["id"], "prompt": text, "add_special_tokens": False}
    if (await post("/tokenize", body))["tokens"] != tokenizer.encode(text, add_special_tokens=False):
        raise ServerSetupError(
            f"The tokenizer of the vLLM server at {url} encodes text differently from the trainer's: start the server "
            "with the model and the tokenizer of this run's recipe."
        )
    await _check_flags(url, get)
    return served["max_model_len"]


async def _check_flags(url: str, get: Call) -> None:
    try:
        config = (await get("/server_info?config_format=json"))["vllm_config"]
    except RequestFailed as error:
        if error.status != 404:
            raise
        raise ServerSetupError(
            f"The vLLM server at {url} has no endpoints for weight sync: start it with `mt-grpo serve`, or with "
            "`VLLM_SERVER_DEV_MODE=1` in its environment and `--middleware mt_grpo.vllm_plugin.guard.Guard`."
        ) from error
    mode = config["model_config"]["logprobs_mode"]
    if mode != "processed_logprobs":
        raise ServerSetupError(
            f"The vLLM server at {url} reports log-probabilities as {mode!r}, not those it samples with: start it "
            "with `mt-grpo serve`, or with `--logprobs-mode processed_logprobs`."
        )


def _same(model: str, entry: dict[str, Any]) -> bool:
    """Whether two model names agree. Of local folders only the last part counts: the server's may be elsewhere."""
    return model in (entry["id"], entry["root"]) or Path(model).name == Path(entry["root"]).name
