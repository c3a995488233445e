"""
Proves that weights arrived: compares the log-probs of one sequence by the server and by the trainer.

At the start of a run the server's weights equal the trainer's before anything was sent, so equal answers would prove
nothing. The first weights that are sent are therefore changed on purpose. The trainer computes the effect without
touching its weights: halving the weights of a linear layer halves its output.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from mt_grpo.servers.http import Server

logger = logging.getLogger(__name__)
_LENGTH = 64  # tokens of the probe sequence
_PADDING = 7  # padding tokens before it, to measure what padding alone changes
EXACT = 1e-3
"""Largest mean difference, in nats per token, if trainer and server compute in float32."""
NARROW = 0.25
"""The least that is allowed, in nats per token, if one of them computes in a narrower type."""


@dataclass(frozen=True)
class _Verdict:
    """How far two computations of the probe's log-probs are apart."""

    server: float
    trainer: float
    difference: float
    largest: float


def probe_ids(vocab_size: int) -> list[int]:
    """Random token ids of the whole vocabulary, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (_LENGTH,), generator=generator).tolist()


def server_likeliest(server: Server, model: str, ids: list[int], top: int) -> list[dict[int, float]]:
    """
    The server's log-probs of each token of `ids` but the first, and of the `top` that are likeliest there, by token
    and in order, at temperature 1; or `RequestFailed`.
    """
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top}

    def read(answer: Any) -> list[dict[int, float]]:
        read = []
        for token, entry in zip(ids[1:], answer["choices"][0]["prompt_logprobs"][1:], strict=True):
            logprobs = {int(name): value["logprob"] for name, value in entry.items()}
            if token not in logprobs or len(logprobs) < top:
                raise KeyError(token)
            read.append(dict(sorted(logprobs.items(), key=lambda each: -each[1])))
        return read

    found: list[dict[int, float]] = server.post("/v1/completions", body, read)
    return found


@torch.no_grad()
def trainer_logprobs(model: nn.Module, ids: list[int], padding: int = 0) -> list[float]:
    """The same by the trainer's model. With sharded weights every process must call it."""
    training = model.training
    model.eval()
    try:
        device = next(model.parameters()).device
        tokens = torch.tensor([ids[:1] * padding + ids], device=device)
        mask = torch.ones_like(tokens)
        mask[:, :padding] = 0
        options = {"position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)} if padding else {}
        logits = model(input_ids=tokens, attention_mask=mask, **options).logits[0, padding:]
    finally:
        model.train(training)
    logprobs = torch.log_softmax(logits[:-1].float(), dim=-1)
    return logprobs.gather(1, tokens[0, padding + 1 :].unsqueeze(1))[:, 0].tolist()


def _tolerance_for(expected: list[float], padded: list[float], epsilon: float) -> float:
    """
    The mean difference, in nats per token, that narrow types explain: ten times the larger of what padding alone
    changes in the trainer and what rounding would; 0.25 to 2, below the 7 to 16 of weights that did not arrive.
    """
    rounding = epsilon / 2 * sum(abs(value) for value in expected) / len(expected)
    return min(2.0, max(NARROW, 10.0 * rounding, 10.0 * compare(padded, expected).difference))


def compare(server: list[float], trainer: list[float]) -> _Verdict:
    """The distance between two lists of log-probs. A NaN counts as infinitely far away."""
    differences = [abs(one - other) for one, other in zip(server, trainer, strict=True)]
    differences = [math.inf if math.isnan(value) else value for value in differences]
    count = len(differences)
    return _Verdict(sum(server) / count, sum(trainer) / count, sum(differences) / count, max(differences))


class Proof:
    """
    Holds the trainer's answers against those of servers. `tolerance` is the largest mean absolute difference of a
    probe token's log-probability, in nats: 1e-3 if all is computed in float32, and measured otherwise, see
    `_tolerance_for`.
    """

    def __init__(self, get_model: Callable[[], nn.Module], vocab_size: int, tolerance: float | None) -> None:
        self.tolerance = EXACT if tolerance is None else tolerance
        self.expected: list[float] = []
        """The trainer's answers to hold a server against; empty until they are computed."""
        self._get_model, self._ids = get_model, probe_ids(vocab_size)
        self._measures, self._epsilon = tolerance is None, 0.0

    def use_dtypes(self, *dtypes: torch.dtype) -> None:
        """Those that trainer and servers compute in."""
        self._epsilon = max(torch.finfo(dtype).eps for dtype in dtypes)
        self._measures &= self._epsilon > torch.finfo(torch.float32).eps

    def compute(self, model: nn.Module | None = None, measure: bool = True) -> list[float]:
        """Computes the trainer's answers, and with `measure` how far a server's may be from them."""
        model = self._get_model() if model is None else model
        expected = trainer_logprobs(model, self._ids)
        if measure and self._measures:
            padded = trainer_logprobs(model, self._ids, _PADDING)
            self.tolerance = _tolerance_for(expected, padded, self._epsilon)
        return expected

    def compute_changed(self) -> None:
        """Computes what is expected of servers with weights that were changed on purpose."""
        self.expected = trainer_logprobs(self._get_model(), self._ids)

    def compare(self, server: Server, model: str, what: str) -> None:
        """Holds a server's answers, by a model of this name, against those that are expected."""
        found = server_likeliest(server, model, self._ids, 0)
        answers = [logprobs[token] for logprobs, token in zip(found, self._ids[1:], strict=True)]
        verdict = compare(answers, self.expected)
        logger.info("Weight sync verified at %s: %.2e nats a token.", server.url, verdict.difference)
        if verdict.difference > self.tolerance:
            raise server.sync_error(
                f"does not compute what the trainer computes{what}: over the same {len(self._ids)} tokens the mean "
                f"log-probability is {verdict.server:.4f} on the server and {verdict.trainer:.4f} in the trainer; "
                f"they differ by {verdict.difference:.2e} nats a token (at most {verdict.largest:.2e}), and "
                f"{self.tolerance:.1e} is allowed. Likely causes: weights that did not reach every layer (tied output "
                "embeddings, parameter names the server does not know), another run writing to the same server, a "
                "different dtype, quantization or model revision on the server."
            )


HALF = 0.5

_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "modules_to_save.default.")


@contextlib.contextmanager
def with_halved_weights(model: nn.Module) -> Iterator[set[str]]:
    """A context in which `model` computes as if its linear layers and embeddings had half their weights and biases."""
    names: set[str] = set()

    def add_hook(name: str, layer: nn.Module) -> RemovableHandle:
        def halve(module: nn.Module, inputs: object, output: object) -> torch.Tensor | None:
            if not isinstance(output, torch.Tensor):
                return None
            names.update((f"{name}.weight", f"{name}.bias"))
            return output * HALF

        return layer.register_forward_hook(halve)

    handles = [add_hook(name, layer) for name, layer in _layers(model)]
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers and embeddings by their names in a checkpoint; a layer and its merged adapter are one."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        base = module
        if isinstance(module, BaseTunerLayer):
            inside.update(module.modules())
            base = module.get_base_layer()
        if isinstance(base, (nn.Linear, nn.Embedding)):
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            yield name.removeprefix("base_model.model."), module
