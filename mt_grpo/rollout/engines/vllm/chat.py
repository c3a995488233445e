"""Answers conversations with one reply each."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mt_grpo.rollout.engine import SamplingParams
from mt_grpo.rollout.rendering import ChatRenderer
from mt_grpo.trajectory import Message

if TYPE_CHECKING:
    from mt_grpo.rollout.engines.vllm.client import VLLMServerClient


@dataclass
class ChatReply:
    """
    One answer of `VLLMServerClient.chat`.

    Args:
        text (`str`): What the model wrote, without the token that ended it.
        token_ids (`list[int]`), logprobs (`list[float]`): As sampled.
        prompt_token_ids (`list[int]`): The conversation as token ids.
        finish_reason (`str`): `"stop"` or `"length"`.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    prompt_token_ids: list[int]
    finish_reason: str


async def answer_all(
    client: VLLMServerClient, messages_list: list[list[Message]], sampling: SamplingParams
) -> list[ChatReply]:
    """Answers all conversations concurrently. Connects first if the client is not connected, and disconnects last."""
    try:
        if not client.context_length:
            await client.connect()
        renderer = ChatRenderer(client.tokenizer)

        async def answer(index: int, messages: list[Message]) -> ChatReply:
            context = renderer.prompt_ids(messages)
            assert context is not None  # it is `None` for prompts beyond a limit only, and none is given
            drawing = replace(
                sampling,
                max_tokens=sampling.max_tokens or client.context_length - len(context),
                stop_token_ids=(*sampling.stop_token_ids, renderer.end_id),
            )
            session = f"chat-{index}"
            try:
                sample = await client.generate(context, drawing, session)
            finally:
                client.release(session)
            return ChatReply(renderer.text(sample.ids), sample.ids, sample.logprobs, context, sample.finish_reason)

        return list(await asyncio.gather(*(answer(*item) for item in enumerate(messages_list))))
    finally:
        await client.close()
