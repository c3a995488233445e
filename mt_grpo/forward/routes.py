"""
Routes of mixtures: the experts that each token went to while it was sampled, recorded there and replayed in training.
Where two experts score nearly alike, rounding decides, and sampler and trainer would route some tokens differently.

A route is an array of (layers, k) expert indices, k experts per token. Layers without experts have zeros. As bytes it
is `uint8` where the model has at most 256 experts, else `uint16`, as vLLM returns it. A token whose bytes are all 255
has no route.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from mt_grpo import token_tree
from mt_grpo.errors import UnsupportedModelError
from mt_grpo.forward.attention import CURRENT, TreeLayout

NO_ROUTE = token_tree.NO_ROUTE[0]
"""Every byte of the route of a token that has none."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")


@dataclass(frozen=True)
class _RouteShape:
    """A model's layers, experts a token goes to in each, all experts of one, and groups that are scored first."""

    layers: int
    chosen: int
    experts: int
    groups: int = 0

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of an expert's index."""
        return np.dtype(np.uint8 if self.experts <= 256 else np.uint16)

    @property
    def width(self) -> int:
        """Bytes of a token's route."""
        return self.layers * self.chosen * self.dtype.itemsize


def route_shape(config: PreTrainedConfig) -> _RouteShape | None:
    """The shape of a model's routes; `None` for a model without experts to choose from."""
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None) or []
    if "mlp" in kinds and "moe" not in kinds:  # Nemotron-H has numbers of experts also where it has none
        return None
    experts, chosen = _experts(config)
    groups = getattr(config, "n_group", None) or 0
    return _RouteShape(config.num_hidden_layers, chosen, experts, groups) if 0 < chosen < experts else None


def has_router_loss(config: PreTrainedConfig) -> bool:
    """Whether a model that can return the scores of its routers has routers."""
    return all(_experts(config.get_text_config()))


def router_loss(config: PreTrainedConfig, scores: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
    """The loss that balances experts, as Mixtral's file computes it for all mixtures."""
    loss: Tensor = load_balancing_loss_func(scores, *_experts(config.get_text_config()), mask)
    return loss


def _experts(config: PreTrainedConfig) -> tuple[int, int]:
    """Experts in a layer, and those that a token goes to; 0 where there are none. transformers has many names."""
    experts, chosen = (
        next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)
        for names in (_EXPERTS, _CHOSEN)
    )
    return experts, chosen


class _Choice(NamedTuple):
    """What `torch.topk` returns."""

    values: Tensor
    indices: Tensor


class _Router(TorchFunctionMode):
    """Stands between a router and `torch.topk`, by which all of them choose experts; `choose` has the last word."""

    def __init__(self, shape: _RouteShape, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._shape, self._choose = shape, choose
        self.choices = 0

    def __torch_function__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function not in (torch.topk, torch.Tensor.topk):
            return found
        scores, own = args[0] if args else kwargs["input"], found[1]
        # some routers choose among groups of experts before, of which there may be one
        if scores.dim() == 3 and scores.size(1) == self._shape.groups:
            return found
        if scores.size(-1) != self._shape.experts or own.size(-1) != self._shape.chosen:
            return found
        self.choices += 1
        chosen = self._choose(own)
        return found if chosen is own else _Choice(scores.gather(-1, chosen), chosen)


class _Block:
    """Hooks on a layer's router and experts, by which the experts that it chooses are recorded or replaced."""

    def __init__(
        self, layer: int, module: nn.Module, shape: _RouteShape, choose: Callable[[int, Tensor], Tensor] | None = None
    ) -> None:
        self.layer, self._shape, self._choose = layer, shape, choose
        self.choices = 0
        self._entered: list[tuple[_Router, ExitStack]] = []
        self._handles = [
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, *_: object) -> None:
        layout = CURRENT.get()
        choose = self._choose or (layout and layout.choose)
        if choose:
            mode, stack = _Router(self._shape, partial(choose, self.layer)), ExitStack()
            stack.enter_context(mode)
            self._entered.append((mode, stack))

    def _end(self, *_: object) -> None:
        if self._entered:
            mode, stack = self._entered.pop()
            stack.close()
            self.choices += mode.choices

    def remove(self) -> None:
        """Leaves the module as it was."""
        for handle in self._handles:
            handle.remove()


def _blocks(
    model: nn.Module, shape: _RouteShape, choose: Callable[[int, Tensor], Tensor] | None = None
) -> list[_Block]:
    """The parts of a model's layers that may hold a router: those with a matrix that has a row for each expert."""

    def may_route(module: nn.Module) -> bool:
        shapes = (getattr(part, "ds_shape", part.shape) for part in module.parameters())
        return any(len(sizes) == 2 and sizes[0] == shape.experts for sizes in shapes)

    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == shape.layers:
            found = [
                _Block(number, part, shape, choose)
                for number, layer in enumerate(module)
                for part in layer.children()
                if may_route(part)
            ]
            if found:
                return found
    return []


class Recorder:
    """Records the routes of all forwards of a model while it is entered."""

    def __init__(self, model: nn.Module) -> None:
        self.shape = route_shape(model.config)
        self._model = model
        self._found: dict[int, list[Tensor]] = {}

    def __enter__(self) -> Recorder:
        self._found = {}
        self._own = [] if self.shape is None else _blocks(self._model, self.shape, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for block in self._own:
            block.remove()

    def _note(self, layer: int, own: Tensor) -> Tensor:
        self._found.setdefault(layer, []).append(own.reshape(-1, own.size(-1)))
        return own

    def routes(self, rows: int) -> np.ndarray | None:
        """The routes of the forwards of `rows` sequences, each of which went on where the one before ended."""
        if self.shape is None or not self._found:
            return None
        chosen = self.shape.chosen
        joined = {
            layer: torch.cat([piece.view(rows, -1, chosen) for piece in found], dim=1).cpu().numpy()
            for layer, found in self._found.items()
        }
        lengths = {found.shape[1] for found in joined.values()}
        if len(lengths) > 1 or len({len(found) for found in self._found.values()}) > 1:
            return None
        whole = np.zeros((rows, lengths.pop(), self.shape.layers, self.shape.chosen), dtype=self.shape.dtype)
        for layer, found in joined.items():
            whole[:, :, layer] = found
        return whole.reshape(rows, whole.shape[1], -1).view(np.uint8)


class Replayer:
    """Lets the routers of a model choose what the routes of a packed row say."""

    def __init__(self, model: nn.Module, shape: _RouteShape) -> None:
        self.shape, self.name = shape, type(model).__name__
        self.counts = _RouteCounts()
        self._blocks = _blocks(model, shape)

    @contextmanager
    def replaying(self, layout: TreeLayout, routes: np.ndarray, shared: tuple[int, int]) -> Iterator[None]:
        """Has the forward inside, which is that of `layout`, choose by its routes."""
        layout.choose = _Replay(routes, self).choose
        for block in self._blocks:
            block.choices = 0
        yield
        choices = Counter({block.layer: 0 for block in self._blocks})
        for block in self._blocks:
            choices[block.layer] += block.choices
        if max(choices.values(), default=0) != 1:
            raise _cannot_replay(f"A layer of {self.name} does not choose its experts once for each token")
        self.counts.shared += shared[0]
        self.counts.shared_differing += shared[1]

    def take_counts(self) -> _RouteCounts:
        """What was replayed since the last call."""
        counts, self.counts = self.counts, _RouteCounts()
        return counts


def _cannot_replay(fault: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{fault}, so routes cannot be replayed; set `router_replay: false`.")


@dataclass
class _RouteCounts:
    """Counts of tokens."""

    routed: Tensor | int = 0
    differing: Tensor | int = 0
    shared: int = 0
    shared_differing: int = 0


class _Replay:
    """The routes of a packed row of `N` tokens."""

    def __init__(self, routes: np.ndarray, replayer: Replayer) -> None:
        self.shape, self._replayer = replayer.shape, replayer
        if routes.shape[1] != self.shape.width:
            raise UnsupportedModelError(
                f"The engine's routes have {routes.shape[1]} bytes for each token, and those of {replayer.name} have "
                f"{self.shape.width}: let the engine serve the model that is trained, or set `router_replay: false`."
            )
        self._routes = routes
        self._tensors: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def choose(self, layer: int, own: Tensor) -> Tensor:
        """The experts of a layer, `(N, k)` as `own` is: those of the routes, and `own` for tokens without."""
        if own.numel() != len(self._routes) * self.shape.chosen:
            raise _cannot_replay(
                f"A router of {self._replayer.name} chose for {own.numel() // self.shape.chosen} tokens, where a row "
                f"has {len(self._routes)}"
            )
        routes, known = self._on(own.device)
        known = known.view(*own.shape[:-1], 1)
        chosen = torch.where(known, routes[layer].view_as(own), own)
        differs = ~(own.unsqueeze(-1) == chosen.unsqueeze(-2)).any(dim=-1).all(dim=-1)
        self._replayer.counts.routed += known.sum()
        self._replayer.counts.differing += differs.sum()
        return chosen

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The routes, `(layers, N, k)` int64, and which tokens have one, `(N,)`."""
        if device not in self._tensors:
            known = (self._routes != NO_ROUTE).any(axis=1)
            routes = self._routes.view(self.shape.dtype).reshape(-1, self.shape.layers, self.shape.chosen)
            routes = np.where(known[:, None, None], routes, 0).swapaxes(0, 1).astype(np.int64)
            self._tensors[device] = torch.from_numpy(routes).to(device), torch.from_numpy(known).to(device)
        return self._tensors[device]
