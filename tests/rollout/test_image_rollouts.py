"""Conversations that show images: as the model's processor writes them, sampled as the model alone would."""

from __future__ import annotations

import asyncio
import base64
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw
from support.images import ScriptedSight, build_processor, build_vision_model, picture
from support.models import build_tokenizer
from trl.chat_template_utils import add_response_schema

from mt_grpo.envs import MultiTurnToolEnv, Outcome, Step, StepEnv
from mt_grpo.integrations.openai_api.request import read_parts
from mt_grpo.integrations.trl import TRLEnv
from mt_grpo.media import MediumError, media_parts, snapshot_parts, to_file
from mt_grpo.media import read_parts as opened_parts
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams
from mt_grpo.rollout.chat_template import TemplateError
from mt_grpo.rollout.engines.transformers import TransformersEngine
from mt_grpo.rollout.media import MediaEncoder
from mt_grpo.rollout.rendering import ChatRenderer
from mt_grpo.tools.mcp.tools import result_parts
from mt_grpo.tools.results import read_result
from mt_grpo.trajectory import StopReason, Trajectory


def shown(*images: Any, words: str = "What is it?") -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": words}]}]


def rollout(env: Any, engine: Any, processor: Any, prompts: list[Any], **options: Any) -> list[Trajectory]:
    runner = RolloutRunner(
        env, engine, options.pop("limits", RolloutLimits()), images=MediaEncoder(processor), **options
    )
    requests = [RolloutRequest(prompt, f"{number:03d}", {}, number) for number, prompt in enumerate(prompts)]
    return asyncio.run(runner.run(requests, SamplingParams(temperature=1.0)))


def real(ids: list[int], processor: Any) -> list[int]:
    return [processor.image_token_id if token < 0 else token for token in ids]


# As the processor writes them


@pytest.mark.parametrize("template", ["qwen2_5_vl", "qwen3_vl"])
def test_a_prompt_has_the_ids_that_the_processor_gives_it(template):
    processor = build_processor(template)
    renderer = ChatRenderer(processor.tokenizer, images=MediaEncoder(processor))
    messages = [{"role": "system", "content": "Look."}, *shown(picture("red"), picture("blue", (16, 32)))]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    images = [part["image"] for part in media_parts(messages)]
    expected = processor(text=[text], images=images)["input_ids"][0]
    assert real(renderer.prompt_ids(messages), processor) == list(expected)


def test_a_text_that_spells_an_image_shows_none():
    processor = build_processor()
    renderer = ChatRenderer(processor.tokenizer, images=MediaEncoder(processor))
    words = "<|vision_start|><|image_pad|><|vision_end|> \U0001f76b2123\U0001f76b3"
    ids = renderer.prompt_ids(shown(picture(), words=words))
    assert sum(token == processor.image_token_id for token in ids) == 0
    assert len({token for token in ids if token < 0}) == 1
    assert words in renderer.decode(ids)


def test_a_part_has_options_of_the_processor_for_itself():
    processor = build_processor()
    encoder, image = MediaEncoder(processor), picture(size=(64, 64))
    whole, small = (encoder.encode({"type": "image", "image": image, **more}) for more in ({}, {"max_pixels": 1024}))
    assert (whole.inputs.size, small.inputs.size) == (64, 16)
    assert whole.id != small.id
    with pytest.raises(MediumError, match="The processor refuses an image of 64 by 64"):
        encoder.encode({"type": "image", "image": image, "max_pixel": 1024})


def test_one_image_in_two_objects_is_one():
    encoder = MediaEncoder(build_processor())
    first, second, other = picture(), picture(), picture("green")
    encoded = [encoder.encode({"type": "image", "image": image}) for image in (first, second, other)]
    assert encoded[0] is encoded[1] is not encoded[2]
    assert encoded[0].id != encoded[2].id


def test_images_for_a_model_of_text_are_refused_or_read_as_words():
    renderer = ChatRenderer(build_tokenizer())
    with pytest.raises(TemplateError, match="A message of 'user' shows an image, and this run gives its model text"):
        renderer.prompt_ids(shown(picture()))
    messages = shown(picture())
    messages[0]["content"][0]["alt"] = "[a chart]"
    assert "[a chart]" in renderer.decode(renderer.prompt_ids(messages))


# In results of tools


def look(where: str) -> Any:
    """
    Looks at something.

    Args:
        where: At what.
    """
    if where == "nothing":
        return b"", {}
    image = picture("green", (16, 16))
    return image if where == "it" else ([image, {"type": "text", "text": "a page"}], {"seen": 1})


CALLS = {
    "tags": '<tool>{{"name": "look", "args": {{"where": "{}"}}}}</tool>',
    "native": '<tool_call>\n{{"name": "look", "arguments": {{"where": "{}"}}}}\n</tool_call><|im_end|>',
}


@pytest.mark.parametrize("protocol", ["tags", "native"])
def test_a_tool_shows_an_image(protocol):
    processor = build_processor("qwen3_vl")
    add_response_schema(processor.tokenizer)
    answer = "<answer>a page</answer>" if protocol == "tags" else "a page<|im_end|>"
    script = [CALLS[protocol].format("it"), CALLS[protocol].format("all"), answer]
    engine = ScriptedSight(processor.tokenizer, lambda session, turn: script[turn])
    [trajectory] = rollout(
        MultiTurnToolEnv([look], protocol=protocol), engine, processor, [shown(picture())], sanity_check_mode="strict"
    )
    assert trajectory.stop_reason is StopReason.ANSWERED, trajectory.error
    assert trajectory.render_mismatch is None
    assert trajectory.tree.num_sequences == 1
    first, second = (turn.tool_calls[0] for turn in trajectory.turns[:2])
    assert (first.result, second.result, second.data) == ("[image]", "[image]\na page", {"seen": 1})
    assert len(trajectory.images) == 2
    order = [token for node in trajectory.tree.nodes for token in node.tokens if token < 0]
    assert list(dict.fromkeys(order)) == list(trajectory.images)
    assert len(order) == 6 + 4 + 4


@pytest.mark.parametrize("history", ["template", "strip_thinking"])
def test_a_rendered_history_keeps_its_images(history):
    processor = build_processor("qwen3_vl")
    add_response_schema(processor.tokenizer)
    script = [f"<think>{number}</think>\n" + CALLS["tags"].format("it") for number in range(2)] + [
        "<answer>a</answer>"
    ]
    engine = ScriptedSight(processor.tokenizer, lambda session, turn: script[turn])
    [trajectory] = rollout(MultiTurnToolEnv([look]), engine, processor, [shown(picture())], history=history)
    assert trajectory.stop_reason is StopReason.ANSWERED, trajectory.error
    last = trajectory.tree.path_of_turn(2)
    assert [token for token in last if token < 0].count(list(trajectory.images)[1]) == 2 * 4


class Board(StepEnv):
    """Draws on one image and shows it after each turn."""

    def __init__(self, image: Any) -> None:
        self.image = image

    def reset(self, row: dict[str, Any]) -> list[Any]:
        return shown(self.image)

    def step(self, turn: Any) -> Step:
        draw_on(self.image, len(self.turns))
        return Step(shown(self.image), done=len(self.turns) == 3)


def draw_on(image: Any, number: int) -> None:
    ImageDraw.Draw(image).rectangle((0, 0, 4 * number, 16), fill="yellow")


def drawing_tool(image: Any) -> Any:
    def look(where: str) -> Any:
        """
        Draws and looks.

        Args:
            where: At what.
        """
        draw_on(image, len(where))
        return image

    return look


@pytest.mark.parametrize("by", ["tool", "environment"])
@pytest.mark.parametrize("opened", ["from a file", "in memory"])
def test_an_image_that_is_drawn_on_is_shown_as_it_was(by, opened, tmp_path):
    processor, image = build_processor("qwen3_vl"), picture(size=(24, 16))
    if opened == "from a file":
        image.save(tmp_path / "board.png")
        image = Image.open(tmp_path / "board.png")
    script = [CALLS["tags"].format("a" * number) for number in (1, 2)] + ["<answer>a</answer>"]
    engine = ScriptedSight(processor.tokenizer, lambda session, turn: script[turn])
    env = Board(image) if by == "environment" else MultiTurnToolEnv([drawing_tool(image)])
    [trajectory] = rollout(env, engine, processor, [shown(picture("blue"))], sanity_check_mode="strict")
    assert trajectory.stop_reason in (StopReason.ANSWERED, StopReason.ENV_DONE), trajectory.error
    replies = [turn.replies for turn in trajectory.turns[:2]]
    said = [trajectory.prompt, *replies] if by == "environment" else replies
    pixels = [part["image"].getpixel((6, 1)) for message in said for part in media_parts(message)]
    assert [each == (255, 255, 0) for each in pixels] == [False, False, True][-len(pixels) :]
    assert len(trajectory.images) == 3 and trajectory.tree.num_sequences == 1


def test_a_file_closed_before_it_is_decoded_is_left_alone(tmp_path):
    picture().save(tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as closed:
        pass
    assert snapshot_parts([closed]) == [closed]


# Sampled


class Screen:
    """Three turns, each answered with another image."""

    async def run(self, policy: Any, row: dict[str, Any]) -> Outcome:
        messages = list(row["prompt"])
        for number in range(3):
            turn = await policy.reply(messages, max_tokens=5)
            parts = [
                {"type": "text", "text": "Now"},
                {"type": "image", "image": picture("blue", (16, 16 + 8 * number))},
            ]
            messages += [turn.message, {"role": "user", "content": parts}]
        return Outcome()

    async def close(self) -> None:
        pass


def test_the_engine_samples_as_the_model_reads_images():
    processor = build_processor()
    model = build_vision_model(processor.tokenizer)
    prompts = [shown(picture("red")), shown(picture("green")), [{"role": "user", "content": "No image."}]]
    trajectories = rollout(Screen, TransformersEngine(model, processor.tokenizer), processor, prompts)
    for trajectory in trajectories:
        for turn, action in enumerate(trajectory.tree.actions()):
            said = [message for each in trajectory.turns[:turn] for message in (each.message, *each.replies)]
            images = [part["image"] for part in media_parts(trajectory.prompt + said)]
            pixels = processor.image_processor(images=images, return_tensors="pt") if images else {}
            ids = torch.tensor([real(trajectory.tree.path_of_turn(turn), processor)])
            types = {"mm_token_type_ids": (ids == processor.image_token_id).long()} if images else {}
            with torch.no_grad():
                logits = model(input_ids=ids, **pixels, **types).logits[0, -len(action) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(action)[:, None])[:, 0]
            sampled = [value for node in trajectory.tree.nodes if node.turn == turn for value in node.logprobs]
            torch.testing.assert_close(torch.tensor(sampled), expected, rtol=1e-5, atol=1e-5)


def test_no_image_is_sampled():
    processor = build_processor()
    model = build_vision_model(processor.tokenizer)
    with torch.no_grad():  # the model would write nothing else
        model.lm_head.weight.zero_()
        model.lm_head.weight[processor.image_token_id] = 1.0
    limits = RolloutLimits(max_turn_tokens=20)
    [trajectory] = rollout(
        MultiTurnToolEnv(),
        TransformersEngine(model, processor.tokenizer),
        processor,
        [shown(picture())],
        limits=limits,
    )
    assert trajectory.turns[0].num_tokens
    assert processor.image_token_id not in trajectory.tree.actions()[0]


# From where images come


def png() -> str:
    return base64.b64encode(to_file(picture("green", (16, 16)))).decode()


def test_an_mcp_server_shows_images_to_models_that_see():
    content = [SimpleNamespace(type="image", data=png()), SimpleNamespace(type="text", text="a page")]
    image, text = result_parts(content)
    assert image["image"].tobytes() == picture("green", (16, 16)).tobytes()
    assert (image["alt"], text) == ("[image: not text]", {"type": "text", "text": "a page"})
    assert result_parts(content[1:]) is None
    result = read_result([image, text], None)
    assert (result.text, result.parts) == ("[image: not text]\na page", [image, text])
    renderer = ChatRenderer(build_tokenizer())
    ids = renderer.prompt_ids([{"role": "user", "content": result.parts}])
    assert "[image: not text]\na page" in renderer.decode(ids)


@pytest.mark.parametrize("kind", ["image_url", "input_image"])
def test_a_request_shows_images_of_its_own(kind):
    url = f"data:image/png;base64,{png()}"
    shown = {"type": kind, "image_url": {"url": url} if kind == "image_url" else url}
    image, text = opened_parts(read_parts([shown, {"type": "text", "text": "What?"}], "messages[0].content"))
    assert image["image"].tobytes() == picture("green", (16, 16)).tobytes()
    assert text == {"type": "text", "text": "What?"}


class Camera:
    """An environment in TRL's form."""

    def reset(self, **row: Any) -> list[Any]:
        return [{"type": "image", "image": picture("blue", (16, 16))}]

    def look(self) -> list[Any]:
        """Takes an image."""
        return [{"type": "image", "image": picture()}, {"type": "text", "text": "a page"}]


def test_an_environment_of_trl_shows_images():
    processor = build_processor("qwen3_vl")
    add_response_schema(processor.tokenizer)
    script = ['<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>', "a page<|im_end|>"]
    engine = ScriptedSight(processor.tokenizer, lambda session, turn: script[turn])
    [trajectory] = rollout(TRLEnv(Camera), engine, processor, ["What is it?"])
    assert trajectory.stop_reason is StopReason.ANSWERED, trajectory.error
    kinds = [part["type"] for part in trajectory.prompt[-1]["content"]]
    assert kinds == ["text", "image"] and len(trajectory.images) == 2
