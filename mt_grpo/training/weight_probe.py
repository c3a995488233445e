"""The proof of a weight sync: one sequence, scored by the server and by the trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from mt_grpo.rollout.vllm_http import RequestFailed, ServerControl

LENGTH = 64
"""Tokens of the probe sequence."""


@dataclass(frozen=True)
class Verdict:
    """
    How far two scorings of the probe are apart.

    Args:
        server (`float`), trainer (`float`): Mean log-probability of the probe's tokens, in nats.
        difference (`float`): Mean absolute difference a token, in nats.
        largest (`float`): Largest absolute difference of a token, in nats.
    """

    server: float
    trainer: float
    difference: float
    largest: float


def probe_ids(vocab_size: int, length: int = LENGTH) -> list[int]:
    """Token ids drawn from the whole vocabulary, the same everywhere: they touch all weights and suit no model."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


def server_logprobs(server: ServerControl, model: str, ids: list[int]) -> list[float]:
    """Log-probability of every token of `ids` but the first, at temperature 1, by the server; or `RequestFailed`."""
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    answer = server.post("/v1/completions", body)
    try:
        positions = answer["choices"][0]["prompt_logprobs"]
        return [entry[str(token)]["logprob"] for entry, token in zip(positions[1:], ids[1:], strict=True)]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        request, shown = f"POST {server.base_url}/v1/completions", str(answer)[:400]
        raise RequestFailed(f"{request} was answered with something that is not a scored prompt: {shown}", True) from (
            error
        )


@torch.no_grad()
def trainer_logprobs(model: Any, ids: list[int]) -> list[float]:
    """The same by the trainer's model; with sharded weights every process must call it."""
    training = model.training
    model.eval()
    try:
        device = next(model.parameters()).device
        tokens = torch.tensor([ids], device=device)
        logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
    finally:
        model.train(training)
    logprobs = torch.log_softmax(logits[0, :-1].float(), dim=-1)
    return logprobs.gather(1, tokens[0, 1:].unsqueeze(1))[:, 0].tolist()


def compare(server: list[float], trainer: list[float]) -> Verdict:
    """The distance between two scorings; one that is not a number counts as infinite."""
    differences = [abs(one - other) for one, other in zip(server, trainer, strict=True)]
    differences = [math.inf if math.isnan(value) else value for value in differences]
    count = len(differences)
    return Verdict(sum(server) / count, sum(trainer) / count, sum(differences) / count, max(differences))
