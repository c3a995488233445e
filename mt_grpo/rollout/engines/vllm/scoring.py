"""Log-probs of given tokens from a server, whose prefix cache holds what was sampled before them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson

from mt_grpo.rollout.engines.vllm.http import RequestFailed

if TYPE_CHECKING:
    from mt_grpo.rollout.engines.vllm.client import VLLMServerClient


def scoring_request(model: str, context: list[int], token: int) -> bytes:
    """
    The body that asks for the log-prob of one token after `context`.

    `prompt_logprobs` would give those of all tokens in one request, but a request with it does not read the prefix
    cache. Temperature 1 without truncation makes the processed log-probs the model's own.
    """
    body = {
        "model": model,
        "prompt": context,
        "max_tokens": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
        "logprob_token_ids": [token],
        "return_tokens_as_token_ids": True,
    }
    return orjson.dumps(body)


def read_logprob(answer: Any, token: int, request: str) -> tuple[float, str | None]:
    """
    The log-prob in an answer, and the identity of the server that gave it.

    Raises:
        RequestFailed: If it is not there. A repeat may help.
    """
    try:
        return (
            float(answer["choices"][0]["logprobs"]["top_logprobs"][0][f"token_id:{token}"]),
            answer.get("system_fingerprint"),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        shown = str(answer)[:400]
        raise RequestFailed(f"{request} was answered without the log-prob of token {token}: {shown}", True) from error


async def score_tokens(client: VLLMServerClient, context: list[int], tokens: list[int], session: str) -> list[float]:
    """See `ScoringEngine.logprobs`: a request for each token, after the tokens before it."""

    async def one(number: int) -> float:
        given, token = context + tokens[:number], tokens[number]
        content = scoring_request(client.model, given, token)
        return await client.ask(session, given, content, lambda answer, request: read_logprob(answer, token, request))

    return list(await asyncio.gather(*map(one, range(len(tokens)))))
