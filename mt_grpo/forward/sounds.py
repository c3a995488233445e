"""
Sounds in packed trees. A model adds what it hears to the embeddings that it hands to its text decoder, each model in
its own way. So it is asked for these embeddings before, over a row of nothing but sounds, and they are put into the
tree's where the sounds stand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from mt_grpo.errors import UnsupportedModelError
from mt_grpo.forward.images import Images, in_order, joined, kinds, sound_token
from mt_grpo.forward.packing import Packed
from mt_grpo.images import SOUND, kind_of


def packed_sounds(backbone: Any, packed: Packed, images: Images, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """What a model hears in a packed row. Each sound is heard once, however many branches play it."""
    places = torch.from_numpy(packed.input_ids)
    places = (kinds(places) == SOUND).nonzero()[:, 0]
    if not len(places):
        return None
    order = [each for each in in_order(packed.input_ids, images) if kind_of(each) == SOUND]
    unique = list(dict.fromkeys(order))
    sizes = [images[each].size for each in unique]
    found = dict(zip(unique, _heard(backbone, unique, images, device).split(sizes), strict=True))
    return places.to(device), torch.cat([found[each] for each in order])


def _heard(backbone: Any, sounds: list[int], images: Images, device: torch.device) -> Tensor:
    """The embeddings that a backbone hands to its decoder for sounds, one after another: `(M, H)`."""
    decoder, asked = backbone.get_decoder(), list[Tensor]()
    size = sum(images[each].size for each in sounds)
    ids = torch.full((1, size), sound_token(backbone.config) or 0, device=device)
    if decoder is not backbone:  # Phi 4's is both
        with _asking(decoder, asked):
            given = joined(sounds, images, device)
            backbone(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **given)
    if not asked:
        raise UnsupportedModelError(
            f"{type(backbone).__name__} has no text decoder apart from what hears sounds, so trees cannot be packed "
            "for it; set `forward: padded`."
        )
    return asked[0][0]


class _Nothing(MoeModelOutputWithPast):  # type: ignore[misc]
    """What a decoder that computed nothing returns; backbones look for outputs of several names in it."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _asking(decoder: Any, asked: list[Tensor]) -> Iterator[None]:
    """Keeps the embeddings that a decoder is given in `asked`, and lets it compute nothing."""

    def keep(*args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any) -> Any:
        if inputs_embeds is not None:
            asked.append(inputs_embeds)
        return _Nothing(last_hidden_state=inputs_embeds)

    own = vars(decoder).get("forward")
    decoder.forward = keep
    try:
        yield
    finally:
        if own is None:
            del decoder.forward
        else:
            decoder.forward = own


@contextmanager
def playing(backbone: Any, heard: tuple[Tensor, Tensor] | None) -> Iterator[None]:
    """Puts what `packed_sounds` returned among the embeddings that a backbone hands to its decoder."""
    if heard is None:
        yield
        return
    places, embeddings = heard

    def put(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        row = kwargs["inputs_embeds"]
        return args, {**kwargs, "inputs_embeds": row.index_copy(1, places, embeddings[None].to(row))}

    hook = backbone.get_decoder().register_forward_pre_hook(put, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
