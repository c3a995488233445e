"""Bodies of requests that sample or score, and what is read in the answers of vLLM."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from mt_grpo.rollout.engine import Sample, SamplingParams
from mt_grpo.rollout.engines.vllm.http import RequestFailed
from mt_grpo.token_tree import Routes


def completion_request(model: str, context: list[int], sampling: SamplingParams, **more: Any) -> bytes:
    """
    The body that samples one action, with `more` options. It sets every option, so that defaults of the server's model
    do not apply.
    """
    body = {
        **sampling_options(sampling),
        "model": model,
        "prompt": context,
        # ids come with the log-probabilities; `return_token_ids` would send the whole prompt back as well
        "return_tokens_as_token_ids": True,
    }
    return orjson.dumps(body | more)


def generate_request(
    model: str, ids: list[int], sampling: SamplingParams, features: dict[str, Any], **more: Any
) -> bytes:
    """The body that samples one action after ids with images among them: `features`, see `features_of`."""
    body = {"token_ids": ids, "features": features, "sampling_params": sampling_options(sampling), **more}
    return orjson.dumps(body | ({"model": model} if model else {}))


def sampling_options(sampling: SamplingParams) -> dict[str, Any]:
    """vLLM's options for one action, with its log-probabilities."""
    options = {
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
    }
    if sampling.routes_from:
        options["routed_experts_prompt_start"] = sampling.routes_from
    return options


def read_sample(answer: Any, request: str, routes_from: int = 0) -> Sample:
    """
    The sample in an answer of `/v1/completions`, with its routes where the server gives them. `routes_from` is the
    token of the context that they begin with.
    """

    def parts(choice: Any) -> tuple[list[int], list[float]]:
        found = choice["logprobs"]
        ids = [int(token.removeprefix("token_id:")) for token in found["tokens"]]
        return ids, [float(value) for value in found["token_logprobs"]]

    return _read_choice(answer, request, routes_from, parts)


def read_generated(answer: Any, request: str, routes_from: int = 0) -> Sample:
    """The sample in an answer of `/inference/v1/generate`; as `read_sample`."""

    def parts(choice: Any) -> tuple[list[int], list[float]]:
        return [int(token) for token in choice["token_ids"]], [
            float(each["logprob"]) for each in choice["logprobs"]["content"]
        ]

    return _read_choice(answer, request, routes_from, parts)


def _read_choice(
    answer: Any, request: str, routes_from: int, parts: Callable[[Any], tuple[list[int], list[float]]]
) -> Sample:
    try:
        choice = answer["choices"][0]
        ids, logprobs = parts(choice)
        reason = choice["finish_reason"]
        routes = read_routes(choice.get("routed_experts"), routes_from)
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
    return Sample(ids, logprobs, reason, routes=routes)


def read_routes(encoded: str | None, first: int) -> Routes | None:
    """The routes of a choice: an array `(tokens, layers, k)` as a `.npy` file in base64. Raises `ValueError`."""
    if not encoded:
        return None
    found = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    return Routes(first, found[:1].nbytes, found.tobytes()) if len(found) else None


def scoring_request(model: str, context: list[int], token: int, **more: Any) -> bytes:
    """
    The body that asks for the log-prob of one token after `context`.

    `prompt_logprobs` would give those of all tokens in one request, but a request with it does not read the prefix
    cache. Temperature 1 without truncation makes the processed log-probs the model's own.
    """
    sampling = SamplingParams(max_tokens=1)
    return completion_request(model, context, sampling, seed=None, logprob_token_ids=[token], **more)


def read_logprob(answer: Any, token: int, request: str) -> float:
    """The log-prob in an answer."""
    try:
        return float(answer["choices"][0]["logprobs"]["top_logprobs"][0][f"token_id:{token}"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        shown = str(answer)[:400]
        raise RequestFailed(f"{request} was answered without the log-prob of token {token}: {shown}", True) from error
