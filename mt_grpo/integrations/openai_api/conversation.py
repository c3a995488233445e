"""One conversation as its client sees it: requests in, answers out, each turn taken by the policy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from mt_grpo.envs.env import ConversationEnded
from mt_grpo.envs.protocols import CallProtocol
from mt_grpo.integrations.openai_api.calls import Calls
from mt_grpo.integrations.openai_api.chat import Choice, tell, token_logprobs
from mt_grpo.integrations.openai_api.errors import ApiError, refused
from mt_grpo.integrations.openai_api.messages import Told
from mt_grpo.integrations.openai_api.request import Wish
from mt_grpo.integrations.openai_api.retries import Attempt, Retries
from mt_grpo.rollout.engine import EngineError
from mt_grpo.rollout.policy import ConversationPolicy
from mt_grpo.trajectory import Message, StopReason

MOST_REQUESTS = 256
"""Requests of one conversation that wait at once; a further one is told to come again."""
FIXED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
PENALTIES = ("presence_penalty", "frequency_penalty")
CHARACTERS = 16
"""Characters of tools and calls per token of the model's context, above which they are too long to be rendered."""
PATIENCE = 100
"""Requests in a row that get no token, after which an agent that asks on is ended."""


class Conversation:
    """
    A conversation that is held over HTTP. Turns that are asked for at once are sampled one after another; each is
    trained.

    Args:
        policy (`ConversationPolicy`): Takes the turns.
        protocol (`CallProtocol`, *optional*): Writes and reads calls as text, see `Calls`.
        base_url (`str`), api_key (`str`): What its client needs.

    Attributes:
        fixed (`dict`): What the run decides about sampling, by OpenAI's and vLLM's names.
        limit (`StopReason`, *optional*): The limit that refused or cut off the latest answer.
        failure (`EngineError`, *optional*): What the engine answered instead of the latest turn.
        responses (`dict`): The messages of each of OpenAI's Responses, by its identifier, the answer included.
        names (`list[str]`): What it is called beside its session.
        over (`asyncio.Event`): Set where the client goes on asking though nothing is left to sample.
    """

    def __init__(self, policy: ConversationPolicy, protocol: CallProtocol | None, base_url: str, api_key: str) -> None:
        self.policy, self.base_url, self.api_key = policy, base_url, api_key
        self.fixed = {name: getattr(policy.sampling, name) for name in FIXED} | dict.fromkeys(PENALTIES, 0.0)
        self.limit: StopReason | None = None
        self.failure: EngineError | None = None
        self.over = asyncio.Event()
        self.names: list[str] = []
        self.responses: dict[str, list[Message]] = {}
        self._calls = Calls(protocol, policy.tokenizer)
        self._told, self._retries = Told(), Retries()
        self._waiting = self._refused = 0

    def attempt(self, content: bytes, headers: Mapping[str, str], answer: Callable[[], Awaitable[Any]]) -> Attempt:
        """
        A request: one that was made before, or another, which `answer` is called for.

        Raises:
            ApiError: If too many wait.
        """
        key, attempt = self._retries.find(content, headers)
        if attempt is not None:
            return attempt
        if self._waiting >= MOST_REQUESTS:
            message = f"{MOST_REQUESTS} requests of this conversation are waiting: ask again later."
            raise ApiError(429, message, "rate_limit_exceeded", again=True)
        return self._retries.begin(key, asyncio.ensure_future(self._counted(answer)))

    async def _counted(self, answer: Callable[[], Awaitable[Any]]) -> Any:
        self._waiting += 1
        try:
            return await answer()
        finally:
            self._waiting -= 1

    async def choices(self, wish: Wish) -> list[Choice]:
        """
        Takes the turns that a request asks for.

        Raises:
            ApiError: If there is no turn to be had.
        """
        asked = self._calls.asked(wish)
        # the template writes these whole, and a renderer that measures messages looks at their content alone
        calls = [message["tool_calls"] for message in wish.messages if "tool_calls" in message]
        if len(json.dumps([wish.tools, calls], ensure_ascii=False)) > CHARACTERS * self.policy.context_length:
            raise self._refusal(StopReason.CONTEXT_FULL)
        restored, key, before = self._told.restore(wish.messages)
        answered = self._calls.note_results(wish.messages)
        messages = self._calls.written(restored, wish)
        choices = [await self._choose(wish, messages, asked, key) for _ in range(wish.n)]
        if before is not None and not before.replies:  # sub-agents took turns since: the policy does not know of it
            said = next(index for index in range(len(messages))[::-1] if messages[index]["role"] == "assistant")
            before.replies = messages[said + 1 :]
        for turn, results in answered:  # of a turn whose past was rewritten, by a handoff for instance
            turn.replies = turn.replies or results
        return choices

    async def _choose(self, wish: Wish, messages: list[Any], asked: dict[str, Any], key: int) -> Choice:
        try:
            turn = await self.policy.reply(messages, max_tokens=wish.max_tokens, **asked)
        except ConversationEnded as ended:
            raise self._refusal(ended.stop_reason) from ended
        except EngineError as error:
            self.failure = error
            raise ApiError(503, str(error), "engine_error") from error
        except Exception as error:
            if self.policy.failure is error:  # a bug of the engine, which ends the run
                raise ApiError(500, "The engine failed.", "engine_error") from error
            if isinstance(error, (TypeError, ValueError)):  # what the messages hold, or their template refuses
                raise ApiError(400, f"These messages cannot be shown: {error}", "invalid_value", "messages") from error
            raise
        exhausted = self.policy.exhausted
        own = wish.max_tokens is not None and turn.num_tokens >= wish.max_tokens  # the client's limit is no failure
        self.limit, self.failure, self._refused = None if own else exhausted, None, 0
        self._calls.name(turn)
        told, reason = tell(turn, wish.stop, wish.reads_calls and wish.tools is not None)
        self._told.note(key, told, turn)
        wanted = token_logprobs(self.policy.tokenizer, *self.policy.sampled) if wish.logprobs else None
        return Choice(told, reason, turn, wanted)

    def _refusal(self, reason: StopReason) -> ApiError:
        """The error of a request that a limit refuses."""
        self.limit, self._refused = reason, self._refused + 1
        if self._refused >= PATIENCE:
            self.over.set()
        return refused(reason)

    def close(self) -> None:
        """Takes no further turn, and ends those that are asked for."""
        self._retries.cancel()
