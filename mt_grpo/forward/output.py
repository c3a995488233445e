"""
The part of a model between its backbone and its logits: the model's own forward, with a backbone that only returns
what the real one returned.

So a head of several layers, a scale and a cap are computed as the model computes them, whatever it calls them. The
output layer's own forward computes log-probs instead of logits, so that the logits of one chunk at a time are in
memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from mt_grpo.errors import UnsupportedModelError
from mt_grpo.forward.lm_head import Transform, Truncation, chunked_logps
from mt_grpo.forward.sequence_parallel import Labels

Score = Callable[[Tensor], tuple[Tensor, Tensor]]


class Sampling(NamedTuple):
    """
    The distribution that labels were drawn from.

    Args:
        temperature (`float`): Divides the logits.
        truncation (`Truncation`, *optional*): Which tokens can be drawn.
        plain (`np.ndarray`, *optional*): `(M,)` bool: labels that are scored at temperature 1 and without truncation.
    """

    temperature: float
    truncation: Truncation | None = None
    plain: np.ndarray | None = None


class _Returns(nn.Module):
    """In place of a module that has been called: it returns the same again, and so does each part of it."""

    def __init__(self, outputs: Any, usual: nn.Module) -> None:
        super().__init__()
        self.outputs = outputs
        vars(self)["usual"] = usual  # no part of this module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
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
    outputs: Any,
    predictor: Tensor,
    label: Tensor,
    sampling: Sampling,
    in_float32: bool,
    labels: Labels | None = None,
) -> tuple[Tensor, Tensor]:
    """
    Log-probs and entropies of labels.

    The output layer is called once, as a module: if that layer is sharded by itself, hooks gather its weights and
    reduce their gradients, and only a call of the module runs these hooks.
    """
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
    with _replaced(vars(head), "forward", score):
        logps, entropies = module(predicting)
    return logps, entropies


def _logps(
    states: Tensor, head: nn.Linear, label: Tensor, sampling: Sampling, transform: Transform | None
) -> tuple[Tensor, Tensor]:
    temperature, truncation, plain = sampling
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
    """The model's own forward, with what its backbone returned."""

    def __init__(self, model: PreTrainedModel, outputs: Any) -> None:
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
        with _replaced(self._model._modules, self._backbone, _Returns(outputs, self._usual)):
            logits: Tensor = self._model._forward_without_trees(input_ids=ids, use_cache=False).logits
        return logits

    def transform(self, states: Tensor) -> Transform:
        """What becomes of `(M, vocab)` logits, whatever one token's states are."""

        def transform(logits: Tensor) -> Tensor:
            # another module in its place: hooks of the layer itself must not free the weights that are in use
            with _replaced(*self._place, _Returns(logits[None], self._module)):
                return self(states)[0]

        return transform

    def into_head(self, states: Tensor, head: nn.Linear, score: Score) -> tuple[Tensor, Tensor]:
        """What `score` returns of the states that reach the output layer."""
        found: list[tuple[Tensor, Tensor]] = []

        def forward(states: Tensor) -> Tensor:
            found.append(score(states))
            return states.new_zeros(1, 1, head.weight.size(0))  # whatever the rest of the forward makes of it

        with _replaced(vars(head), "forward", forward):
            self(states)
        if len(found) != 1:
            raise UnsupportedModelError(
                f"{type(self._model).__name__} calls its output layer {len(found)} times, so trees cannot be packed "
                "for it; set `forward: padded`."
            )
        return found[0]

    @torch.no_grad()
    def kind(self, states: Tensor) -> _Kind:
        """What the model does to states, and to logits, large ones too."""
        seen: list[Tensor] = []
        recorder = _Returns(states.new_zeros(1, 1, 2), self._module)
        recorder.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].clone()))
        with _replaced(*self._place, recorder):
            self(states)
        logits = torch.linspace(-100, 100, 64, device=states.device)[None]
        return _Kind(
            prepares=len(seen) != 1 or not torch.equal(seen[0][0], states),
            transforms=not torch.equal(self.transform(states)(logits.clone()).to(logits.dtype), logits),
        )


@contextmanager
def _replaced(values: dict[str, Any], name: str, value: Any) -> Iterator[None]:
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
