"""Models of every family that sees or hears: ids as the processor gives them, sampled and scored as by the model."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import pytest
import torch
from support.audio import RATE, SOUND_FAMILIES, granite, tone
from support.images import picture
from support.vision import RUNNABLE, VISION_FAMILIES, Family
from torch import Tensor

from mt_grpo.envs import Outcome
from mt_grpo.errors import UnsupportedModelError
from mt_grpo.forward import token_logps
from mt_grpo.forward.media import media_tokens, real_ids
from mt_grpo.forward.model import ForwardPlan, enable_trees
from mt_grpo.forward.packing import flatten
from mt_grpo.forward.probe import prove_media
from mt_grpo.media import MediumError, read_parts
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams
from mt_grpo.rollout.engines.transformers import TransformersEngine
from mt_grpo.rollout.media import MediaEncoder
from mt_grpo.rollout.rendering import ChatRenderer
from mt_grpo.trajectory import Trajectory

IMAGES = {
    color: {"type": "image", "image": picture(color, size)}
    for color, size in {"red": (24, 16), "blue": (16, 32), "green": (40, 24)}.items()
}
TONES = {"low": (30.0, 1.0), "high": (90.0, 1.7), "long": (50.0, 2.5)}
SOUNDS = dict(
    zip(TONES, read_parts([{"type": "audio", "audio": tone(*made)} for made in TONES.values()]), strict=True)
)
PARTS = IMAGES | SOUNDS


@cache
def family(name: str, hears: bool = False) -> Family:
    return SOUND_FAMILIES[name]() if hears else VISION_FAMILIES[name][0]()


def encoder_of(processor: Any, model: Any) -> MediaEncoder:
    return MediaEncoder(processor, media_tokens(model.config))


def asked(words: str, *names: str) -> dict[str, Any]:
    return {"role": "user", "content": [*(PARTS[name] for name in names), {"type": "text", "text": words}]}


def inputs_of(processor: Any, texts: list[str], names: list[str]) -> dict[str, Tensor]:
    """What the processor makes of a text that shows images, or of texts that play a sound each."""
    options: dict[str, Any] = {"return_tensors": "pt", "add_special_tokens": False}
    images = [IMAGES[name]["image"] for name in names if name in IMAGES]
    sounds = [SOUNDS[name]["audio"].samples.copy() for name in names if name in SOUNDS]
    if sounds:
        options |= {
            "audio": sounds,
            "audio_kwargs": {"sampling_rate": RATE},
            "text_kwargs": {"padding": True},
        }
    elif images:
        texts, options["images"] = ["".join(texts)], [images]
    return dict(processor(text=texts, **options))


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_images_have_the_ids_of_the_processor(name):
    processor, model = family(name)
    answer = {"role": "assistant", "content": [{"type": "text", "text": "It is an image."}]}
    messages = [asked("What is it?", "red", "blue"), answer, asked("Now?", "green", "red")]
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = inputs_of(processor, [text], ["red", "blue", "green", "red"])["input_ids"][0].tolist()
    check_ids(processor, model, messages, expected)


@pytest.mark.parametrize("name", SOUND_FAMILIES)
def test_sounds_have_the_ids_of_the_processor(name):
    processor, model = family(name, hears=True)
    answer = {"role": "assistant", "content": [{"type": "text", "text": "It is a tone."}]}
    messages = [asked("What is it?", "low"), answer, asked("Now?", "high")]
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, between, after = (
        processor.tokenizer.encode(piece, add_special_tokens=False) for piece in text.split(processor.audio_token)
    )
    # some processors take one sound to a text
    low, high = (inputs_of(processor, [processor.audio_token], [name])["input_ids"][0] for name in ("low", "high"))
    check_ids(processor, model, messages, [*before, *low.tolist(), *between, *high.tolist(), *after])


def check_ids(processor: Any, model: Any, messages: list[dict[str, Any]], expected: list[int]) -> None:
    ids = torch.tensor(ChatRenderer(processor.tokenizer, media=encoder_of(processor, model)).prompt_ids(messages))
    assert real_ids(ids, model.config).tolist() == expected
    shown = (ids < 0).sum().item()
    assert shown == sum(expected.count(token) for token in set(real_ids(ids[ids < 0], model.config).tolist())) > 4


class Screen:
    """Three turns with an image or a sound each. The last one has forgotten the first answer."""

    async def run(self, policy: Any, row: dict[str, Any]) -> Outcome:
        messages = list(row["prompt"])
        for number, name in enumerate(row["shown"]):
            turn = await policy.reply(messages, max_tokens=4)
            messages += [turn.message, asked("Now", name)]
            if number == 1:
                del messages[1:3]
        return Outcome()

    async def close(self) -> None:
        pass


def conversations(processor: Any, model: Any, prompts: list[Any], shown: list[str]) -> list[Trajectory]:
    engine = TransformersEngine(model, processor.tokenizer)
    runner = RolloutRunner(Screen, engine, media=encoder_of(processor, model))
    requests = [
        RolloutRequest(prompt, str(number), {"shown": shown}, number * bool(len(shown) > 1))
        for number, prompt in enumerate(prompts)
    ]
    trajectories = asyncio.run(runner.run(requests, SamplingParams(temperature=1.0)))
    assert [each.error for each in trajectories] == [None] * len(prompts)
    return trajectories


def own_logps(processor: Any, model: Any, trajectory: Trajectory) -> Tensor:
    """Log-probs of all sampled tokens, by the model's own forward over what its processor makes of the media."""
    encoder, shown = encoder_of(processor, model), trajectory.media
    names = {encoder.encode(part).id: name for name, part in PARTS.items() if encoder.takes(part)}
    found = []
    for turn, action in enumerate(trajectory.tree.actions()):
        path = torch.tensor([trajectory.tree.path_of_turn(turn)])
        order, rest = [], path[path < 0].tolist()
        while rest:
            order.append(names[rest[0]])
            rest = rest[shown[rest[0]].inputs.size :]
        sees = not order or order[0] in IMAGES
        marks = [encoder.marker if sees and order else getattr(processor, "audio_token", "")] * len(order)
        made = inputs_of(processor, marks, order) if order else {}
        types = {key: (path < 0).long() for key in made if key.endswith("token_type_ids") and sees}
        features = {key: value for key, value in made.items() if key not in ("input_ids", "attention_mask")}
        features = {key: value for key, value in features.items() if not key.endswith("token_type_ids")}
        ids = real_ids(path, model.config)
        mask = {} if sees else {"attention_mask": torch.ones_like(ids)}
        logits = model(input_ids=ids, use_cache=False, **mask, **features, **types).logits[0, -len(action) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(action)[:, None])[:, 0])
    return torch.cat(found)


def check_sampled(trajectories: list[Trajectory], expected: Tensor) -> None:
    sampled = [
        value
        for each in trajectories
        for turn in range(each.tree.num_turns)
        for node in each.tree.nodes
        if node.turn == turn
        for value in node.logprobs
    ]
    torch.testing.assert_close(torch.tensor(sampled), expected.detach(), rtol=1e-5, atol=1e-5)


def gradients(model: Any, logps: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (logps * torch.linspace(-1, 1, len(logps))).sum().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("name", RUNNABLE)
def test_one_that_sees_samples_and_scores_as_the_model(name):
    check_scores(*family(name), VISION_FAMILIES[name][1], ["red", "blue"], ["green", "blue", "red"], ("vision",), 1e-5)


@pytest.mark.parametrize("name", SOUND_FAMILIES)
def test_one_that_hears_samples_and_scores_as_the_model(name):
    # a norm of few numbers makes much of rounding
    check_scores(*family(name, hears=True), "tree", ["low"], ["high", "long", "low"], ("audio", "encoder"), 5e-5)


def check_scores(
    processor: Any,
    model: Any,
    packed: str,
    first: list[str],
    shown: list[str],
    towers: tuple[str, ...],
    rounding: float,
) -> None:
    prompts = [[asked("What is it?", *first)], [asked("What is it?")]]
    trajectories = conversations(processor, model, prompts, shown)
    images = {number: image.inputs for each in trajectories for number, image in each.media.items()}
    trees = [each.tree for each in trajectories]
    assert [tree.num_sequences for tree in trees] == [2, 2]
    expected = torch.cat([own_logps(processor, model, each) for each in trajectories])
    check_sampled(trajectories, expected)

    theirs = gradients(model, expected)
    assert max(value.abs().max() for part, value in theirs.items() if any(each in part for each in towers)) > 1e-3
    if packed != "tree":
        with pytest.raises(UnsupportedModelError, match=packed):
            token_logps(model, trees, images=images)
    for forward in ("tree", "padded") if packed == "tree" else ("padded",):
        found = token_logps(model, trees, forward=forward, images=images)
        logps = torch.cat([each for turns in found for each in turns])
        torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)
        for part, value in gradients(model, logps).items():
            allowed = rounding * theirs[part].abs().max() + 1e-7
            assert (value - theirs[part]).abs().max() <= allowed, (forward, part)


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


def test_a_model_that_hears_padding_is_refused_in_batches():
    """Sampled and scored turn by turn it is exact: nothing longer is beside a sound there."""
    processor, model = granite()
    prompts = [[asked("What?", name)] for name in ("low", "long")]
    trajectories = conversations(processor, model, prompts, ["low"])
    images = {number: image.inputs for each in trajectories for number, image in each.media.items()}
    trees = [each.tree for each in trajectories]
    expected = torch.cat([own_logps(processor, model, each) for each in trajectories])
    check_sampled(trajectories, expected)
    found = [each for turns in token_logps(model, trees, forward="turn_by_turn", images=images) for each in turns]
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-5)
    enable_trees(model)
    problems = {"tree": "packed trees with sounds", "padded": "padded rows .* set `forward: turn_by_turn`"}
    for forward, problem in problems.items():
        with pytest.raises(UnsupportedModelError, match=problem):
            prove_media(model, ForwardPlan([*map(flatten, trees)], media=images, forward=forward))
        prove_media(model, ForwardPlan([flatten(trees[0])], media=images, forward=forward))
