"""The interface of engines: token ids in, token ids and their log-probabilities out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from mt_grpo.errors import UserError
from mt_grpo.forward.media import Media
from mt_grpo.token_tree import Routes


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
    """
    Samples tokens. Many conversations may call `generate` at the same time.

    Attributes:
        tokenizer: Tokenizer of the model.
        context_length (`int`): Most tokens of context and action together.
    """

    tokenizer: Any
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
    """An engine whose model takes images."""

    async def generate_with_images(
        self, context: list[int], images: Media, sampling: SamplingParams, session: str
    ) -> Sample:
        """As `generate`, after a context in which the tokens of `images` have ids below 0."""
        ...


@runtime_checkable
class ScoringEngine(Protocol):
    """An engine that can say how likely given tokens are."""

    async def logprobs(self, context: list[int], tokens: list[int], session: str) -> list[float]:
        """
        Log-probs of `tokens` after `context`, each after those before it, under the model itself: at temperature 1,
        without truncation. Raises `EngineError` if that fails for good.
        """
        ...


@runtime_checkable
class LocalEngine(Protocol):
    """An engine that samples from a model in this process. A trainer lends it the model that it trains."""

    def use_model(self, model: Any) -> None:
        """Samples from `model` until another is given."""
        ...
