"""Images and sounds in conversations: of users, tools, servers, environments and agents, as they were shown."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw
from support.audio import RATE, SOUND_FAMILIES, tone
from support.images import ScriptedSight, VideoTextProcessor, build_processor, build_vision_model, picture
from support.models import build_tokenizer
from trl.chat_template_utils import add_response_schema

from mt_grpo.envs import MultiTurnToolEnv, Step, StepEnv
from mt_grpo.forward.media import media_tokens
from mt_grpo.integrations.openai_api.request import _read_parts
from mt_grpo.integrations.trl import TRLEnv
from mt_grpo.media import MediumError, decode, digest, media_of, media_parts, read_image, snapshot_parts, to_file
from mt_grpo.media import read_parts as opened_parts
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams
from mt_grpo.rollout.chat_template import TemplateError
from mt_grpo.rollout.engines.transformers import TransformersEngine
from mt_grpo.rollout.escaped_text import MediaEncoder
from mt_grpo.rollout.rendering import ChatRenderer
from mt_grpo.sounds import Sound
from mt_grpo.tools import Tool
from mt_grpo.tools.function import _read_result
from mt_grpo.tools.mcp import _result_parts
from mt_grpo.trajectory import StopReason, Trajectory


@dataclass(frozen=True)
class Kind:
    """Images or sounds, and a model that takes them."""

    type: str
    build: Callable[[], tuple[Any, Any]]
    make: Callable[[int], Any]
    spelt: str
    words: str

    @property
    def encoder(self) -> MediaEncoder:
        processor, model = self.build()
        return MediaEncoder(processor, media_tokens(model.config))

    @property
    def renderer(self) -> ChatRenderer:
        return ChatRenderer(self.build()[0].tokenizer, media=self.encoder)

    def part(self, number: int = 0) -> dict[str, Any]:
        return opened_parts([self.make(number)])[0]

    def asked(self, number: int = 0, words: str = "What is it?") -> list[dict[str, Any]]:
        return [{"role": "user", "content": [self.part(number), {"type": "text", "text": words}]}]


@cache
def sight() -> tuple[Any, Any]:
    processor = build_processor("qwen3_vl", VideoTextProcessor)
    return processor, build_vision_model(processor.tokenizer)


SEES = Kind(
    "image",
    sight,
    lambda number: picture(("red", "green", "blue")[number], (16, 16) if number else (24, 16)),
    "<|vision_start|><|image_pad|><|vision_end|>",
    "[image]",
)
HEARS = Kind(
    "audio",
    cache(SOUND_FAMILIES["qwen2-audio"]),
    lambda number: Sound(tone((40.0, 60.0, 30.0)[number]), RATE),
    "<|audio_bos|><|AUDIO|><|audio_eos|>",
    "[sound of 1.0 s]",
)
both = pytest.mark.parametrize("kind", [SEES, HEARS], ids=lambda kind: kind.type)


def rollout(kind: Kind, env: Any, engine: Any, prompt: Any, **options: Any) -> Trajectory:
    runner = RolloutRunner(env, engine, media=kind.encoder, **options)
    work = runner.run([RolloutRequest(prompt, "000", {}, 0)], SamplingParams(temperature=1.0))
    return asyncio.run(work)[0]


def scripted(kind: Kind, env: Any, script: list[str], prompt: Any = None, **options: Any) -> Trajectory:
    engine = ScriptedSight(kind.build()[0].tokenizer, lambda session, turn: script[turn])
    trajectory = rollout(kind, env, engine, prompt or kind.asked(), **options)
    assert trajectory.stop_reason in (StopReason.ANSWERED, StopReason.ENV_DONE), trajectory.error
    return trajectory


# As the model takes them


@both
def test_a_text_that_spells_a_medium_shows_none(kind):
    words = f"{kind.spelt} \U0001f76b2123\U0001f76b3"
    ids = kind.renderer.prompt_ids(kind.asked(words=words))
    assert getattr(kind.build()[0], f"{kind.type}_token_id") not in ids
    assert len({token for token in ids if token < 0}) == 1
    assert words in kind.renderer.decode(ids)


@both
def test_one_medium_in_two_objects_is_one(kind):
    encoder = kind.encoder
    first, again, other = (encoder.encode(kind.part(number)) for number in (0, 0, 1))
    assert first is again is not other and first.id != other.id


def test_a_part_has_options_of_the_processor_for_itself():
    encoder, image = MediaEncoder(build_processor()), picture(size=(64, 64))
    whole, small = (encoder.encode({"type": "image", "image": image, **more}) for more in ({}, {"max_pixels": 1024}))
    assert (whole.inputs.size, small.inputs.size) == (64, 16) and whole.id != small.id
    with pytest.raises(MediumError, match="The processor refuses an image of 64 by 64"):
        encoder.encode({"type": "image", "image": image, "max_pixel": 1024})


@pytest.mark.parametrize(
    ("sound", "problem"),
    [
        (Sound(tone(), 44_100), r"A sound has 44100 samples .* takes 800: resample it, .*sampling_rate=800"),
        (Sound(tone()[:1], RATE), r"The processor gives a sound of 0\.00 s no tokens"),
    ],
)
def test_sounds_are_refused_in_one_sentence(sound, problem):
    with pytest.raises(MediumError, match=problem):
        HEARS.encoder.encode({"type": "audio", "audio": sound, "seconds": 0.0})


TEXT = "A message of 'user' (shows an image|plays a sou)"
FILM = {"type": "video", "video": [picture()] * 2}


@pytest.mark.parametrize(
    ("renderer", "part", "problem"),
    [
        (lambda: ChatRenderer(build_tokenizer()), SEES.part(), TEXT),
        (lambda: ChatRenderer(build_tokenizer()), HEARS.part(), TEXT),
        (lambda: SEES.renderer, HEARS.part(), "The model is not played sounds, .*: show a transcript as text"),
        (lambda: HEARS.renderer, FILM, "The model is not shown videos, .*: show frames as images"),
    ],
)
def test_media_that_a_model_does_not_take_are_refused_or_words(renderer, part, problem):
    with pytest.raises(TemplateError if problem is TEXT else MediumError, match=problem):
        renderer().prompt_ids([{"role": "user", "content": [part]}])
    ids = renderer().prompt_ids([{"role": "user", "content": [{**part, "alt": "[a thing]"}]}])
    assert "[a thing]" in renderer().decode(ids)


def test_a_template_that_counts_sounds_counts_those_before(monkeypatch):
    """Qwen2-Audio's own template numbers them: a reply has the number that it has in the whole conversation."""
    processor, _ = HEARS.build()
    monkeypatch.setattr(processor.tokenizer, "chat_template", processor.default_chat_template)
    renderer, said, replies = HEARS.renderer, HEARS.asked(), HEARS.asked(1, "And this?")
    ids = (
        renderer.prompt_ids(said)
        + processor.tokenizer.encode("A tone.")
        + renderer.reply_ids(replies, -1, shown=renderer.shown_parts(said))
    )
    assert ids == renderer.prompt_ids([*said, {"role": "assistant", "content": "A tone."}, *replies])
    assert "Audio 1: " in renderer.decode(ids) and "Audio 2: " in renderer.decode(ids)


@both
def test_no_token_of_a_medium_is_sampled(kind):
    processor, model = kind.build.__wrapped__()
    names = ("image_token_id", "video_token_id", "audio_token_id")
    tokens = [getattr(processor, name) for name in names if hasattr(processor, name)]
    with torch.no_grad():  # the model would write nothing else
        model.lm_head.weight.zero_()
        model.lm_head.weight[tokens] = 1.0
    engine = TransformersEngine(model, processor.tokenizer)
    limits = RolloutLimits(max_turn_tokens=20)
    trajectory = rollout(kind, MultiTurnToolEnv(), engine, kind.asked(), limits=limits)
    assert trajectory.turns[0].num_tokens and not set(tokens) & set(trajectory.tree.actions()[0])


# In results of tools


def tool_of(look: Callable[[str], Any]) -> Tool:
    return Tool("look", "", {"type": "object", "properties": {"where": {"type": "string"}}}, look)


CALLS = {
    "tags": '<tool>{{"name": "look", "args": {{"where": "{}"}}}}</tool>',
    "native": '<tool_call>\n{{"name": "look", "arguments": {{"where": "{}"}}}}\n</tool_call><|im_end|>',
}


@pytest.mark.parametrize(
    ("kind", "protocol"), [(SEES, "tags"), (SEES, "native"), (HEARS, "tags")], ids=["image", "native", "audio"]
)
def test_a_tool_shows_a_medium(kind, protocol):
    if protocol == "native":
        add_response_schema(kind.build()[0].tokenizer)
    page = {"type": "text", "text": "a page"}
    look = tool_of(lambda where: kind.make(1) if where == "it" else ([kind.make(1), page], {"seen": 1}))
    answer = "<answer>a page</answer>" if protocol == "tags" else "a page<|im_end|>"
    script = [CALLS[protocol].format("it"), CALLS[protocol].format("all"), answer]
    trajectory = scripted(kind, MultiTurnToolEnv([look], protocol=protocol), script, sanity_check_mode="strict")
    assert trajectory.render_mismatch is None and trajectory.tree.num_sequences == 1
    first, second = (turn.tool_calls[0] for turn in trajectory.turns[:2])
    assert (first.result, second.result, second.data) == (kind.words, f"{kind.words}\na page", {"seen": 1})
    assert [*map(digest, media_of(second.parts[:1]))] == [digest(kind.make(1))]
    order = [token for node in trajectory.tree.nodes for token in node.tokens if token < 0]
    assert list(dict.fromkeys(order)) == list(trajectory.media)
    first, second = (image.inputs.size for image in trajectory.media.values())
    assert len(order) == first + 2 * second


@both
@pytest.mark.parametrize("history", ["template", "strip_thinking"])
def test_a_rendered_history_keeps_its_media(kind, history):
    call = CALLS["tags"].format("it")
    script = [f"<think>{number}</think>\n{call}" for number in range(2)] + ["<answer>a</answer>"]
    trajectory = scripted(kind, MultiTurnToolEnv([tool_of(lambda where: kind.make(1))]), script, history=history)
    number, shown = list(trajectory.media.items())[1]
    assert trajectory.tree.path_of_turn(2).count(number) == 2 * shown.inputs.size


def drawn_on(image: Any, number: int) -> Any:
    ImageDraw.Draw(image).rectangle((0, 0, 4 * number, 16), fill="yellow")
    return image


class Board(StepEnv):
    """Draws on one image and shows it after each turn."""

    def __init__(self, image: Any) -> None:
        self.image = image

    def reset(self, row: dict[str, Any]) -> list[Any]:
        return [{"role": "user", "content": [self.image]}]

    def step(self, turn: Any) -> Step:
        drawn_on(self.image, len(self.turns))
        return Step(self.reset({}), done=len(self.turns) == 3)


@pytest.mark.parametrize("by", ["tool", "environment"])
@pytest.mark.parametrize("opened", ["from a file", "in memory", "of a row", "of a row, decoded"])
def test_an_image_that_is_drawn_on_is_shown_as_it_was(by, opened, tmp_path):
    image = picture(size=(24, 16))
    if opened != "in memory":
        image.save(tmp_path / "board.png")
        image = Image.open(tmp_path / "board.png")
    if "of a row" in opened:
        image = read_image(tmp_path / "board.png", of_row=True)
    if opened == "of a row, decoded":
        decode(image)
    script = [CALLS["tags"].format("a" * number) for number in (1, 2)] + ["<answer>a</answer>"]
    tools = MultiTurnToolEnv([tool_of(lambda where: drawn_on(image, len(where)))])
    env = tools if by == "tool" else Board(image)
    trajectory = scripted(SEES, env, script, SEES.asked(2), sanity_check_mode="strict")
    said = [*([trajectory.prompt] if by == "environment" else []), *(turn.replies for turn in trajectory.turns[:2])]
    pixels = [part["image"].getpixel((6, 1)) for message in said for part in media_parts(message)]
    assert [each == (255, 255, 0) for each in pixels] == [False, False, True][-len(pixels) :]
    assert len(trajectory.media) == 3 and trajectory.tree.num_sequences == 1


def test_an_image_of_any_mode_has_a_file():
    for mode in "1 L P PA LA La RGB RGBA RGBa RGBX CMYK YCbCr HSV LAB F I I;16".split():
        file = to_file(Image.new(mode, (4, 3), 300 if mode[0] == "I" else 0))
        assert read_image(file).size == (4, 3) and (mode[0] != "I" or read_image(file).getpixel((0, 0)) == 300)


def test_a_file_closed_before_it_is_decoded_is_left_alone(tmp_path):
    picture().save(tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as closed:
        pass
    assert snapshot_parts([closed]) == [closed]


# From where media come


def base64_of(medium: Any) -> str:
    return base64.b64encode(to_file(medium)).decode()


@both
def test_an_mcp_server_shows_media_to_models_that_take_them(kind):
    medium, words = kind.make(1), f"[{kind.type}: not text]"
    shown, page = SimpleNamespace(type=kind.type, data=base64_of(medium)), SimpleNamespace(type="text", text="a page")
    part, text = _result_parts([shown, page])
    assert to_file(part[kind.type]) == to_file(medium)
    assert (part["alt"], text) == (words, {"type": "text", "text": "a page"})
    result = _read_result([part, text], None)
    assert (result.text, result.parts) == (f"{words}\na page", [part, text])
    renderer = ChatRenderer(build_tokenizer())
    ids = renderer.prompt_ids([{"role": "user", "content": result.parts}])
    assert f"{words}\na page" in renderer.decode(ids)
    # without a medium, or with a sound that nothing reads, it is words
    assert _result_parts([page]) is None
    assert _result_parts([SimpleNamespace(type="audio", data=base64.b64encode(b"ID3").decode())]) is None


IMAGE_URL = f"data:image/png;base64,{base64_of(picture('green', (16, 16)))}"


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (SEES, {"type": "image_url", "image_url": {"url": IMAGE_URL}}),
        (SEES, {"type": "input_image", "image_url": IMAGE_URL}),
        (HEARS, {"type": "input_audio", "input_audio": {"data": base64_of(HEARS.make(1)), "format": "wav"}}),
    ],
    ids=["image_url", "input_image", "input_audio"],
)
def test_a_request_shows_media_of_its_own(kind, given):
    part, text = opened_parts(_read_parts([given, {"type": "text", "text": "What?"}], "messages[0].content"))
    assert to_file(part[kind.type]) == to_file(kind.make(1)) and text == {"type": "text", "text": "What?"}


@both
def test_an_environment_of_trl_shows_media(kind):
    class Camera:
        def reset(self, **row: Any) -> list[Any]:
            return [kind.part(2)]

        def look(self) -> list[Any]:
            """Looks."""
            return [kind.part(1), {"type": "text", "text": "a page"}]

    script = ['<tool>{"name": "look", "args": {}}</tool>', "<answer>a page</answer>"]
    trajectory = scripted(kind, TRLEnv(Camera, protocol="tags"), script, "What is it?")
    assert [part["type"] for part in trajectory.prompt[-1]["content"]] == ["text", kind.type]
    assert len(trajectory.media) == 2
