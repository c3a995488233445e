"""The engine seam: token ids in, token ids and their log-probabilities out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from mt_grpo.errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """
    How tokens are drawn; names and meaning are vLLM's.

    Args:
        max_tokens (`int`, *optional*): Tokens one request may sample; `None` leaves it to the runner's limits.
        temperature (`float`, *optional*, defaults to `1.0`): 0 takes the likeliest token.
        top_p (`float`, *optional*, defaults to `1.0`), top_k (`int`, *optional*, defaults to `0`, off),
        min_p (`float`, *optional*, defaults to `0.0`), repetition_penalty (`float`, *optional*, defaults to `1.0`).
        stop (`tuple[str, ...]`): Strings that end a request; they stay part of what was sampled.
        stop_token_ids (`tuple[int, ...]`): Further tokens that end a request, beside the model's own end tokens.
        seed (`int`): Seed of the request's own random stream.
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


@dataclass
class Sample:
    """
    What an engine returns.

    Args:
        ids (`list[int]`): Sampled token ids, end-of-turn token included where one was sampled.
        logprobs (`list[float]`): Log-probability of each under the distribution it was drawn from, i.e. after
            temperature and truncation.
        finish_reason (`str`): `"stop"` or `"length"`.
        weight_version (`int`, *optional*): Optimiser step of the weights, where the engine knows it.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = "stop"
    weight_version: int | None = None


class EngineError(UserError, RuntimeError):
    """The engine could not serve a request, and a repeat would not help. It ends one conversation, not the run."""


class RolloutError(UserError, RuntimeError):
    """No conversation can be held: all those of two batches in a row failed, and the next ones would fail alike."""


class Engine(Protocol):
    """
    Samples tokens. `generate` may be called by many conversations at once.

    Attributes:
        tokenizer: Tokenizer of the model.
        context_length (`int`): Tokens of context and action together that fit.
    """

    tokenizer: Any
    context_length: int

    async def generate(self, context: list[int], sampling: SamplingParams, session: str) -> Sample:
        """Samples one action after `context`. Raises `EngineError` where that fails for good."""
        ...

    def release(self, session: str) -> None:
        """Tells that a conversation is over and will ask for nothing more."""
        ...

    async def close(self) -> None:
        """Lets go of what is held open while conversations run; the next ones open it again."""
        ...


@runtime_checkable
class LocalEngine(Protocol):
    """An engine that samples from a model in this process has this, too: a trainer lends it its own."""

    def use_model(self, model: Any) -> None:
        """Samples from `model` until another is given."""
        ...
