"""
From a model's hidden states to log-probs and entropies of labels, with the logits of one chunk in memory at a time,
over the tokens that `top_k`, `top_p` and `min_p` keep.

What is between backbone and logits is the model's own forward, with a stub as the backbone that returns what the real
one returned. So a head of several layers, a scale and a cap are computed as the model computes them, whatever it calls
them. The output layer's own forward computes log-probs in place of logits.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from mt_grpo.errors import ConfigError
from mt_grpo.forward.packing import Labels, cannot_pack

_EXCLUDED = -1e4  # nats: a probability of 0 without an infinity, whose product with 0 is not a number


@dataclass(frozen=True)
class Truncation:
    """
    Which tokens can be drawn. Names, meaning and order are vLLM's: after temperature come `min_p`, `top_k`, then
    `top_p` over the tokens that are left. Tokens that are as likely as the last one that can be drawn can be drawn
    too.

    Args:
        top_k (`int`, *optional*, defaults to `0`): Keeps this many of the likeliest tokens; 0 or less keeps all.
        top_p (`float`, *optional*, defaults to `1.0`): Keeps the fewest tokens whose probabilities add up to this.
        min_p (`float`, *optional*, defaults to `0.0`): Keeps tokens at least this likely, relative to the likeliest.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.top_p <= 1 and 0 <= self.min_p <= 1):
            raise ConfigError(f"{self}: set `top_p` to a number above 0 and at most 1, and `min_p` from 0 to 1.")

    def floor(self, logits: Tensor) -> Tensor:
        """The smallest logit of a token that can be drawn, `(M,)`, of logits `(M, vocab)` after temperature."""
        lowest = math.log(self.min_p) if self.min_p > 0 else -math.inf
        floor = logits.amax(dim=1, keepdim=True) + lowest
        ordered = None
        if 0 < self.top_k < logits.size(1):
            ordered = logits.topk(self.top_k, dim=1).values
            floor = floor.maximum(ordered[:, -1:])
        if self.top_p < 1:
            if ordered is None:
                ordered = logits.sort(dim=1, descending=True).values
            total = logits.masked_fill(logits < floor, -math.inf).logsumexp(dim=1, keepdim=True)
            probabilities = (ordered - total).exp()
            before = probabilities.cumsum(dim=1) - probabilities
            last = (before < self.top_p).sum(dim=1, keepdim=True) - 1
            floor = floor.maximum(ordered.gather(1, last))
        return floor.squeeze(1)

    def apply(self, logits: Tensor, labels: Tensor) -> Tensor:
        """
        Logits `(M, vocab)`, whose softmax is the distribution that `labels`, `(M,)`, were drawn from; labels are kept.
        """
        whole = logits.detach()
        excluded = _excludes(whole, self.floor(whole), labels)
        return torch.where(excluded, whole.amax(dim=1, keepdim=True) + _EXCLUDED, logits)


def _excludes(logits: Tensor, floor: Tensor, labels: Tensor) -> Tensor:
    """Tokens that cannot be drawn, `(M, vocab)` bool: those below the floor `(M,)`, except the labels."""
    return (logits < floor[:, None]).scatter_(1, _as_columns(labels), False)


def _as_columns(values: Tensor) -> Tensor:
    """Values `(M,)` or `(M, k)` as `(M, k)`."""
    return values if values.dim() == 2 else values[:, None]


_Transform = Callable[[Tensor], Tensor]

CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}
"""Logits per chunk, by device: 64 MiB on a CPU and 1 GiB on a GPU, in float32."""


def chunked_logps(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperature: float = 1.0,
    truncation: Truncation | None = None,
    transform: _Transform | None = None,
) -> tuple[Tensor, Tensor]:
    """
    `log_softmax(transform(hidden @ weight.T) / temperature)` at the labels, and the entropy of the same distribution.
    Both are over the tokens that `truncation` keeps, and the label. The gradient treats the set of kept tokens as
    constant. Labels are `(M,)`, or `(M, k)` where the log-probs of several tokens are wanted at each place.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    elements = CHUNK_ELEMENTS.get(hidden.device.type, 2**26)
    if truncation is not None:
        elements //= 8  # sorting takes several times the memory of what is sorted
    chunk = max(16, elements // weight.size(0))
    arguments = (hidden, weight, bias, labels, temperature, truncation, chunk, transform)
    logps, entropies = _Score.apply(*arguments)  # type: ignore[no-untyped-call]  # torch gives it no types
    return logps, entropies


class _Score(torch.autograd.Function):
    """
    With `p` the softmax and `H` its entropy, `d logp / d logit = onehot - p` and `d H / d logit = -p (log p + H)`.
    The backward computes each chunk's logits again, except those of the last chunk, which are still in memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        truncation: Truncation | None,
        chunk: int,
        transform: _Transform | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        size = hidden.size(0)
        logps, entropies, normalisers = (
            torch.empty(shape, dtype=dtype, device=hidden.device) for shape in (labels.shape, size, size)
        )
        floors = None if truncation is None else torch.empty_like(normalisers)
        logits = excluded = None
        with torch.autocast(hidden.device.type, enabled=False):
            matrix = weight.to(hidden.dtype)
            for start in range(0, size, chunk):
                part = slice(start, start + chunk)
                logits = _logits(hidden[part], matrix, bias)
                logits = _final(logits if transform is None else transform(logits), temperature, dtype)
                if truncation is not None and floors is not None:
                    floors[part] = truncation.floor(logits)
                    excluded = _excludes(logits, floors[part], labels[part])
                peak = logits.amax(dim=1, keepdim=True)
                logits -= peak
                if excluded is not None:
                    logits.masked_fill_(excluded, _EXCLUDED)
                chosen = logits.gather(1, _as_columns(labels[part]))
                powers = logits.exp()
                total = powers.sum(dim=1)
                normaliser = total.log()
                logps[part] = (chosen - normaliser[:, None]).view(labels[part].shape)
                entropies[part] = normaliser - powers.mul_(logits).sum(dim=1) / total
                normalisers[part] = normaliser + peak.squeeze(1)
                if start + chunk >= size and transform is None and any(ctx.needs_input_grad):
                    ctx.last = logits.sub_(normaliser[:, None])
        ctx.save_for_backward(hidden, weight, bias, labels, normalisers, entropies, floors)
        ctx.temperature, ctx.chunk, ctx.transform = temperature, chunk, transform
        ctx.set_materialize_grads(False)
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logps: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, normalisers, entropies, floors = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        size = hidden.size(0)
        with torch.autocast(hidden.device.type, enabled=False):
            grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
            zeros = functools.partial(torch.zeros, dtype=normalisers.dtype, device=hidden.device)
            grad_weight = zeros(weight.shape) if wants_weight else None
            grad_bias = zeros(weight.size(0)) if wants_bias else None
            matrix = weight.to(hidden.dtype)
            last, ctx.last = getattr(ctx, "last", None), None
            for start in range(0, size, ctx.chunk):
                part = slice(start, start + ctx.chunk)
                raw = transformed = None
                if start + ctx.chunk >= size and last is not None:
                    logp = last
                else:
                    logp = _logits(hidden[part], matrix, bias)
                    if ctx.transform is not None:
                        with torch.enable_grad():
                            raw = logp.requires_grad_()
                            transformed = ctx.transform(raw.clone())  # which may be changed in place
                        logp = transformed.detach().clone()
                    logp = _final(logp, ctx.temperature, normalisers.dtype)
                    excluded = None if floors is None else _excludes(logp, floors[part], labels[part])
                    logp -= normalisers[part, None]
                    if excluded is not None:
                        logp.masked_fill_(excluded, _EXCLUDED)
                grad = _grad_logits(
                    logp,
                    labels[part],
                    None if grad_logps is None else grad_logps[part] / ctx.temperature,
                    None if grad_entropies is None else grad_entropies[part] / ctx.temperature,
                    entropies[part],
                )
                if raw is not None and transformed is not None:
                    (grad,) = torch.autograd.grad(transformed, raw, grad.to(transformed.dtype))
                if grad_bias is not None:
                    grad_bias += grad.sum(dim=0)
                grad = grad.to(hidden.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = grad @ matrix
                if grad_weight is not None and grad_weight.dtype == grad.dtype:
                    grad_weight.addmm_(grad.T, hidden[part])
                elif grad_weight is not None:
                    grad_weight += grad.T @ hidden[part]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 5,
        )


def _logits(hidden: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(hidden, matrix, None if bias is None else bias.to(hidden.dtype))


def _final(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    logits = logits.to(dtype)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _grad_logits(
    logp: Tensor, labels: Tensor, grad_logp: Tensor | None, grad_entropy: Tensor | None, entropy: Tensor
) -> Tensor:
    labels = _as_columns(labels)
    grad_logp = None if grad_logp is None else _as_columns(grad_logp)
    if grad_entropy is None:
        assert grad_logp is not None  # autograd asks for no gradient of neither
        grad = logp.exp_().mul_(-grad_logp.sum(dim=1, keepdim=True))
    else:
        probability = logp.exp()
        grad = logp.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        if grad_logp is not None:
            grad -= grad_logp.sum(dim=1, keepdim=True)
        grad.mul_(probability)
    if grad_logp is not None:
        grad.scatter_add_(1, labels, grad_logp)
    return grad


@torch.no_grad()
def _chunked_top(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    top: int,
    temperature: float = 1.0,
    transform: _Transform | None = None,
) -> tuple[Tensor, Tensor]:
    """
    As `chunked_logps`, of the label and the `top` likeliest tokens, `(M, 1 + top)`, with the ids of those, `(M, top)`.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    found = [
        (torch.empty(0, 1 + top, device=hidden.device), torch.empty(0, top, dtype=torch.long, device=hidden.device))
    ]
    chunk = max(16, CHUNK_ELEMENTS.get(hidden.device.type, 2**26) // weight.size(0))
    with torch.autocast(hidden.device.type, enabled=False):
        matrix = weight.to(hidden.dtype)
        for states, label in zip(hidden.split(chunk), labels.split(chunk), strict=True):
            logits = _logits(states, matrix, bias)
            logits = logits if transform is None else transform(logits)
            logits = _final(logits, temperature, torch.promote_types(hidden.dtype, torch.float32))
            found.append(_likeliest(logits, label, top))
    logps, ids = (torch.cat(values) for values in zip(*found, strict=True))
    return logps, ids


def _likeliest(logits: Tensor, labels: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """What `_chunked_top` returns, of logits `(M, vocab)` after temperature."""
    values, ids = logits.topk(top, dim=1)
    chosen = torch.cat([logits.gather(1, labels[:, None]), values], dim=1)
    return chosen - logits.logsumexp(dim=1, keepdim=True), ids


def at_labels(logits: Tensor, label: Tensor, top: int = 0) -> tuple[Tensor, Tensor]:
    """Log-probs of labels `(M,)` or `(M, k)`, and entropies, or those of `_likeliest`, from logits `(M, vocab)`."""
    if top:
        return _likeliest(logits, label, top)
    distribution = logits.log_softmax(dim=-1)
    entropies = -(distribution.exp() * distribution).sum(dim=-1)
    return distribution.gather(1, _as_columns(label)).view(label.shape), entropies


_Scorer = Callable[[Tensor], tuple[Tensor, Tensor]]


class Sampling(NamedTuple):
    """
    The distribution of labels, but for `plain` ones, `(M,)` bool, and how many likeliest tokens are wanted beside.
    """

    temperature: float
    truncation: Truncation | None = None
    plain: np.ndarray | None = None
    top: int = 0


@contextmanager
def replaced(values: dict[str, Any], name: str, value: object) -> Iterator[None]:
    """A context in which a dictionary, such as the attributes of a module, has another value under a name."""
    missing = name not in values
    usual = values.get(name)
    values[name] = value
    try:
        yield
    finally:
        if missing:
            del values[name]
        else:
            values[name] = usual


class _Returns(nn.Module):
    """Stands in for a module, and returns what that returned before; so does each part of it."""

    def __init__(self, outputs: ModelOutput, usual: nn.Module) -> None:
        super().__init__()
        self.outputs = outputs
        vars(self)["usual"] = usual  # no part of this module

    def forward(self, *args: object, **kwargs: object) -> ModelOutput:
        return self.outputs

    def __getattr__(self, name: str) -> Any:
        found = getattr(vars(self)["usual"], name)
        return _Returns(self.outputs, found) if isinstance(found, nn.Module) else found


def backbone_name(model: PreTrainedModel) -> str | None:
    """Attribute that holds the backbone of a causal language model; `None` if it has none of its own."""
    children = [name for name, module in model.named_children() if isinstance(module, PreTrainedModel)]
    named = [name for name, module in model.named_children() if module is model.base_model]
    return next(iter(named or (children if len(children) == 1 else [])), None)


def output_layer(model: PreTrainedModel) -> nn.Linear | None:
    """The linear layer whose outputs are logits; `None` if there is none."""
    head = model.get_output_embeddings()
    if isinstance(head, ModulesToSaveWrapper):
        head = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapter]
    return head if isinstance(head, nn.Linear) else None


def score_states(
    model: PreTrainedModel,
    outputs: ModelOutput,
    predictor: Tensor,
    label: Tensor,
    sampling: Sampling,
    in_float32: bool,
    labels: Labels | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of labels; the output layer is called as a module, whose hooks gather its weights."""
    head, module = output_layer(model), model.get_output_embeddings()
    assert head is not None  # else the model was refused
    states = outputs.last_hidden_state.flatten(0, 1)
    predicting = states.index_select(0, predictor.to(states.device))
    if labels is not None:
        predicting = labels.deal(predicting)
    around = _Around(model, outputs)
    if "_output_kind" not in vars(model):  # asked in a forward, where weights are whole
        model._output_kind = around.kind(states[:1].detach())
    kind: _Kind = model._output_kind

    def score(states: Tensor) -> tuple[Tensor, Tensor]:
        states = states.flatten(0, -2).to(head.weight.device)
        target = label.to(states.device)
        transform = around.transform(predicting[:1].detach()) if kind.transforms else None
        if not in_float32:
            return _logps(states, head, target, sampling, transform)
        with torch.autocast(states.device.type, enabled=False):
            return _logps(states.float(), head, target, sampling, transform)

    if kind.prepares:
        return around.into_head(predicting, head, score)
    with replaced(vars(head), "forward", score):
        logps, entropies = module(predicting)
    return logps, entropies


def _logps(
    states: Tensor, head: nn.Linear, label: Tensor, sampling: Sampling, transform: _Transform | None
) -> tuple[Tensor, Tensor]:
    temperature, truncation, plain, top = sampling
    if top:
        return _chunked_top(states, head.weight, head.bias, label, top, temperature, transform)
    if plain is None or (temperature, truncation) == (1.0, None):
        return chunked_logps(states, head.weight, head.bias, label, temperature, truncation, transform)
    order = torch.from_numpy(np.argsort(plain, kind="stable")).to(states.device)
    sizes = [int((~plain).sum()), int(plain.sum())]
    parts = zip(states[order].split(sizes), label[order].split(sizes), (sampling[:2], (1.0, None)), strict=True)
    found = [chunked_logps(rows, head.weight, head.bias, labels, *how, transform) for rows, labels, how in parts]
    back = order.argsort()
    logps, entropies = (torch.cat(values)[back] for values in zip(*found, strict=True))
    return logps, entropies


class _Kind(NamedTuple):
    """What a model does besides calling its output layer: to the states before it, and to the logits after it."""

    prepares: bool
    transforms: bool


class _Around:
    """Runs the model's own forward on what its backbone returned before."""

    def __init__(self, model: PreTrainedModel, outputs: ModelOutput) -> None:
        self._model, self._outputs = model, outputs
        name, module = backbone_name(model), model.get_output_embeddings()
        assert name is not None  # else the model was refused
        self._backbone, self._usual, self._module = name, getattr(model, name), module
        self._place = next(
            (parent._modules, name)
            for parent in model.modules()
            for name, child in parent.named_children()
            if child is module
        )

    def __call__(self, states: Tensor) -> Tensor:
        """`(1, M, vocab)` logits of `(M, hidden)` states."""
        outputs = copy.copy(self._outputs)
        outputs.last_hidden_state = states[None]
        ids = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
        with replaced(self._model._modules, self._backbone, _Returns(outputs, self._usual)):
            logits: Tensor = self._model._forward_without_trees(input_ids=ids, use_cache=False).logits
        return logits

    def transform(self, states: Tensor) -> _Transform:
        """What becomes of `(M, vocab)` logits, whatever one token's states are."""

        def transform(logits: Tensor) -> Tensor:
            # another module in its place: hooks of the layer itself must not free the weights that are in use
            with replaced(*self._place, _Returns(logits[None], self._module)):
                return self(states)[0]

        return transform

    def into_head(self, states: Tensor, head: nn.Linear, score: _Scorer) -> tuple[Tensor, Tensor]:
        """What `score` returns of the states that reach the output layer."""
        found: list[tuple[Tensor, Tensor]] = []

        def forward(states: Tensor) -> Tensor:
            found.append(score(states))
            return states.new_zeros(1, 1, head.weight.size(0))  # whatever the rest of the forward makes of it

        with replaced(vars(head), "forward", forward):
            self(states)
        if len(found) != 1:
            raise cannot_pack(f"{type(self._model).__name__} calls its output layer {len(found)} times")
        return found[0]

    @torch.no_grad()
    def kind(self, states: Tensor) -> _Kind:
        """What the model does to states, and to logits, large ones too."""
        seen: list[Tensor] = []
        recorder = _Returns(states.new_zeros(1, 1, 2), self._module)
        recorder.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].clone()))
        with replaced(*self._place, recorder):
            self(states)
        logits = torch.linspace(-100, 100, 64, device=states.device)[None]
        return _Kind(
            prepares=len(seen) != 1 or not torch.equal(seen[0][0], states),
            transforms=not torch.equal(self.transform(states)(logits.clone()).to(logits.dtype), logits),
        )
