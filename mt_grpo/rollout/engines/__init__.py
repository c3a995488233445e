"""The interface of engines: token ids in, token ids and their log-probabilities out; and one with fixed answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from mt_grpo.errors import UserError
from mt_grpo.forward.media import Media
from mt_grpo.token_tree import Routes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class SamplingParams:
    """
    How tokens are drawn; names and meaning are vLLM's.

    Args:
        max_tokens (`int`, *optional*): Most tokens that one request samples; with `None` the runner's limits apply.
        temperature (`float`, *optional*, defaults to `1.0`): 0 takes the likeliest token.
        top_p (`float`, *optional*, defaults to `1.0`), top_k (`int`, *optional*, defaults to `0`, off),
        min_p (`float`, *optional*, defaults to `0.0`), repetition_penalty (`float`, *optional*, defaults to `1.0`).
        stop (`tuple[str, ...]`): Strings that end a request. They stay part of the sample.
        stop_token_ids (`tuple[int, ...]`): Further tokens that end a request, besides the model's own end tokens.
        seed (`int`): Seed of the request's own random stream.
        routes_from (`int`, *optional*, defaults to `0`): Tokens of the context whose routes are not asked for.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    routes_from: int = 0


@dataclass
class Sample:
    """
    What an engine returns.

    Args:
        ids (`list[int]`): Sampled token ids, including the end-of-turn token if it was sampled.
        logprobs (`list[float]`): Log-probability of each under the distribution that it was drawn from, i.e. after
            temperature and truncation.
        finish_reason (`str`): `"stop"` or `"length"`.
        weight_version (`int`, *optional*): Optimiser step of the weights, if the engine knows it.
        last_weight_version (`int`, *optional*): That of the last token, where weights may change meanwhile.
        routes (`Routes`, *optional*): The experts that context and sample went to, for a mixture whose engine says so.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = "stop"
    weight_version: int | None = None
    last_weight_version: int | None = None
    routes: Routes | None = None


class RolloutError(UserError, RuntimeError):
    """All conversations of two batches in a row, or of a whole run, failed. It ends the run."""


class Engine(Protocol):
    """Samples tokens of a model with this tokenizer and longest context, for many conversations at once."""

    tokenizer: PreTrainedTokenizerBase
    context_length: int

    async def generate(self, context: list[int], sampling: SamplingParams, session: str) -> Sample:
        """Samples one action after `context`. Raises `EngineError` if that fails for good."""
        ...

    def release(self, session: str) -> None:
        """Tells the engine that a conversation is over."""
        ...

    async def close(self) -> None:
        """Closes connections and the like; the next conversation opens them again."""
        ...


@runtime_checkable
class PlacingEngine(Protocol):
    """An engine of several servers, each with a cache of prefixes."""

    def join(self, session: str, other: str) -> None:
        """Places a new conversation on the server of `other`, whose context it begins with."""
        ...


@runtime_checkable
class MediaEngine(Protocol):
    """An engine whose model takes images, videos or sounds."""

    async def generate_with_media(
        self, context: list[int], media: Media, sampling: SamplingParams, session: str
    ) -> Sample:
        """As `generate`, after a context in which the tokens of `media` have ids below 0."""
        ...


@runtime_checkable
class ScoringEngine(Protocol):
    """An engine that can say how likely given tokens are."""

    async def logprobs(self, context: list[int], tokens: list[int], session: str) -> list[float]:
        """
        Log-probs of `tokens` after `context` at temperature 1, without truncation. Raises `EngineError` if that fails.
        """
        ...


@runtime_checkable
class LocalEngine(Protocol):
    """An engine that samples from a model in this process. A trainer lends it the model that it trains."""

    def use_model(self, model: Any) -> None:
        """Samples from `model` until another is given."""
        ...


class ScriptedEngine:
    """
    Answers from a script, and records its requests: for tests and benchmarks.

    Args:
        tokenizer: Tokenizer that encodes the script.
        script (`Sequence[str]` or `Callable[[str, int], str | list[int] | Exception]`): One answer per turn, the same
            for all conversations; or a function of session and turn index. An exception is raised.
        latency (`float` or `Callable[[str, int], float]`, *optional*, defaults to `0.0`): Seconds a request takes.
        context_length (`int`, *optional*, defaults to `32768`): Most tokens of context and action together.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        script: Sequence[str] | Callable[[str, int], str | list[int] | Exception],
        latency: float | Callable[[str, int], float] = 0.0,
        context_length: int = 32768,
    ) -> None:
        self.tokenizer = tokenizer
        self.context_length = context_length
        self._script = script if callable(script) else lambda session, turn: script[turn]
        self._latency = latency if callable(latency) else lambda session, turn: latency
        self._turns: Counter[str] = Counter()
        self.requests: list[tuple[str, list[int], Sample]] = []

    async def generate(self, context: list[int], sampling: SamplingParams, session: str) -> Sample:
        """The script's answer, cut at `max_tokens`; token `i` has log-probability `-(i + 1) / 100`."""
        turn = self._turns[session]
        self._turns[session] += 1
        seconds = self._latency(session, turn)
        if seconds:
            await asyncio.sleep(seconds)
        answer = self._script(session, turn)
        if isinstance(answer, Exception):
            raise answer
        ids = self.tokenizer.encode(answer, add_special_tokens=False) if isinstance(answer, str) else list(answer)
        reason = "stop" if sampling.max_tokens is None or len(ids) <= sampling.max_tokens else "length"
        ids = ids[: sampling.max_tokens]
        sample = Sample(ids, [-(index + 1) / 100 for index in range(len(ids))], reason)
        self.requests.append((session, list(context), sample))
        return sample

    def release(self, session: str) -> None:
        """Lets a session of the same name start over."""
        del self._turns[session]

    async def close(self) -> None:
        """Does nothing."""
