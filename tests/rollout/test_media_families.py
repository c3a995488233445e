"""Models of every family that sees or hears: ids as the processor gives them, sampled and scored as by the model."""

import asyncio
from functools import cache
from typing import Any

import pytest
import torch
from support.audio import RATE, SOUND_FAMILIES, granite, tone
from support.forests import assert_same_gradient
from support.images import UntimedVideoProcessor, VideoTextProcessor, build_processor, build_vision_model, picture
from support.vision import RUNNABLE, VISION_FAMILIES, Family
from torch import Tensor

from mt_grpo.envs import Outcome
from mt_grpo.errors import UnsupportedModelError
from mt_grpo.forward import token_logps
from mt_grpo.forward.media import kinds, media_tokens, real_ids
from mt_grpo.forward.model import ForwardPlan, enable_trees
from mt_grpo.forward.packing import flatten
from mt_grpo.forward.probe import prove_media
from mt_grpo.media import IMAGE, MediumError, read_parts
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams
from mt_grpo.rollout.engines.transformers import TransformersEngine
from mt_grpo.rollout.escaped_text import MediaEncoder
from mt_grpo.rollout.rendering import ChatRenderer
from mt_grpo.trajectory import Trajectory

IMAGES = {"red": (24, 16), "blue": (16, 32), "green": (40, 24)}
TONES = {"low": (30.0, 1.0), "high": (90.0, 1.7), "long": (50.0, 2.5)}
PARTS: dict[str, dict[str, Any]] = {
    **{color: {"type": "image", "image": picture(color, size)} for color, size in IMAGES.items()},
    **dict(zip(TONES, read_parts([{"type": "audio", "audio": tone(*made)} for made in TONES.values()]), strict=True)),
    "film": {
        "type": "video",
        "video": [picture(each, (32, 16)) for each in ("red", "blue", "green", "white")],
        "fps": 2,
    },
    "clip": {"type": "video", "video": [picture(each, (16, 24)) for each in ("white", "red")], "fps": 1},
}


@cache
def family(name: str, medium: str = "image") -> Family:
    if medium == "video":
        processor = build_processor(kind=VideoTextProcessor if name == "qwen2_5_vl" else UntimedVideoProcessor)
        return processor, build_vision_model(processor.tokenizer, family=name).eval()
    return SOUND_FAMILIES[name]() if medium == "audio" else VISION_FAMILIES[name][0]()


def encoder_of(processor: Any, model: Any) -> MediaEncoder:
    return MediaEncoder(processor, media_tokens(model.config))


def asked(words: str, *names: str) -> dict[str, Any]:
    return {"role": "user", "content": [*(PARTS[name] for name in names), {"type": "text", "text": words}]}


def inputs_of(processor: Any, texts: list[str], names: list[str]) -> dict[str, Tensor]:
    """What the processor makes of a text that shows images and videos, or of texts that play a sound each."""
    options: dict[str, Any] = {"return_tensors": "pt", "add_special_tokens": False}
    images, sounds, videos = (
        [PARTS[name] for name in names if PARTS[name]["type"] == kind] for kind in ("image", "audio", "video")
    )
    if sounds:
        options |= {"audio": [part["audio"].samples.copy() for part in sounds]}
        options |= {"audio_kwargs": {"sampling_rate": RATE}, "text_kwargs": {"padding": True}}
        return dict(processor(text=texts, **options))
    if images:
        options["images"] = [[part["image"] for part in images]]
    if videos:
        options["videos"] = [part["video"] for part in videos]
        options["videos_kwargs"] = {"video_metadata": [{"fps": part["fps"]} for part in videos]}
    return dict(processor(text=["".join(texts)], **options))


def check_ids(processor: Any, model: Any, messages: list[dict[str, Any]], expected: list[int]) -> None:
    ids = torch.tensor(ChatRenderer(processor.tokenizer, media=encoder_of(processor, model)).prompt_ids(messages))
    assert real_ids(ids, model.config).tolist() == expected
    shown = (ids < 0).sum().item()
    assert shown == sum(expected.count(token) for token in set(real_ids(ids[ids < 0], model.config).tolist())) > 4


def written(processor: Any, messages: list[dict[str, Any]]) -> str:
    return processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_images_have_the_ids_of_the_processor(name):
    processor, model = family(name)
    answer = {"role": "assistant", "content": [{"type": "text", "text": "It is an image."}]}
    messages = [asked("What is it?", "red", "blue"), answer, asked("Now?", "green", "red")]
    made = inputs_of(processor, [written(processor, messages)], ["red", "blue", "green", "red"])
    check_ids(processor, model, messages, made["input_ids"][0].tolist())


@pytest.mark.parametrize("template", ["qwen2_5_vl", "qwen3_vl"])
def test_videos_have_the_ids_of_the_processor(template):
    processor = build_processor(template, VideoTextProcessor)
    messages = [{"role": "system", "content": "Look."}, asked("What is it?", "film", "red", "clip")]
    made = inputs_of(processor, [written(processor, messages)], ["film", "red", "clip"])
    check_ids(processor, build_vision_model(processor.tokenizer), messages, made["input_ids"][0].tolist())


@pytest.mark.parametrize("name", SOUND_FAMILIES)
def test_sounds_have_the_ids_of_the_processor(name):
    processor, model = family(name, "audio")
    answer = {"role": "assistant", "content": [{"type": "text", "text": "It is a tone."}]}
    messages = [asked("What is it?", "low"), answer, asked("Now?", "high")]
    before, between, after = (
        processor.tokenizer.encode(piece, add_special_tokens=False)
        for piece in written(processor, messages).split(processor.audio_token)
    )
    # some processors take one sound to a text
    low, high = (inputs_of(processor, [processor.audio_token], [name])["input_ids"][0] for name in ("low", "high"))
    check_ids(processor, model, messages, [*before, *low.tolist(), *between, *high.tolist(), *after])


class Screen:
    """Turns with an image, a video or a sound each. The third one has forgotten the first answer."""

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


def conversations(processor: Any, model: Any, prompts: list[Any], shown: list[str]) -> tuple[list[Trajectory], Tensor]:
    """Conversations, and what the model itself says of what was sampled in them, which is what they say."""
    engine = TransformersEngine(model, processor.tokenizer)
    runner = RolloutRunner(Screen, engine, media=encoder_of(processor, model))
    requests = [
        RolloutRequest([prompt], str(number), {"shown": shown}, number * (len(shown) > 1))
        for number, prompt in enumerate(prompts)
    ]
    trajectories = asyncio.run(runner.run(requests, SamplingParams(temperature=1.0)))
    assert [each.error for each in trajectories] == [None] * len(prompts)
    expected = torch.cat([own_logps(processor, model, each) for each in trajectories])
    sampled = [
        value
        for each in trajectories
        for turn in range(each.tree.num_turns)
        for node in each.tree.nodes
        if node.turn == turn
        for value in node.logprobs
    ]
    torch.testing.assert_close(torch.tensor(sampled), expected.detach(), rtol=1e-5, atol=1e-5)
    return trajectories, expected


def own_logps(processor: Any, model: Any, trajectory: Trajectory) -> Tensor:
    """Log-probs of all sampled tokens, by the model's own forward over what its processor makes of the media."""
    encoder, shown = encoder_of(processor, model), trajectory.media
    names = {encoder.encode(part).id: name for name, part in PARTS.items() if encoder.takes(part)}

    def mark(kind: str) -> str:
        return encoder._markers[IMAGE] if kind == "image" else getattr(processor, f"{kind}_token")

    found = []
    for turn, action in enumerate(trajectory.tree.actions()):
        path = torch.tensor([trajectory.tree.path_of_turn(turn)])
        order, rest = [], path[path < 0].tolist()
        while rest:
            order.append(names[rest[0]])
            rest = rest[shown[rest[0]].inputs.size :]
        made = inputs_of(processor, [mark(PARTS[name]["type"]) for name in order], order) if order else {}
        inputs = {"input_ids": real_ids(path, model.config)}
        if any(name in TONES for name in order):
            inputs["attention_mask"] = torch.ones_like(path)
        else:
            inputs |= {key: kinds(path) for key in made if key.endswith("token_type_ids")}
            if any(key.endswith("_grid_thw") for key in made):
                inputs["mm_token_type_ids"] = kinds(path)
        skipped = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
        inputs |= {key: value for key, value in made.items() if key not in skipped}
        logits = model(**inputs, use_cache=False).logits[0, -len(action) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(action)[:, None])[:, 0])
    return torch.cat(found)


def scored(model: Any, trajectories: list[Trajectory], forward: str = "tree") -> Tensor:
    images = {number: image.inputs for each in trajectories for number, image in each.media.items()}
    found = token_logps(model, [each.tree for each in trajectories], forward=forward, images=images)
    return torch.cat([each for turns in found for each in turns])


def gradients(model: Any, logps: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (logps * torch.linspace(-1, 1, len(logps))).sum().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


SCORED = [
    *(pytest.param("image", *each.values, ["red", "blue"], ["green", "blue", "red"], "vision", marks=each.marks)
      for each in RUNNABLE),
    *(("audio", name, ["low"], ["high", "long", "low"], "audio encoder") for name in SOUND_FAMILIES),
    *(("video", name, ["film", "green"], ["clip", "film", "green"], "visual")
      for name in ("qwen2_5_vl", "qwen3_vl", "qwen3_5")),
]  # fmt: skip


@pytest.mark.parametrize(("medium", "name", "first", "shown", "towers"), SCORED)
def test_a_family_samples_and_scores_as_the_model(medium, name, first, shown, towers):
    processor, model = family(name, medium)
    packed = VISION_FAMILIES[name][1] if medium == "image" else "tree"
    trajectories, expected = conversations(
        processor, model, [asked("What is it?", *first), asked("What is it?")], shown
    )
    assert [each.tree.num_sequences for each in trajectories] == [2, 2]
    theirs = gradients(model, expected)
    assert max(value.abs().max() for part, value in theirs.items() if any(t in part for t in towers.split())) > 1e-3
    if packed != "tree":
        with pytest.raises(UnsupportedModelError, match=packed):
            scored(model, trajectories)
    for forward in ("tree", "padded") if packed == "tree" else ("padded",):
        logps = scored(model, trajectories, forward)
        torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)
        assert_same_gradient(gradients(model, logps), theirs)


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
    trajectories, expected = conversations(processor, model, [asked("What?", "low"), asked("What?", "long")], ["low"])
    torch.testing.assert_close(scored(model, trajectories, "turn_by_turn"), expected, rtol=1e-5, atol=1e-5)
    enable_trees(model)
    images = {number: image.inputs for each in trajectories for number, image in each.media.items()}
    trees = [flatten(each.tree) for each in trajectories]
    problems = {"tree": "packed trees with sounds", "padded": "padded rows .* set `forward: turn_by_turn`"}
    for forward, problem in problems.items():
        with pytest.raises(UnsupportedModelError, match=problem):
            prove_media(model, ForwardPlan(trees, media=images, forward=forward))
        prove_media(model, ForwardPlan(trees[:1], media=images, forward=forward))


def test_a_video_of_another_speed_is_another():
    encoder = encoder_of(*family("qwen2_5_vl", "video"))
    slow, again, fast = (encoder.encode({**PARTS["film"], "fps": fps}) for fps in (2, 2, 8))
    assert slow is again and slow.id != fast.id
    assert slow.inputs.inputs["second_per_grid_ts"] == 4 * fast.inputs.inputs["second_per_grid_ts"]
