"""Conversations that show videos: ids as the processor gives them, sampled and scored as the model alone would."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from support.images import UntimedVideoProcessor, VideoTextProcessor, build_processor, build_vision_model, picture
from torch import Tensor

from mt_grpo.envs import Outcome
from mt_grpo.forward import token_logps
from mt_grpo.forward.media import kinds, media_tokens, real_ids
from mt_grpo.media import MediumError, read_parts
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams
from mt_grpo.rollout.engines.transformers import TransformersEngine
from mt_grpo.rollout.media import MediaEncoder
from mt_grpo.rollout.rendering import ChatRenderer

IMAGE = {"type": "image", "image": picture("green", (24, 16))}
VIDEO = {"type": "video", "video": [picture(color, (32, 16)) for color in ("red", "blue", "green", "white")], "fps": 2}
OTHER = {"type": "video", "video": [picture(color, (16, 24)) for color in ("white", "red")], "fps": 1}


def encoder_of(processor: Any, model: Any) -> MediaEncoder:
    return MediaEncoder(processor, media_tokens(model.config))


def asked(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}


def inputs_of(processor: Any, text: str, parts: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What the processor makes of a text that shows parts."""
    images = [part["image"] for part in parts if part["type"] == "image"]
    videos = [part for part in parts if part["type"] == "video"]
    of_videos = {
        "videos": [part["video"] for part in videos],
        "videos_kwargs": {"video_metadata": [{"fps": part["fps"]} for part in videos]},
    }
    found = processor(text=[text], images=images or None, return_tensors="pt", **(of_videos if videos else {}))
    return dict(found)


@pytest.mark.parametrize("template", ["qwen2_5_vl", "qwen3_vl"])
def test_a_prompt_with_videos_has_the_ids_of_its_processor(template):
    processor = build_processor(template, VideoTextProcessor)
    model = build_vision_model(processor.tokenizer)
    messages = [asked(VIDEO, {"type": "text", "text": "then"}, IMAGE, OTHER)]
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor(ChatRenderer(processor.tokenizer, media=encoder_of(processor, model)).prompt_ids(messages))
    expected = inputs_of(processor, text, [VIDEO, IMAGE, OTHER])
    assert real_ids(ids, model.config).tolist() == expected["input_ids"][0].tolist()
    assert [(kinds(ids) == kind).sum() for kind in (1, 2)] == [6, 2 * 8 + 6]


class Screen:
    """Shows a video after each turn, and at last forgets the first one."""

    async def run(self, policy: Any, row: dict[str, Any]) -> Outcome:
        messages = list(row["prompt"])
        for number, part in enumerate((OTHER, VIDEO, IMAGE)):
            turn = await policy.reply(messages, max_tokens=4)
            messages += [turn.message, asked(part)]
            if number == 1:
                del messages[1:3]
        return Outcome()

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_videos_are_sampled_and_scored_as_the_model_alone_does(family):
    processor = build_processor(kind=VideoTextProcessor if family == "qwen2_5_vl" else UntimedVideoProcessor)
    model = build_vision_model(processor.tokenizer, family=family).eval()
    encoder = encoder_of(processor, model)
    runner = RolloutRunner(Screen, TransformersEngine(model, processor.tokenizer), media=encoder)
    prompts = [[asked(VIDEO, IMAGE)], [asked(IMAGE)]]
    requests = [RolloutRequest(prompt, str(number), {}, number) for number, prompt in enumerate(prompts)]
    trajectories = asyncio.run(runner.run(requests, SamplingParams(temperature=1.0)))
    assert [each.error for each in trajectories] == [None, None]
    images = {number: image.inputs for each in trajectories for number, image in each.media.items()}
    trees = [each.tree for each in trajectories]
    assert [tree.num_sequences for tree in trees] == [2, 2]
    parts = {encoder.encode(part).id: part for part in (IMAGE, VIDEO, OTHER)}

    own, sampled = [], []
    for tree in trees:
        for turn, action in enumerate(tree.actions()):
            path = torch.tensor([tree.path_of_turn(turn)])
            order, rest = [], path[path < 0].tolist()
            while rest:
                order.append(rest[0])
                rest = rest[images[rest[0]].size :]
            text = "".join(processor.video_token if each & 1 else processor.image_token for each in order)
            made = inputs_of(processor, text, [parts[each] for each in order])
            made |= {"input_ids": real_ids(path, model.config), "mm_token_type_ids": kinds(path)}
            made.pop("attention_mask")
            logits = model(**made, use_cache=False).logits[0, -len(action) - 1 : -1]
            own.append(logits.log_softmax(-1).gather(1, torch.tensor(action)[:, None])[:, 0])
            sampled += [value for node in tree.nodes if node.turn == turn for value in node.logprobs]
    expected = torch.cat(own)
    torch.testing.assert_close(torch.tensor(sampled), expected.detach(), rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, len(expected))
    (expected * weights).sum().backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
    for forward in ("tree", "padded"):
        model.zero_grad()
        logps = torch.cat(
            [each for turns in token_logps(model, trees, forward=forward, images=images) for each in turns]
        )
        torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)
        (logps * weights).sum().backward()
        for name, each in model.named_parameters():
            # a gated norm makes much of rounding
            assert (each.grad - gradients[name]).abs().max() <= 5e-5 * gradients[name].abs().max() + 1e-7, name


def test_a_video_of_another_speed_is_another():
    processor = build_processor(kind=VideoTextProcessor)
    encoder = encoder_of(processor, build_vision_model(processor.tokenizer))
    slow, again, fast = (encoder.encode({**VIDEO, "fps": fps}) for fps in (2, 2, 8))
    assert slow is again and slow.id != fast.id
    assert slow.inputs.inputs["second_per_grid_ts"] == 4 * fast.inputs.inputs["second_per_grid_ts"]


def test_neither_image_nor_video_is_sampled():
    processor = build_processor(kind=VideoTextProcessor)
    model = build_vision_model(processor.tokenizer)
    with torch.no_grad():  # the model would write nothing else
        model.lm_head.weight.zero_()
        model.lm_head.weight[[processor.image_token_id, processor.video_token_id]] = 1.0
    runner = RolloutRunner(Screen, TransformersEngine(model, processor.tokenizer), media=encoder_of(processor, model))
    [trajectory] = asyncio.run(
        runner.run([RolloutRequest([asked(VIDEO)], "0", {}, 0)], SamplingParams(temperature=1.0))
    )
    said = {token for action in trajectory.tree.actions() for token in action}
    assert said and not said & {processor.image_token_id, processor.video_token_id}


def test_a_model_without_videos_says_so():
    processor = build_processor()
    encoder = encoder_of(processor, build_vision_model(processor.tokenizer))
    with pytest.raises(MediumError, match="The model is not shown videos, .*: show frames as images"):
        ChatRenderer(processor.tokenizer, media=encoder).prompt_ids([asked(VIDEO)])


def test_a_video_that_is_no_list_of_frames_is_one_sentence():
    with pytest.raises(MediumError, match="Give a video as a list of images; got .*decode it first"):
        read_parts([{"type": "video", "video": "film.mp4"}])
    with pytest.raises(MediumError, match=r"The image 'film.png' cannot be read: No such file"):
        read_parts([{"type": "video", "video": ["film.png"]}], of_row=True)
