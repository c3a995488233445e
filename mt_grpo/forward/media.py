"""
Images, videos and sounds among tokens; what is said of images here holds for all three. The tokens of an image have an
id of their own below 0, which is made of its content: so two prompts with the same words and other images share no
prefix, and all that compares tokens compares images too. `mt_grpo.media.kind_of` tells the three apart by the id.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ModelOutput, MoeModelOutputWithPast

from mt_grpo.forward.interface import base_model
from mt_grpo.forward.lm_head import replaced
from mt_grpo.forward.packing import FlatTree, Packed, cannot_pack, flatten
from mt_grpo.media import IMAGE, SOUND, VIDEO, kind_of
from mt_grpo.token_tree import TokenTree

TYPES = ("mm_token_type_ids", "token_type_ids")
"""Arguments by which models are told which tokens are an image's, and which a video's, see `kinds`."""


@dataclass(frozen=True, eq=False)
class MediumInputs:
    """What a model takes of one image."""

    size: int
    inputs: dict[str, Tensor]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The sizes of what a model takes, which differ where one is padded beside another."""
        return tuple(sorted({size for tensor in self.inputs.values() for size in tensor.shape[1:]}))


Media = Mapping[int, MediumInputs]
"""Images by the id of their tokens."""


BLANK, SILENCE = -(2**31) - 4, -(2**31) - 2
"""The ids of an image and of a sound that no conversation shows."""


def with_blank(trees: Sequence[FlatTree | TokenTree], images: Media) -> list[FlatTree | TokenTree]:
    """
    The trees of a forward, with `BLANK` or `SILENCE` where none shows an image or a sound: processes that train
    together gather or reduce a tower's weights together, so each looks at one in each forward.
    """
    found = list(trees)
    for blank in filter(images.__contains__, (BLANK, SILENCE)):
        heard = kind_of(blank) == SOUND
        if not any((((ids := _tokens(tree)) < 0) & ((ids & 3 == 2) == heard)).any() for tree in trees):
            tree = TokenTree()
            tree.add_turn([blank] * images[blank].size, [], [])
            found.append(tree)
    return found


def _tokens(tree: FlatTree | TokenTree) -> np.ndarray:
    return flatten(tree).tokens if isinstance(tree, TokenTree) else tree.tokens


def media_tokens(config: PreTrainedConfig) -> dict[int, int]:
    """The ids that a model knows the tokens of images, videos and sounds by, by kind; none for a model of text."""
    found = {}
    for kind, name in ((IMAGE, "image"), (VIDEO, "video"), (SOUND, "audio")):
        token = next(
            (
                value
                for end in ("id", "index")
                if isinstance(value := getattr(config, f"{name}_token_{end}", None), int)
            ),
            None,
        )
        # Gemma 4's name the token of sounds without hearing anything
        if token is not None and (kind != SOUND or getattr(config, "audio_config", config) is not None):
            found[kind] = token
    return found


def real_ids(ids: Tensor, config: PreTrainedConfig) -> Tensor:
    """Ids as the model knows them: those of images become its image token, and so on."""
    found = kinds(ids)
    for kind, token in media_tokens(config).items():
        ids = ids.masked_fill(found == kind, token)
    return ids


def kinds(ids: Tensor) -> Tensor:
    """What each token is of: `IMAGE`, `VIDEO`, `SOUND`, or 0 for text."""
    return (ids < 0).long() * (IMAGE + (ids & 3))


def _in_order(ids: np.ndarray, images: Media) -> list[int]:
    """The images whose tokens stand in a sequence, or in a packed row, one after another: each as often as there."""
    places = ids[ids < 0]
    found: list[int] = []
    begin = 0
    while begin < len(places):
        found.append(int(places[begin]))
        begin += images[found[-1]].size
    return found


def concat_media_inputs(order: Sequence[int], images: Media, device: torch.device) -> dict[str, Tensor]:
    """The inputs of several images as a model takes them: one after another, padded with zeros."""
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for image in order for name in images[image].inputs):
        parts = [images[image].inputs[name] for image in order if name in images[image].inputs]
        shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
        found[name] = torch.cat([_padded(part, shape) for part in parts]).to(device)
    return found


def _padded(part: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor with zeros behind what it has in all dimensions but the first."""
    missing = [most - size for most, size in zip(shape, part.shape[1:], strict=True)]
    return (
        nn.functional.pad(part, [each for size in reversed(missing) for each in (0, size)]) if any(missing) else part
    )


def row_inputs(model: nn.Module, ids: Tensor, images: Media) -> dict[str, Tensor]:
    """What a forward over rows with images, or beside such rows, takes beside their mask."""
    base = base_model(model)
    inputs = {"input_ids": real_ids(ids, base.config)}
    order = [image for row in ids.cpu().numpy() for image in _in_order(row, images)]
    if order:
        inputs |= concat_media_inputs(order, images, ids.device)
        inputs |= {name: kinds(ids) for name in TYPES if name in inspect.signature(base.forward).parameters}
    return inputs


class RowMedia:
    """
    Encodes the media of a packed row before anything runs over the tree, each once, however many branches have it.
    """

    def __init__(self, backbone: PreTrainedModel, packed: Packed, images: Media, device: torch.device) -> None:
        self._backbone, self._packed, self._images, self._device = backbone, packed, images, device
        self._order = _in_order(packed.input_ids, images)

    def features(self) -> dict[str, Any]:
        """The argument for the features of images and videos."""
        found = {
            name: self._features(getattr(self._backbone, f"get_{name}_features"), shown)
            for name, kind in (("image", IMAGE), ("video", VIDEO))
            if (shown := [each for each in self._order if kind_of(each) == kind])
        }
        return {"mm_encoder_outputs": found} if found else {}

    def _features(self, look: Callable[..., Any], order: Sequence[int]) -> ModelOutput:
        """What a model makes of images, or of videos, as often as they are shown."""
        unique = list(dict.fromkeys(order))
        known = inspect.signature(look).parameters
        inputs = concat_media_inputs(unique, self._images, self._device)
        features = look(**{name: value for name, value in inputs.items() if name in known}, return_dict=True)
        places = [unique.index(image) for image in order]
        projected = getattr(features, "pooler_output", None) is not None  # Llama 4 projects them later
        name = "pooler_output" if projected else "last_hidden_state"
        sizes = [self._images[image].size for image in unique]
        setattr(features, name, _in_places(getattr(features, name), sizes, places))
        deep = getattr(features, "deepstack_features", None)  # of Qwen3-VL, for several layers
        if deep is not None:
            features.deepstack_features = [_in_places(of_layer, sizes, places) for of_layer in deep]
        return features

    def positions(self) -> Tensor | None:
        """
        The positions of the row's tokens, `(3, 1, N)`, where the model gives image tokens a place in three dimensions.
        """
        ask = getattr(self._backbone, "get_rope_index", None)
        if ask is None:
            return None
        ids_of_row, images = self._packed.input_ids, self._images
        known = inspect.signature(ask).parameters
        asked = {name for name, each in known.items() if each.default is each.empty and name != "kwargs"}
        available = {"input_ids", "mm_token_type_ids", *(name for image in images.values() for name in image.inputs)}
        if asked - available:
            raise cannot_pack(f"{type(self._backbone).__name__} places images by `{min(asked - available)}`")
        positions = torch.zeros(3, len(ids_of_row), dtype=torch.long)
        for path in FlatTree(ids_of_row, ids_of_row, self._packed.parent).paths():
            ids = torch.from_numpy(ids_of_row[path])[None]
            given = concat_media_inputs(_in_order(ids_of_row[path], images), images, torch.device("cpu"))
            if "feature_attention_mask" in given:  # as the forwards of Qwen's Omni models say it
                given["audio_seqlens"] = given["feature_attention_mask"].sum(dim=1)
            if "video_second_per_grid" in given:
                given["second_per_grids"] = given["video_second_per_grid"]
            given |= {"mm_token_type_ids": kinds(ids), "attention_mask": torch.ones_like(ids)}
            given = {name: value for name, value in given.items() if name in known}
            positions[:, path] = ask(input_ids=real_ids(ids, self._backbone.config), **given)[0][:, 0]
        return positions[:, None].to(self._device)

    def sounds(self) -> AbstractContextManager[None]:
        """Encodes the sounds; a context that puts them among the embeddings that a backbone hands to its decoder."""
        order = [each for each in self._order if kind_of(each) == SOUND]
        if not order:
            return nullcontext()
        unique = list(dict.fromkeys(order))
        pieces = self._heard(unique).split([self._images[each].size for each in unique])
        found = dict(zip(unique, pieces, strict=True))
        places = (kinds(torch.from_numpy(self._packed.input_ids)) == SOUND).nonzero()[:, 0].to(self._device)
        return self._putting(places, torch.cat([found[each] for each in order]))

    def _heard(self, sounds: list[int]) -> Tensor:
        """The embeddings that a backbone hands to its decoder for sounds, one after another: `(M, H)`."""
        backbone, asked = self._backbone, list[Tensor]()
        decoder = backbone.get_decoder()
        size = sum(self._images[each].size for each in sounds)
        ids = torch.full((1, size), media_tokens(backbone.config).get(SOUND, 0), device=self._device)
        if decoder is not backbone:  # Phi 4's is both
            with _asking(decoder, asked):
                given = concat_media_inputs(sounds, self._images, self._device)
                backbone(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **given)
        if not asked:
            raise cannot_pack(f"{type(backbone).__name__} has no text decoder apart from what hears sounds")
        return asked[0][0]

    @contextmanager
    def _putting(self, places: Tensor, embeddings: Tensor) -> Iterator[None]:
        def put(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> tuple[object, object]:
            row = kwargs["inputs_embeds"]
            return args, {**kwargs, "inputs_embeds": row.index_copy(1, places, embeddings[None].to(row))}

        with self._backbone.get_decoder().register_forward_pre_hook(put, with_kwargs=True):
            yield


def _in_places(found: Tensor | Sequence[Tensor], sizes: Sequence[int], places: Sequence[int]) -> Tensor | list[Tensor]:
    """Features of images, each of some tokens, in other places. A model has them in one tensor, or one per image."""
    tokens = found if isinstance(found, Tensor) else torch.cat(list(found))
    pieces = tokens.reshape(-1, tokens.size(-1)).split(list(sizes))
    chosen = [pieces[place] for place in places]
    return torch.cat(chosen).reshape(-1, *found.shape[1:]) if isinstance(found, Tensor) else chosen


class _Nothing(MoeModelOutputWithPast):  # type: ignore[misc]
    """What a decoder that computed nothing returns; backbones look for outputs of several names in it."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _asking(decoder: PreTrainedModel, asked: list[Tensor]) -> AbstractContextManager[None]:
    """A context in which a decoder computes nothing; the embeddings that it is given are kept in `asked`."""

    def keep(*args: object, inputs_embeds: Tensor | None = None, **kwargs: object) -> _Nothing:
        if inputs_embeds is not None:
            asked.append(inputs_embeds)
        return _Nothing(last_hidden_state=inputs_embeds)

    return replaced(vars(decoder), "forward", keep)
