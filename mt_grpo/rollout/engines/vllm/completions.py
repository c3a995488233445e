"""Requests to `/v1/completions`, and how their answers are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from mt_grpo.rollout.engine import Sample, SamplingParams
from mt_grpo.rollout.engines.vllm.http import RequestFailed

Read = Callable[[Any, str], tuple[Any, str | None]]
"""Takes what is wanted, and the server's identity, from the answer to a request, which the text names."""


def completion_request(model: str, context: list[int], sampling: SamplingParams) -> bytes:
    """The body that samples one action. It sets every option, so that defaults of the server's model do not apply."""
    body = {
        "model": model,
        "prompt": context,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 0,
        # ids come with the log-probabilities; `return_token_ids` would send the whole prompt back as well
        "return_tokens_as_token_ids": True,
    }
    return orjson.dumps(body)


def read_sample(answer: Any, request: str) -> tuple[Sample, str | None]:
    """
    The sample in an answer of `/v1/completions`, and the identity of the server that gave it.

    Raises:
        RequestFailed: If the answer holds no sample, or the server aborted the request. A repeat may help.
    """
    try:
        choice = answer["choices"][0]
        ids = [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
        logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
        reason = choice["finish_reason"]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        shown = str(answer)[:400]
        raise RequestFailed(
            f"{request} was answered with something that is not a completion: {shown}", True
        ) from error
    if reason not in ("stop", "length") or not ids or len(ids) != len(logprobs):
        raise RequestFailed(
            f"{request} was answered with {len(ids)} tokens, {len(logprobs)} log-probabilities and the finish reason "
            f"{reason!r}.",
            True,
        )
    return Sample(ids, logprobs, reason), answer.get("system_fingerprint")
