"""
Tests that the engine in this process samples from the distribution that is trained: what it samples in one batch of
short and long rows, which are padded on the left and go on from a cache, is scored by a plain forward over each row
alone. A second turn of these rows, which may go on from the cache of the first, is scored likewise.
"""

from __future__ import annotations

import asyncio

import numpy as np
import torch
from torch import Tensor

from mt_grpo.errors import ConfigError
from mt_grpo.forward.media import media_tokens
from mt_grpo.forward.probe import (
    FACTOR,
    MOST_NOISE,
    REACHES,
    SHALLOWEST,
    TURN,
    Proof,
    base_model,
    rounding_step,
    shaken,
    takes,
)
from mt_grpo.rollout.engine import Sample, SamplingParams
from mt_grpo.rollout.engines.transformers import TransformersEngine

_LONGEST = 1024
"""Most tokens of the longest context, so that the test takes seconds."""

RESULT = 7
"""Most tokens between the two turns."""

EXACT = 1e-3
"""Largest mean difference over a row's samples in float32, in nats. Some layers with a state go on from it by another
formula than they compute a row with (transformers clamps a step of Mamba 2 in rows alone), which moves less."""


async def prove_engine(engine: TransformersEngine, mixed_precision: str = "no") -> None:
    """Proves an engine for its model, without a trace; it keeps prefixes afterwards if that changes nothing."""
    engine.keeps_prefixes = False
    proof = await measure_engine(engine, mixed_precision)
    if not proof.holds:
        raise ConfigError(
            f"A batch of {type(base_model(engine.model)).__name__} with rows of several lengths is sampled "
            f"{proof.difference:.1e} nats away from a forward over each row, which is what is trained, where its "
            f"precision explains {proof.allowed:.1e}: set `use_vllm: true` to sample from a server."
        )
    engine.keeps_prefixes = engine.context_length > 2 * TURN + RESULT
    if engine.keeps_prefixes:
        try:
            engine.keeps_prefixes = (await measure_engine(engine, mixed_precision, turns=2)).holds
        except Exception:  # of a model's own code, which does not go on from a cache
            engine.keeps_prefixes = False


async def measure_engine(engine: TransformersEngine, mixed_precision: str = "no", turns: int = 1) -> Proof:
    """How far the log-probs of what an engine samples are from those of a forward over each row alone."""
    contexts = probe_contexts(engine, turns)
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


def probe_contexts(engine: TransformersEngine, turns: int = 1) -> list[list[int]]:
    """
    Three contexts, of which the shorter two are padded by numbers of tokens that no kernel's block divides. The
    longest is longer than the model's windows, where these have less than `_LONGEST` tokens. All leave room for turns.
    """
    whole = base_model(engine.model).config
    config = whole.get_text_config()
    reaches = [getattr(config, name, None) or 0 for name in REACHES]
    longest = max(SHALLOWEST, *(reach for reach in reaches if reach < _LONGEST)) + TURN
    longest = max(1, min(longest, engine.context_length - turns * TURN - (turns - 1) * RESULT))
    draw = np.random.default_rng(0)
    words = np.setdiff1d(
        np.arange(config.vocab_size), [*media_tokens(whole).values()]
    )  # no image stands behind others
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
