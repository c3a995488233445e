"""Images in packed trees, in padded rows and turn by turn, against the model's own forward over each turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.images import FAMILIES, build_processor, build_vision_model, picture
from torch import Tensor

from mt_grpo.forward import token_logps
from mt_grpo.forward.media import MediumInputs
from mt_grpo.rollout.media import MediaEncoder
from mt_grpo.token_tree import TokenTree


class Shown:
    """Two conversations of one prompt with two images, one of which forks and shows its first image again."""

    def __init__(self) -> None:
        self.processor = build_processor()
        self.encoder = MediaEncoder(self.processor)
        self.pictures = {
            name: picture(name, size) for name, size in (("red", (24, 16)), ("blue", (16, 32)), ("green", (40, 24)))
        }
        start, end = self.processor.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
        self.encoded = {
            name: self.encoder.encode({"type": "image", "image": image}) for name, image in self.pictures.items()
        }
        tokens = {name: [start, *image.tokens, end] for name, image in self.encoded.items()}
        prompt = [40, 41, *tokens["red"], 42, *tokens["blue"], 43]
        first, second = TokenTree(), TokenTree()
        first.add_turn(prompt, [50, 51, 52], [0.0] * 3)
        first.add_turn([*prompt, 50, 51, 52, *tokens["green"], 44], [53, 54], [0.0] * 2)
        first.add_turn([*prompt, 51, *tokens["red"], *tokens["red"], 45], [55, 56, 57], [0.0] * 3)
        second.add_turn(prompt, [60, 61], [0.0] * 2)
        second.add_turn([*prompt, 60, 61, 44, *tokens["blue"]], [62], [0.0])
        text = TokenTree()
        text.add_turn([40, 41, 42], [70, 71], [0.0] * 2)
        self.trees = [first, second, text]

    @property
    def images(self) -> dict[int, MediumInputs]:
        return {image.id: image.inputs for image in self.encoded.values()}

    def oracle(self, model: Any) -> list[list[Tensor]]:
        """The processor's own pixels, and the model's own positions, one forward per turn."""
        by_id = {self.encoded[name].id: image for name, image in self.pictures.items()}
        found = []
        for tree in self.trees:
            of_turns = []
            for turn, action in enumerate(tree.actions()):
                path, shown = tree.path_of_turn(turn), []
                for index, token in enumerate(path):
                    if token < 0 and path[index - 1] != token:
                        shown.append(by_id[token])
                pixels = self.processor.image_processor(images=shown, return_tensors="pt") if shown else {}
                ids = torch.tensor([[token if token >= 0 else self.processor.image_token_id for token in path]])
                types = {"mm_token_type_ids": (ids == self.processor.image_token_id).long()} if shown else {}
                logits = model(input_ids=ids, use_cache=False, **pixels, **types).logits[0]
                labels = torch.tensor(action)[:, None]
                of_turns.append(logits[-len(action) - 1 : -1].log_softmax(-1).gather(1, labels)[:, 0])
            found.append(of_turns)
        return found


def flat(found: list[list[Tensor]]) -> Tensor:
    return torch.cat([values for tree in found for values in tree])


@pytest.fixture(scope="module")
def shown() -> Shown:
    return Shown()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("forward", ["tree", "padded", "turn_by_turn"])
def test_images_score_as_in_a_forward_per_turn(shown: Shown, forward: str, family: str) -> None:
    model = build_vision_model(shown.processor.tokenizer, family=family)
    weights = torch.linspace(-1, 1, 13)
    expected = flat(shown.oracle(model))
    (expected * weights).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    found = flat(token_logps(model, shown.trees, forward=forward, images=shown.images))
    (found * weights).sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert gradients["model.visual.patch_embed.proj.weight"].abs().max() > 1e-3
    for name, parameter in model.named_parameters():
        scale = gradients[name].abs().max()
        assert (parameter.grad - gradients[name]).abs().max() <= 1e-5 * scale + 1e-7, name


def test_an_image_of_several_branches_is_looked_at_once(shown: Shown) -> None:
    model = build_vision_model(shown.processor.tokenizer)
    patches: list[int] = []
    model.model.visual.register_forward_pre_hook(lambda module, inputs: patches.append(len(inputs[0])))
    with torch.no_grad():
        token_logps(model, shown.trees, images=shown.images)
    assert patches == [sum(len(image.inputs.inputs["pixel_values"]) for image in shown.encoded.values())]


def test_other_images_of_one_size_share_no_prefix(shown: Shown) -> None:
    model = build_vision_model(shown.processor.tokenizer)
    trees, images = [], {}
    for color in ("red", "green"):
        image = shown.encoder.encode({"type": "image", "image": picture(color)})
        images[image.id] = image.inputs
        tree = TokenTree()
        tree.add_turn([40, *image.tokens, 41], [50, 51], [0.0, 0.0])
        trees.append(tree)
    with torch.no_grad():
        (first,), (second,) = token_logps(model, trees, images=images)
    assert (first - second).abs().max() > 1e-3
