"""Images and sounds in conversations: encoded and sampled as the model would; of users, tools, servers, agents."""

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
from support.images import ScriptedSight, build_processor, build_vision_model, picture
from support.models import build_tokenizer
from trl.chat_template_utils import add_response_schema

from mt_grpo.envs import MultiTurnToolEnv, Outcome, Step, StepEnv
from mt_grpo.forward.media import media_tokens, real_ids
from mt_grpo.integrations.openai_api.request import ApiError, read_parts
from mt_grpo.integrations.trl import TRLEnv
from mt_grpo.media import MediumError, digest, media_of, media_parts, snapshot_parts, to_file
from mt_grpo.media import read_parts as opened_parts
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams
from mt_grpo.rollout.chat_template import TemplateError
from mt_grpo.rollout.engines.transformers import TransformersEngine
from mt_grpo.rollout.media import MediaEncoder
from mt_grpo.rollout.rendering import ChatRenderer
from mt_grpo.sounds import Sound
from mt_grpo.tools.function import read_result
from mt_grpo.tools.mcp import result_parts
from mt_grpo.trajectory import StopReason, Trajectory

TONE = Sound(tone(), RATE)
ANSWERED = (StopReason.ANSWERED, StopReason.ENV_DONE)


@dataclass(frozen=True)
class Kind:
    """Images or sounds, and a model that takes them."""

    type: str
    build: Callable[[], tuple[Any, Any]]
    make: Callable[[int], Any]
    spelt: str
    words: str
    token: str

    def part(self, number: int = 0) -> dict[str, Any]:
        return opened_parts([self.make(number)])[0]

    def asked(self, number: int = 0, words: str = "What is it?") -> list[dict[str, Any]]:
        return [{"role": "user", "content": [self.part(number), {"type": "text", "text": words}]}]


@cache
def sight() -> tuple[Any, Any]:
    processor = build_processor("qwen3_vl")
    return processor, build_vision_model(processor.tokenizer)


hearing = cache(SOUND_FAMILIES["qwen2-audio"])
SEES = Kind(
    "image",
    sight,
    lambda number: picture(("red", "green", "blue")[number], (16, 16) if number else (24, 16)),
    "<|vision_start|><|image_pad|><|vision_end|>",
    "[image]",
    "image_token_id",
)
HEARS = Kind(
    "audio",
    hearing,
    lambda number: Sound(tone((40.0, 60.0, 30.0)[number]), RATE),
    "<|audio_bos|><|AUDIO|><|audio_eos|>",
    "[sound of 1.0 s]",
    "audio_token_id",
)
both = pytest.mark.parametrize("kind", [SEES, HEARS], ids=lambda kind: kind.type)


def encoder_of(processor: Any, model: Any) -> MediaEncoder:
    return MediaEncoder(processor, media_tokens(model.config))


def renderer_of(kind: Kind) -> ChatRenderer:
    return ChatRenderer(kind.build()[0].tokenizer, media=encoder_of(*kind.build()))


def rollout(kind: Kind, env: Any, engine: Any, prompts: list[Any], **options: Any) -> list[Trajectory]:
    runner = RolloutRunner(env, engine, media=encoder_of(*kind.build()), **options)
    requests = [RolloutRequest(prompt, f"{number:03d}", {}, number) for number, prompt in enumerate(prompts)]
    return asyncio.run(runner.run(requests, SamplingParams(temperature=1.0)))


def scripted(kind: Kind, env: Any, script: list[str], prompt: Any = None, **options: Any) -> Trajectory:
    tokenizer = kind.build()[0].tokenizer
    engine = ScriptedSight(tokenizer, lambda session, turn: script[turn])
    [trajectory] = rollout(kind, env, engine, [prompt or kind.asked()], **options)
    assert trajectory.stop_reason in ANSWERED, trajectory.error
    return trajectory


# As the processor writes them


@pytest.mark.parametrize("template", ["qwen2_5_vl", "qwen3_vl"])
def test_a_prompt_has_the_ids_that_the_processor_gives_it(template):
    processor = build_processor(template)
    renderer = ChatRenderer(processor.tokenizer, media=MediaEncoder(processor))
    images = [picture("red"), picture("blue", (16, 32))]
    content = [{"type": "image", "image": image} for image in images]
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": content}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = processor(text=[text], images=images)["input_ids"][0]
    ids = [processor.image_token_id if token < 0 else token for token in renderer.prompt_ids(messages)]
    assert ids == list(expected)


@both
def test_a_text_that_spells_a_medium_shows_none(kind):
    words = f"{kind.spelt} \U0001f76b2123\U0001f76b3"
    renderer = renderer_of(kind)
    ids = renderer.prompt_ids(kind.asked(words=words))
    assert getattr(kind.build()[0], kind.token) not in ids
    assert len({token for token in ids if token < 0}) == 1
    assert words in renderer.decode(ids)


@both
def test_one_medium_in_two_objects_is_one(kind):
    encoder = encoder_of(*kind.build())
    encoded = [encoder.encode(kind.part(number)) for number in (0, 0, 1)]
    assert encoded[0] is encoded[1] is not encoded[2]
    assert encoded[0].id != encoded[2].id


def test_a_part_has_options_of_the_processor_for_itself():
    encoder, image = MediaEncoder(build_processor()), picture(size=(64, 64))
    whole, small = (encoder.encode({"type": "image", "image": image, **more}) for more in ({}, {"max_pixels": 1024}))
    assert (whole.inputs.size, small.inputs.size) == (64, 16)
    assert whole.id != small.id
    with pytest.raises(MediumError, match="The processor refuses an image of 64 by 64"):
        encoder.encode({"type": "image", "image": image, "max_pixel": 1024})


def test_sounds_are_refused_in_one_sentence():
    encoder = encoder_of(*hearing())
    for sound, problem in (
        (Sound(tone(), 44_100), r"A sound has 44100 samples .* takes 800: resample it, .*sampling_rate=800"),
        (Sound(tone()[:1], RATE), r"The processor gives a sound of 0\.00 s no tokens"),
    ):
        with pytest.raises(MediumError, match=problem):
            encoder.encode({"type": "audio", "audio": sound, "seconds": 0.0})


@both
def test_media_for_a_model_of_text_are_refused_or_read_as_words(kind):
    check_alt(ChatRenderer(build_tokenizer()), kind, TemplateError, "A message of 'user' (shows an image|plays a sou)")


def test_a_model_that_only_sees_reads_the_words_for_a_sound():
    check_alt(renderer_of(SEES), HEARS, MediumError, "The model is not played sounds, .*: show a transcript as text")


def check_alt(renderer: ChatRenderer, kind: Kind, error: type[Exception], problem: str) -> None:
    messages = kind.asked()
    with pytest.raises(error, match=problem):
        renderer.prompt_ids(messages)
    messages[0]["content"][0]["alt"] = "[a thing]"
    assert "[a thing]" in renderer.decode(renderer.prompt_ids(messages))


def test_a_template_that_counts_sounds_counts_those_before(monkeypatch):
    """Qwen2-Audio's own template numbers them: a reply has the number that it has in the whole conversation."""
    processor, _ = hearing()
    monkeypatch.setattr(processor.tokenizer, "chat_template", processor.default_chat_template)
    renderer = renderer_of(HEARS)
    said = [*HEARS.asked(), {"role": "assistant", "content": "A tone."}]
    replies = HEARS.asked(1, "And this?")
    ids = (
        renderer.prompt_ids(said[:1])
        + processor.tokenizer.encode("A tone.")
        + renderer.reply_ids(replies, -1, shown=renderer.shown_parts(said[:1]))
    )
    assert ids == renderer.prompt_ids([*said, *replies])
    assert "Audio 1: " in renderer.decode(ids) and "Audio 2: " in renderer.decode(ids)


# In results of tools


def tool_of(kind: Kind) -> Any:
    def look(where: str) -> Any:
        """
        Looks, or listens.

        Args:
            where: At what.
        """
        medium = kind.make(1)
        return medium if where == "it" else ([medium, {"type": "text", "text": "a page"}], {"seen": 1})

    return look


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
    answer = "<answer>a page</answer>" if protocol == "tags" else "a page<|im_end|>"
    script = [CALLS[protocol].format("it"), CALLS[protocol].format("all"), answer]
    env = MultiTurnToolEnv([tool_of(kind)], protocol=protocol)
    trajectory = scripted(kind, env, script, sanity_check_mode="strict")
    assert trajectory.render_mismatch is None
    assert trajectory.tree.num_sequences == 1
    first, second = (turn.tool_calls[0] for turn in trajectory.turns[:2])
    assert (first.result, second.result, second.data) == (kind.words, f"{kind.words}\na page", {"seen": 1})
    assert [*map(digest, media_of(second.parts[:1]))] == [digest(kind.make(1))]
    order = [token for node in trajectory.tree.nodes for token in node.tokens if token < 0]
    assert list(dict.fromkeys(order)) == list(trajectory.media)
    sizes = [image.inputs.size for image in trajectory.media.values()]
    assert len(sizes) == 2 and len(order) == sizes[0] + 2 * sizes[1]


@both
@pytest.mark.parametrize("history", ["template", "strip_thinking"])
def test_a_rendered_history_keeps_its_media(kind, history):
    call = CALLS["tags"].format("it")
    script = [f"<think>{number}</think>\n{call}" for number in range(2)] + ["<answer>a</answer>"]
    trajectory = scripted(kind, MultiTurnToolEnv([tool_of(kind)]), script, history=history)
    last = trajectory.tree.path_of_turn(2)
    number, shown = list(trajectory.media.items())[1]
    assert last.count(number) == 2 * shown.inputs.size


class Board(StepEnv):
    """Draws on one image and shows it after each turn."""

    def __init__(self, image: Any) -> None:
        self.image = image

    def reset(self, row: dict[str, Any]) -> list[Any]:
        return [{"role": "user", "content": [self.image]}]

    def step(self, turn: Any) -> Step:
        draw_on(self.image, len(self.turns))
        return Step(self.reset({}), done=len(self.turns) == 3)


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
    image = picture(size=(24, 16))
    if opened == "from a file":
        image.save(tmp_path / "board.png")
        image = Image.open(tmp_path / "board.png")
    script = [CALLS["tags"].format("a" * number) for number in (1, 2)] + ["<answer>a</answer>"]
    env = Board(image) if by == "environment" else MultiTurnToolEnv([drawing_tool(image)])
    trajectory = scripted(SEES, env, script, SEES.asked(2), sanity_check_mode="strict")
    replies = [turn.replies for turn in trajectory.turns[:2]]
    said = [trajectory.prompt, *replies] if by == "environment" else replies
    pixels = [part["image"].getpixel((6, 1)) for message in said for part in media_parts(message)]
    assert [each == (255, 255, 0) for each in pixels] == [False, False, True][-len(pixels) :]
    assert len(trajectory.media) == 3 and trajectory.tree.num_sequences == 1


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
            parts = [{"type": "text", "text": "Now"}, picture("blue", (16, 16 + 8 * number))]
            messages += [turn.message, {"role": "user", "content": parts}]
        return Outcome()

    async def close(self) -> None:
        pass


def test_the_engine_samples_as_the_model_reads_images():
    processor, model = sight()
    prompts = [SEES.asked(0), SEES.asked(1), [{"role": "user", "content": "No image."}]]
    trajectories = rollout(SEES, Screen, TransformersEngine(model, processor.tokenizer), prompts)
    for trajectory in trajectories:
        for turn, action in enumerate(trajectory.tree.actions()):
            said = [message for each in trajectory.turns[:turn] for message in (each.message, *each.replies)]
            images = media_of(opened_parts([*media_parts(trajectory.prompt + said)]))
            pixels = processor.image_processor(images=images, return_tensors="pt") if images else {}
            ids = real_ids(torch.tensor([trajectory.tree.path_of_turn(turn)]), model.config)
            types = {"mm_token_type_ids": (ids == processor.image_token_id).long()} if images else {}
            with torch.no_grad():
                logits = model(input_ids=ids, **pixels, **types).logits[0, -len(action) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(action)[:, None])[:, 0]
            sampled = [value for node in trajectory.tree.nodes if node.turn == turn for value in node.logprobs]
            torch.testing.assert_close(torch.tensor(sampled), expected, rtol=1e-5, atol=1e-5)


@both
def test_no_token_of_a_medium_is_sampled(kind):
    processor, model = kind.build.__wrapped__()
    token = getattr(processor, kind.token)
    with torch.no_grad():  # the model would write nothing else
        model.lm_head.weight.zero_()
        model.lm_head.weight[token] = 1.0
    engine = TransformersEngine(model, processor.tokenizer)
    limits = RolloutLimits(max_turn_tokens=20)
    [trajectory] = rollout(kind, MultiTurnToolEnv(), engine, [kind.asked()], limits=limits)
    assert trajectory.turns[0].num_tokens
    assert token not in trajectory.tree.actions()[0]


# From where media come


def base64_of(medium: Any) -> str:
    return base64.b64encode(to_file(medium)).decode()


@both
def test_an_mcp_server_shows_media_to_models_that_take_them(kind):
    medium = kind.make(1)
    content = [
        SimpleNamespace(type=kind.type, data=base64_of(medium)),
        SimpleNamespace(type="text", text="a page"),
    ]
    part, text = result_parts(content)
    assert to_file(part[kind.type]) == to_file(medium)
    words = f"[{kind.type}: not text]"
    assert (part["alt"], text) == (words, {"type": "text", "text": "a page"})
    assert result_parts(content[1:]) is None
    result = read_result([part, text], None)
    assert (result.text, result.parts) == (f"{words}\na page", [part, text])
    renderer = ChatRenderer(build_tokenizer())
    ids = renderer.prompt_ids([{"role": "user", "content": result.parts}])
    assert f"{words}\na page" in renderer.decode(ids)


def test_a_sound_of_an_mcp_server_that_nothing_reads_is_words():
    assert result_parts([SimpleNamespace(type="audio", data=base64.b64encode(b"ID3").decode())]) is None


IMAGE_URL = f"data:image/png;base64,{base64_of(picture('green', (16, 16)))}"


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (SEES, {"type": "image_url", "image_url": {"url": IMAGE_URL}}),
        (SEES, {"type": "input_image", "image_url": IMAGE_URL}),
        (HEARS, {"type": "input_audio", "input_audio": {"data": base64_of(HEARS.make(1)), "format": "wav"}}),
    ],
    ids=lambda each: each.get("type") if isinstance(each, dict) else "",
)
def test_a_request_shows_media_of_its_own(kind, given):
    part, text = opened_parts(read_parts([given, {"type": "text", "text": "What?"}], "messages[0].content"))
    assert to_file(part[kind.type]) == to_file(kind.make(1))
    assert text == {"type": "text", "text": "What?"}


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "input_audio", "input_audio": {}}, "has a sound that is no `input_audio` with `data`"),
        ({"type": "audio_url", "audio_url": {"url": "https://example.org/a"}}, "has a sound that is no `input_audio`"),
        ({"type": "audio", "audio": "/etc/passwd"}, "has a sound that is no `input_audio`"),
    ],
)
def test_a_request_names_no_sound_elsewhere(part, problem):
    with pytest.raises(ApiError, match=problem):
        read_parts([part], "messages[0].content")


@both
def test_an_environment_of_trl_shows_media(kind):
    class Camera:
        def reset(self, **row: Any) -> list[Any]:
            return [kind.part(2)]

        def look(self) -> list[Any]:
            """Looks."""
            return [kind.part(1), {"type": "text", "text": "a page"}]

    env = TRLEnv(Camera, protocol="tags")
    script = ['<tool>{"name": "look", "args": {}}</tool>', "<answer>a page</answer>"]
    trajectory = scripted(kind, env, script, "What is it?")
    types = [part["type"] for part in trajectory.prompt[-1]["content"]]
    assert types == ["text", kind.type] and len(trajectory.media) == 2
