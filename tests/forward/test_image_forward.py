"""Images in packed trees, in padded rows and turn by turn, against the model's own forward over each turn."""

import pytest
import torch
from support.forests import assert_same_gradient, make_tree
from support.images import FAMILIES, build_processor, build_vision_model, picture

from mt_grpo.forward import token_logps
from mt_grpo.rollout.escaped_text import MediaEncoder

PICTURES = {name: picture(name, size) for name, size in (("red", (24, 16)), ("blue", (16, 32)), ("green", (40, 24)))}


class Shown:
    """Two conversations of a prompt with two images, one of which forks and shows its first image again; and text."""

    def __init__(self) -> None:
        self.processor = build_processor()
        encoder = MediaEncoder(self.processor)
        self.encode = lambda image: encoder.encode({"type": "image", "image": image})
        encoded = {name: self.encode(image) for name, image in PICTURES.items()}
        self.pictures = {encoded[name].id: image for name, image in PICTURES.items()}
        self.images = {image.id: image.inputs for image in encoded.values()}
        start, end = self.processor.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
        red, blue, green = ([start, *image.tokens, end] for image in encoded.values())
        prompt = [40, 41, *red, 42, *blue, 43]
        first = [
            (prompt, [50, 51, 52]),
            ([*prompt, 50, 51, 52, *green, 44], [53, 54]),
            ([*prompt, 51, *red, *red, 45], [55, 56, 57]),
        ]
        second = [(prompt, [60, 61]), ([*prompt, 60, 61, 44, *blue], [62])]
        self.trees = list(map(make_tree, (first, second, [([40, 41, 42], [70, 71])])))

    def oracle(self, model):
        """The processor's own pixels, and the model's own positions, one forward per turn."""
        found, image_token = [], self.processor.image_token_id
        for path, action in ((tree.path_of_turn(turn), action) for tree in self.trees
                             for turn, action in enumerate(tree.actions())):  # fmt: skip
            begins = [token for before, token in zip([0, *path], path, strict=False) if token < 0 and token != before]
            ids, given = torch.tensor([[token if token >= 0 else image_token for token in path]]), {}
            if begins:
                shown = [self.pictures[token] for token in begins]
                given = dict(self.processor.image_processor(images=shown, return_tensors="pt"))
                given["mm_token_type_ids"] = (ids == image_token).long()
            logits = model(input_ids=ids, use_cache=False, **given).logits[0, -len(action) - 1 : -1]
            found.append(logits.log_softmax(-1).gather(1, torch.tensor(action)[:, None])[:, 0])
        return torch.cat(found)


@pytest.fixture(scope="module")
def shown() -> Shown:
    return Shown()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("forward", ["tree", "padded", "turn_by_turn"])
def test_images_score_as_in_a_forward_per_turn(shown, forward, family):
    model = build_vision_model(shown.processor.tokenizer, family=family)
    weights, expected = torch.linspace(-1, 1, 13), shown.oracle(model)
    (expected * weights).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    logps = token_logps(model, shown.trees, forward=forward, images=shown.images)
    found = torch.cat([values for tree in logps for values in tree])
    (found * weights).sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert gradients["model.visual.patch_embed.proj.weight"].abs().max() > 1e-3
    assert_same_gradient({name: parameter.grad for name, parameter in model.named_parameters()}, gradients)


@torch.no_grad()
def test_an_image_of_several_branches_is_looked_at_once(shown):
    model, patches = build_vision_model(shown.processor.tokenizer), []
    model.model.visual.register_forward_pre_hook(lambda module, inputs: patches.append(len(inputs[0])))
    token_logps(model, shown.trees, images=shown.images)
    assert patches == [sum(len(image.inputs["pixel_values"]) for image in shown.images.values())]


@torch.no_grad()
def test_other_images_of_one_size_share_no_prefix(shown):
    encoded = [shown.encode(picture(color)) for color in ("red", "green")]
    trees = [make_tree([([40, *image.tokens, 41], [50, 51])]) for image in encoded]
    images = {image.id: image.inputs for image in encoded}
    (first,), (second,) = token_logps(build_vision_model(shown.processor.tokenizer), trees, images=images)
    assert (first - second).abs().max() > 1e-3
