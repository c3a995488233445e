"""Vision models of every family: ids as the processor gives them, sampled and scored as the model alone would."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import pytest
import torch
from support.images import picture
from support.vision import RUNNABLE, VISION_FAMILIES, Family
from torch import Tensor

from mt_grpo.envs import Outcome
from mt_grpo.errors import UnsupportedModelError
from mt_grpo.forward import token_logps
from mt_grpo.forward.media import media_tokens
from mt_grpo.media import IMAGE, MediumError, media_parts
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams
from mt_grpo.rollout.engines.transformers import TransformersEngine
from mt_grpo.rollout.media import MediaEncoder
from mt_grpo.rollout.rendering import ChatRenderer
from mt_grpo.trajectory import Trajectory

SIZES = {"red": (24, 16), "blue": (16, 32), "green": (40, 24)}


@cache
def family(name: str) -> Family:
    return VISION_FAMILIES[name][0]()


def encoder_of(processor: Any, model: Any) -> MediaEncoder:
    return MediaEncoder(processor, media_tokens(model.config))


def asked(words: str, *colors: str) -> dict[str, Any]:
    parts = [{"type": "image", "image": picture(color, SIZES[color])} for color in colors]
    return {"role": "user", "content": [*parts, {"type": "text", "text": words}]}


def inputs_of(processor: Any, text: str, messages: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What the processor makes of a conversation."""
    images = [part["image"] for part in media_parts(messages)]
    found = processor(text=[text], images=[images] if images else None, return_tensors="pt", add_special_tokens=False)
    return dict(found)


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_a_conversation_has_the_ids_of_its_processor(name):
    processor, model = family(name)
    answer = {"role": "assistant", "content": [{"type": "text", "text": "It is an image."}]}
    messages = [asked("What is it?", "red", "blue"), answer, asked("Now?", "green", "red")]
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = ChatRenderer(processor.tokenizer, images=encoder_of(processor, model)).prompt_ids(messages)
    token = media_tokens(model.config)[IMAGE]
    expected = inputs_of(processor, text, messages)["input_ids"][0].tolist()
    assert [token if each < 0 else each for each in ids] == expected
    assert sum(each < 0 for each in ids) == expected.count(token) > 4


class Screen:
    """Three turns with an image each. The last one has forgotten the first answer."""

    async def run(self, policy: Any, row: dict[str, Any]) -> Outcome:
        messages = list(row["prompt"])
        for number, color in enumerate(("green", "blue", "red")):
            turn = await policy.reply(messages, max_tokens=4)
            messages += [turn.message, asked("Now", color)]
            if number == 1:
                del messages[1:3]
        return Outcome()

    async def close(self) -> None:
        pass


def own_logps(processor: Any, model: Any, trajectory: Trajectory) -> Tensor:
    """Log-probs of all sampled tokens, by the model's own forward over what its processor makes of the images."""
    encoder, shown = encoder_of(processor, model), trajectory.images
    colors = {encoder.encode(asked("", color)["content"][0]).id: color for color in SIZES}
    found = []
    for turn, action in enumerate(trajectory.tree.actions()):
        path = trajectory.tree.path_of_turn(turn)
        order, rest = [], [token for token in path if token < 0]
        while rest:
            order.append(rest[0])
            rest = rest[shown[rest[0]].inputs.size :]
        made = inputs_of(processor, encoder.marker * len(order), [asked("", *(colors[each] for each in order))])
        ids = torch.tensor([[media_tokens(model.config)[IMAGE] if token < 0 else token for token in path]])
        types = {key: (torch.tensor([path]) < 0).long() for key in made if key.endswith("token_type_ids")}
        pixels = {key: value for key, value in made.items() if key not in ("input_ids", "attention_mask", *types)}
        logits = model(input_ids=ids, use_cache=False, **pixels, **types).logits[0, -len(action) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(action)[:, None])[:, 0])
    return torch.cat(found)


def gradients(model: Any, logps: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (logps * torch.linspace(-1, 1, len(logps))).sum().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("name", RUNNABLE)
def test_it_samples_and_scores_as_the_model_alone_does(name):
    (processor, model), packed = family(name), VISION_FAMILIES[name][1]
    engine = TransformersEngine(model, processor.tokenizer)
    runner = RolloutRunner(Screen, engine, images=encoder_of(processor, model))
    prompts = [[asked("What is it?", "red", "blue")], [asked("What is it?")]]
    requests = [RolloutRequest(prompt, str(number), {}, number) for number, prompt in enumerate(prompts)]
    trajectories = asyncio.run(runner.run(requests, SamplingParams(temperature=1.0)))
    assert [each.error for each in trajectories] == [None, None]
    images = {number: image.inputs for each in trajectories for number, image in each.images.items()}
    trees = [each.tree for each in trajectories]

    expected = torch.cat([own_logps(processor, model, each) for each in trajectories])
    sampled = [
        value
        for tree in trees
        for turn in range(tree.num_turns)
        for node in tree.nodes
        if node.turn == turn
        for value in node.logprobs
    ]
    torch.testing.assert_close(torch.tensor(sampled), expected.detach(), rtol=1e-5, atol=1e-5)

    theirs = gradients(model, expected)
    assert max(value.abs().max() for part, value in theirs.items() if "vision" in part) > 1e-3
    if packed != "tree":
        with pytest.raises(UnsupportedModelError, match=packed):
            token_logps(model, trees, images=images)
    for forward in ("tree", "padded") if packed == "tree" else ("padded",):
        logps = torch.cat(
            [each for turns in token_logps(model, trees, forward=forward, images=images) for each in turns]
        )
        torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)
        for part, value in gradients(model, logps).items():
            assert (value - theirs[part]).abs().max() <= 1e-5 * theirs[part].abs().max() + 1e-7, (forward, part)


def test_a_processor_that_mixes_the_images_of_a_batch_is_refused():
    processor, model = family("pixtral")

    class Mixed(type(processor)):
        def _process_images(self, images: Any, **options: Any) -> Any:
            found, *others = super()._process_images(images, **options)
            found["pixel_values"] = found["pixel_values"] - found["pixel_values"].mean()
            return found, *others

    mixed = Mixed(processor.image_processor, processor.tokenizer, chat_template=processor.chat_template)
    with pytest.raises(MediumError, match="Mixed makes another `pixel_values` of several images than of each alone"):
        encoder_of(mixed, model)
