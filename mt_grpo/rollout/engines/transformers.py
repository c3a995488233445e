"""
Samples from a transformers model in this process, in batches of the requests that wait. `prove_engine` tests that this
is the distribution that is trained: samples of rows of several lengths, which are padded on the left, and of a second
turn, which may go on from the first one's cache, are scored by a plain forward over each row alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
)
from transformers.cache_utils import DynamicLayer
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mt_grpo.errors import ConfigError
from mt_grpo.forward.interface import base_model
from mt_grpo.forward.lm_head import replaced
from mt_grpo.forward.media import Media, MediumInputs, media_tokens, row_inputs
from mt_grpo.forward.probe import (
    FACTOR,
    MOST_NOISE,
    REACHES,
    SHALLOWEST,
    TURN,
    Proof,
    context_length,
    rounding_step,
    shaken,
    takes,
)
from mt_grpo.forward.routes import Recorder, route_shape
from mt_grpo.media import SOUND, kind_of
from mt_grpo.rollout.engines import Sample, SamplingParams
from mt_grpo.token_tree import Routes

_CACHE = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
"""What this version of transformers calls the keys and values that `generate` takes and returns."""


_MOST_PADDING = 2
"""Times the longest context that rows with the padding between their turns may be; then they are computed again."""


@dataclass(eq=False)
class _Request:
    context: list[int]
    sampling: SamplingParams
    session: str
    future: asyncio.Future[Sample]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    routes: Routes | None = None
    media: Media = field(default_factory=dict)
    weight_version: int | None = None

    @property
    def budget(self) -> int:
        """Most tokens that it samples."""
        assert self.sampling.max_tokens is not None  # see `generate`
        return self.sampling.max_tokens


class TransformersEngine:
    """
    Samples with `model.generate`, without a server. Any decoder of transformers works, on a CPU or a GPU.

    A batch starts when every live conversation waits for it, and is in the order of their sessions. So the same seed
    gives the same tokens, however long tools take, up to `patience` seconds. Slower tools are not waited for. Each
    request draws from its own random stream.

    Args:
        model (`PreTrainedModel`): The model. Its weights are read at each batch.
        tokenizer: Its tokenizer.
        max_batch_size (`int`, *optional*, defaults to `64`): Most requests in one batch.
        patience (`float`, *optional*, defaults to `1.0`): Seconds a batch waits for conversations that are elsewhere.
        record_routes (`bool`, *optional*, defaults to `False`): Whether samples of a mixture say which experts their
            tokens went to.

    Attributes:
        weight_version (`int`, *optional*): Optimiser step of the model's weights, which samples are stamped with.
        update (`threading.Lock`): Held while a batch is sampled, and to be held while the model's weights are changed.
        context (`Callable`): Makes the context in which the model runs, such as autocast.
        keeps_prefixes (`bool`): Whether the next turns of a batch's conversations go on from the keys and values of
            the last ones, in place of computing them again. Off until `prove_engine` has shown that the model allows
            it: only layers of full attention, without images or routes to record.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        max_batch_size: int = 64,
        patience: float = 1.0,
        record_routes: bool = False,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.context_length = context_length(model.config)
        self.max_batch_size = max_batch_size
        self.patience = patience
        self.record_routes = record_routes and route_shape(model.config) is not None
        self._media_tokens = [*media_tokens(model.config).values()]
        self.weight_version: int | None = None
        self.update = threading.Lock()
        self.context: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.keeps_prefixes = False
        self._prefixes: _Prefixes | None = None
        self._live: set[str] = set()
        self._waiting: list[_Request] = []
        self._batch: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="transformers-engine")
        self._may_stop: dict[tuple[int, str], bool] = {}

    def use_model(self, model: Any) -> None:
        """Samples from `model` until another is given; see `LocalEngine`."""
        self.model = model
        self._prefixes = None

    async def generate(self, context: list[int], sampling: SamplingParams, session: str) -> Sample:
        """Samples one action; see `Engine`. `sampling.max_tokens` must be set."""
        return await self.generate_with_media(context, {}, sampling, session)

    async def generate_with_media(
        self, context: list[int], media: Media, sampling: SamplingParams, session: str
    ) -> Sample:
        """Samples one action; see `MediaEngine`."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # what an earlier event loop left behind will not come back
            self._loop, self._batch, self._timer, self._waiting = loop, None, None, []
            self._live.clear()
            self._prefixes = None
        request = _Request(list(context), sampling, session, loop.create_future(), media=media)
        self._live.add(session)
        self._waiting.append(request)
        loop.call_soon(self._start_batch)  # after every conversation that is about to ask has asked
        return await request.future

    def release(self, session: str) -> None:
        """Makes the next batch start without this conversation."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            return
        self._live.discard(session)
        if not self._live:
            self._prefixes = None
        # only what nobody waits for: a conversation of the same name may have begun since
        self._waiting = [request for request in self._waiting if not request.future.done()]
        loop.call_soon(self._start_batch)

    async def close(self) -> None:
        """Waits for the running batch, which ends with its next token if nobody waits for it."""
        if self._batch is not None and self._loop is asyncio.get_running_loop():
            await asyncio.wait([self._batch])

    def _start_batch(self, patient: bool = True) -> None:
        """Starts a batch if none runs, and every live conversation waits or the others are not waited for."""
        loop = asyncio.get_running_loop()
        if self._batch is not None or loop is not self._loop:
            return
        if self._waiting and patient and len(self._waiting) < len(self._live):
            if self._timer is None:
                self._timer = loop.call_later(self.patience, self._start_batch, False)
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiting:
            return
        batch = sorted(self._waiting, key=lambda request: request.session)[: self.max_batch_size]
        self._waiting = [request for request in self._waiting if request not in batch]
        self._batch = loop.run_in_executor(self._executor, self._sample, batch)
        self._batch.add_done_callback(lambda done: self._end_batch(batch, done))

    def _end_batch(self, batch: list[_Request], done: asyncio.Future[None]) -> None:
        if self._batch is done:
            self._batch = None
        if not self._live:
            self._prefixes = None
        for request in batch:
            if request.future.done():  # a cancelled conversation is gone already
                continue
            if done.cancelled() or done.exception():
                request.future.set_exception(done.exception() or RuntimeError("The batch was cancelled."))
            else:
                assert request.finish_reason is not None
                version = request.weight_version
                sample = Sample(request.ids, request.logprobs, request.finish_reason, version, version, request.routes)
                request.future.set_result(sample)
        asyncio.get_running_loop().call_soon(self._start_batch)  # after the conversations that go on at once

    @torch.no_grad()
    def _sample(self, batch: list[_Request]) -> None:
        """Samples a batch in place, by a `generate` for each kind of options and sounds."""
        alike = [((_drawing(request.sampling), _lengths(request)), request) for request in batch]
        with self.update, on_device(self.model.device), self.context():
            for request in batch:
                request.weight_version = self.weight_version
            for (drawing, _), group in groupby(sorted(alike, key=lambda pair: pair[0]), key=lambda pair: pair[0]):
                self._generate([request for _, request in group], drawing)

    def _generate(self, batch: list[_Request], drawing: tuple[float, ...]) -> None:
        device = self.model.device
        media: dict[int, MediumInputs] = {}
        for request in batch:
            media |= request.media
        sessions, contexts = [request.session for request in batch], [request.context for request in batch]
        weights = _weights_of(self.model, self.weight_version)
        prefixes, self._prefixes = self._prefixes, None
        rows = prefixes and prefixes.continued(sessions, contexts, weights)
        rows = rows or _left_padded(contexts)
        width = len(rows.ids[0])
        ids = torch.tensor(rows.ids, device=device)
        inputs = row_inputs(self.model, ids, media) if media else {"input_ids": ids}
        never = self._media_tokens  # no image would stand behind it
        recorder = _Recorder(batch, width, device, greedy=drawing[0] == 0, never=never)
        routes = Recorder(self.model) if self.record_routes else nullcontext()
        config = vars(self.model.config.get_text_config())
        # `generate` of transformers fails where its configuration asks for a loss that balances experts
        with routes, replaced(config, "output_router_logits", False):
            output = self.model.generate(
                inputs.pop("input_ids"),
                **inputs,
                **({} if rows.cache is None else {_CACHE: rows.cache}),
                attention_mask=torch.tensor(rows.mask, device=device),
                generation_config=GenerationConfig(
                    do_sample=False,
                    max_new_tokens=max(request.budget for request in batch),
                    repetition_penalty=1.0,
                    pad_token_id=self.tokenizer.pad_token_id,
                    eos_token_id=None,
                    use_cache=True,
                    return_dict_in_generate=True,
                ),
                logits_processor=LogitsProcessorList([*_warpers(drawing), recorder]),
                stopping_criteria=[_Finished(self, batch, recorder)],
                synced_gpus=False,  # which ZeRO-3 would turn on; processes make different numbers of calls
            )
        if any(request.finish_reason is None and not request.future.cancelled() for request in batch):
            raise ConfigError(
                f"`generate` of {type(self.model).__name__} returned before its answers had ended, without the "
                "`stopping_criteria` and the `logits_processor` that it was given: give it that of transformers, or "
                "sample from a server (`use_vllm: true`)."
            )
        found = routes.routes(len(batch)) if isinstance(routes, Recorder) else None
        cache = getattr(output, _CACHE, None)
        if self.keeps_prefixes and not never and found is None and _is_of_tokens_alone(cache):
            samples = [request.ids for request in batch]
            self._prefixes = _Prefixes.left_by(cache, rows, sessions, contexts, samples, weights)
        if found is not None:
            for request, row in zip(batch, found, strict=True):
                first = request.sampling.routes_from
                begin = width - len(request.context) + first
                taken = row[begin : width + len(request.ids) - 1]  # what was sampled last went to no expert yet
                request.routes = Routes(first, row.shape[1], taken.tobytes())

    def may_stop(self, token: int, stop: str) -> bool:
        """Whether a token can complete a stop string."""
        key = (token, stop)
        if key not in self._may_stop:
            self._may_stop[key] = stop[-1] in self.tokenizer.decode([token], skip_special_tokens=False)
        return self._may_stop[key]

    @property
    def end_ids(self) -> set[int]:
        """Tokens that end a turn."""
        configured = self.model.generation_config.eos_token_id
        configured = configured if isinstance(configured, Sequence) else [configured]
        return {self.tokenizer.eos_token_id, *configured} - {None}


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one of this thread, which begins with the first."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _drawing(sampling: SamplingParams) -> tuple[float, ...]:
    return sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty


def _lengths(request: _Request) -> list[tuple[int, ...]]:
    """The lengths of the features of a request's sounds, each once."""
    played = {token for token in request.context if kind_of(token) == SOUND}
    return sorted({request.media[token].lengths for token in played})


def _warpers(drawing: tuple[float, ...]) -> list[LogitsProcessor]:
    """The logits processors in vLLM's order. transformers applies min-p last, which would keep other tokens."""
    temperature, top_p, top_k, min_p, repetition_penalty = drawing
    warpers: list[LogitsProcessor] = []
    if repetition_penalty != 1.0:
        warpers.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
    if temperature not in (0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(temperature))
    if temperature == 0.0:
        return warpers
    if min_p > 0.0:
        warpers.append(MinPLogitsWarper(min_p))
    if top_k > 0:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p))
    return warpers


class _Recorder(LogitsProcessor):
    """
    Draws each row's token with the row's own uniform numbers, and keeps its log-prob. All other tokens are masked, so
    that the greedy search of `generate` takes this one.
    """

    def __init__(
        self,
        batch: list[_Request],
        width: int,
        device: torch.device,
        greedy: bool,
        never: Sequence[int] = (),
    ) -> None:
        self._width, self._greedy = width, greedy
        self._never = list(never)
        longest = max(request.budget for request in batch)
        uniforms = [np.random.Generator(np.random.Philox(request.sampling.seed)).random(longest) for request in batch]
        self._uniforms = torch.tensor(np.stack(uniforms), device=device)
        self.ids: list[int] = []
        self.logprobs: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        logprobs = torch.log_softmax(scores.float(), dim=-1)
        drawable = logprobs
        if self._never:
            drawable = logprobs.clone()
            # some models name a token for what they do not take, which is none of their vocabulary
            drawable[:, [token for token in self._never if token < drawable.shape[-1]]] = -torch.inf
        if self._greedy:
            chosen = drawable.argmax(dim=-1, keepdim=True)
        else:
            cumulative = drawable.double().exp().cumsum(dim=-1)
            step = input_ids.shape[1] - self._width
            target = self._uniforms[:, step : step + 1] * cumulative[:, -1:]
            chosen = torch.searchsorted(cumulative, target, right=True).clamp(max=scores.shape[-1] - 1)
        self.ids = chosen[:, 0].tolist()
        self.logprobs = logprobs.gather(1, chosen)[:, 0].tolist()
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


class _Finished(StoppingCriteria):
    """Adds each row's token to its request. Ends the row at its end token, its stop string or its budget."""

    def __init__(self, engine: TransformersEngine, batch: list[_Request], recorder: _Recorder) -> None:
        self._engine = engine
        self._batch = batch
        self._recorder = recorder
        self._end_ids = engine.end_ids

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        for request, token, logprob in zip(self._batch, self._recorder.ids, self._recorder.logprobs, strict=True):
            if request.finish_reason is None:
                request.ids.append(token)
                request.logprobs.append(logprob)
                request.finish_reason = self._reason(request)
        done = [request.finish_reason is not None or request.future.cancelled() for request in self._batch]
        return torch.tensor(done, device=input_ids.device)

    def _reason(self, request: _Request) -> str | None:
        token = request.ids[-1]
        if token in self._end_ids or token in request.sampling.stop_token_ids:
            return "stop"
        for stop in request.sampling.stop:
            # a stop string of n characters lies within the last n tokens, and it can only end with this one
            if self._engine.may_stop(token, stop) and stop in self._engine.tokenizer.decode(
                request.ids[-len(stop) :], skip_special_tokens=False
            ):
                return "stop"
        return "length" if len(request.ids) >= request.budget else None


# Keys and values that a batch of conversations has computed, from which their next batch goes on


@dataclass
class _Padded:
    """Rows of one width, as `generate` takes them."""

    ids: list[list[int]]
    mask: list[list[int]]
    cache: DynamicCache | None = None


@dataclass
class _Prefixes:
    """What is computed of each conversation of the last batch."""

    cache: DynamicCache
    places: dict[str, int]
    known: list[list[int]]
    rows: _Padded
    weights: object

    @classmethod
    def left_by(
        cls,
        cache: DynamicCache,
        rows: _Padded,
        sessions: Sequence[str],
        contexts: Sequence[list[int]],
        samples: Sequence[list[int]],
        weights: object,
    ) -> _Prefixes:
        """What a batch leaves."""
        steps = cache.get_seq_length() - len(rows.ids[0])
        sampled = [ids[:steps] for ids in samples]
        # what a row sampled after its end is no token of it
        ids = [row + own + own[-1:] * (steps - len(own)) for row, own in zip(rows.ids, sampled, strict=True)]
        mask = [row + [1] * len(own) + [0] * (steps - len(own)) for row, own in zip(rows.mask, sampled, strict=True)]
        known = [context + own for context, own in zip(contexts, sampled, strict=True)]
        return cls(cache, {session: row for row, session in enumerate(sessions)}, known, _Padded(ids, mask), weights)

    def continued(self, sessions: Sequence[str], contexts: Sequence[list[int]], weights: object) -> _Padded | None:
        """The rows of a batch that goes on from here, which uses the cache up; else `None`."""
        if weights != self.weights or not set(sessions) <= set(self.places):
            return None
        chosen = [self.places[session] for session in sessions]
        added = []
        for row, context in zip(chosen, contexts, strict=True):
            length = len(self.known[row])
            if length >= len(context) or context[:length] != self.known[row]:
                return None
            added.append(context[length:])
        widest = max(map(len, added))
        if len(self.rows.ids[0]) + widest > _MOST_PADDING * max(map(len, contexts)):
            return None
        self.cache.batch_select_indices(torch.tensor(chosen))
        behind = _left_padded(added)
        return _Padded(
            [self.rows.ids[row] + ids for row, ids in zip(chosen, behind.ids, strict=True)],
            [self.rows.mask[row] + mask for row, mask in zip(chosen, behind.mask, strict=True)],
            self.cache,
        )


def _left_padded(contexts: Sequence[list[int]]) -> _Padded:
    """Contexts as rows of one width, padded by a token of each row, since penalties read it."""
    width = max(map(len, contexts))
    return _Padded(
        [[max(context)] * (width - len(context)) + context for context in contexts],
        [[0] * (width - len(context)) + [1] * len(context) for context in contexts],
    )


def _is_of_tokens_alone(cache: Any) -> bool:
    """Whether a cache is a list of keys and values by place, of which padding in the middle can be masked."""
    return (
        type(cache) is DynamicCache
        and not getattr(cache, "offloading", False)
        and all(type(layer) is DynamicLayer for layer in cache.layers)
    )


def _weights_of(model: Any, version: int | None) -> object:
    """Changes whenever the weights of a model are changed in place."""
    changes = sum(0 if parameter.is_inference() else parameter._version for parameter in model.parameters())
    return id(model), version, changes


_LONGEST = 1024  # most tokens of the longest context, so that the test takes seconds

RESULT = 7
"""Most tokens between the two turns."""

EXACT = 1e-3
"""Largest mean difference over a row's samples in float32, in nats. Some layers with a state go on from it by another
formula than they compute a row with (transformers clamps a step of Mamba 2 in rows alone), which moves less."""


async def prove_engine(engine: TransformersEngine, mixed_precision: str = "no") -> None:
    """Proves an engine for its model, without a trace; it keeps prefixes afterwards if that changes nothing."""
    engine.keeps_prefixes = False
    proof = await _measure_engine(engine, mixed_precision)
    if not proof.holds:
        raise ConfigError(
            f"A batch of {type(base_model(engine.model)).__name__} with rows of several lengths is sampled "
            f"{proof.difference:.1e} nats away from a forward over each row, which is what is trained, where its "
            f"precision explains {proof.allowed:.1e}: set `use_vllm: true` to sample from a server."
        )
    engine.keeps_prefixes = engine.context_length > 2 * TURN + RESULT
    if engine.keeps_prefixes:
        try:
            engine.keeps_prefixes = (await _measure_engine(engine, mixed_precision, turns=2)).holds
        except Exception:  # of a model's own code, which does not go on from a cache
            engine.keeps_prefixes = False


async def _measure_engine(engine: TransformersEngine, mixed_precision: str = "no", turns: int = 1) -> Proof:
    """How far the log-probs of what an engine samples are from those of a forward over each row alone."""
    contexts = _probe_contexts(engine, turns)
    names = [f"engine-proof-{number}" for number in range(len(contexts))]
    sampling = [SamplingParams(max_tokens=TURN, seed=number) for number in range(len(contexts))]
    samples: list[Sample] = []
    try:
        for turn in range(turns):
            if turn:
                results = [context[: min(1 + 3 * number, RESULT)] for number, context in enumerate(contexts)]
                contexts = [
                    context + sample.ids + result
                    for context, sample, result in zip(contexts, samples, results, strict=True)
                ]
            samples = await asyncio.gather(*map(engine.generate, contexts, sampling, names))
    finally:
        for name in names:
            engine.release(name)
        await engine.close()  # where this is interrupted, its batch samples on
    with torch.no_grad(), engine.context():
        return _compare(engine, contexts, samples, rounding_step(engine.model, mixed_precision))


def _probe_contexts(engine: TransformersEngine, turns: int = 1) -> list[list[int]]:
    """Three contexts: the longest beyond the model's windows, two padded across kernels' blocks."""
    config = base_model(engine.model).config.get_text_config()
    reaches = [getattr(config, name, None) or 0 for name in REACHES]
    longest = max(SHALLOWEST, *(reach for reach in reaches if reach < _LONGEST)) + TURN
    longest = max(1, min(longest, engine.context_length - turns * TURN - (turns - 1) * RESULT))
    draw = np.random.default_rng(0)
    words = np.setdiff1d(np.arange(config.vocab_size), engine._media_tokens)  # no image stands behind others
    lengths = (longest, longest // 2 + 1, min(5, longest))
    return [[int(token) for token in draw.choice(words, size=length)] for length in lengths]


def _compare(engine: TransformersEngine, contexts: list[list[int]], samples: list[Sample], step: float) -> Proof:
    coarse = step > torch.finfo(torch.float32).eps
    differences, noise = [], [step]
    for context, sample in zip(contexts, samples, strict=True):
        expected = _row_logps(engine, context, sample)
        if not expected.isfinite().all():  # weights that are not finite: the trainer names them
            return Proof(0.0, torch.inf)
        sampled = torch.tensor(sample.logprobs, device=expected.device)
        differences.append((sampled - expected).abs().mean().nan_to_num(nan=torch.inf).item())
        if coarse:
            with shaken(base_model(engine.model), step):
                noise.append((_row_logps(engine, context, sample) - expected).abs().mean().item())
    return Proof(max(differences), min(FACTOR * max(noise), MOST_NOISE) if coarse else EXACT)


def _row_logps(engine: TransformersEngine, context: list[int], sample: Sample) -> Tensor:
    """Log-probs of a sample's tokens by a forward over its row, without a cache."""
    ids = torch.tensor([context + sample.ids], device=engine.model.device)
    keep = {"logits_to_keep": len(sample.ids) + 1} if takes(base_model(engine.model), "logits_to_keep") else {}
    logits = engine.model(input_ids=ids, use_cache=False, **keep).logits[0, -len(sample.ids) - 1 : -1]
    labels = torch.tensor(sample.ids, device=logits.device)
    return logits.float().log_softmax(dim=-1).gather(1, labels[:, None])[:, 0]
