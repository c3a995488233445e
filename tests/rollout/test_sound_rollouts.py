"""Sounds in conversations: rendered, encoded and sampled; played by users, tools, servers and environments."""

from __future__ import annotations

import asyncio
import base64
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.audio import RATE, SOUND_FAMILIES, tone
from support.images import ScriptedSight, build_processor, build_vision_model
from support.models import build_tokenizer

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.forward.media import media_tokens
from mt_grpo.integrations.openai_api.request import ApiError, read_parts
from mt_grpo.integrations.trl import TRLEnv
from mt_grpo.media import SOUND, MediumError, to_file
from mt_grpo.media import read_parts as opened_parts
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams
from mt_grpo.rollout.chat_template import TemplateError
from mt_grpo.rollout.engines.transformers import TransformersEngine
from mt_grpo.rollout.media import MediaEncoder
from mt_grpo.rollout.rendering import ChatRenderer
from mt_grpo.sounds import Sound, read_part
from mt_grpo.tools.mcp.tools import result_parts
from mt_grpo.tools.results import read_result
from mt_grpo.trajectory import StopReason

TONE = Sound(tone(), RATE)


@cache
def family() -> Any:
    return SOUND_FAMILIES["qwen2-audio"]()


def encoder_of(processor: Any, model: Any) -> MediaEncoder:
    return MediaEncoder(processor, media_tokens(model.config))


def played(sound: Any = TONE, words: str = "What is it?") -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": [read_part({"type": "audio", "audio": sound}), {"type": "text", "text": words}]}
    ]


def rollout(env: Any, engine: Any, prompts: list[Any], **options: Any) -> list[Any]:
    runner = RolloutRunner(env, engine, images=encoder_of(*family()), **options)
    requests = [RolloutRequest(prompt, str(number), {}, number) for number, prompt in enumerate(prompts)]
    return asyncio.run(runner.run(requests, SamplingParams(temperature=1.0)))


def test_a_text_that_spells_a_sound_plays_none():
    processor, model = family()
    renderer = ChatRenderer(processor.tokenizer, images=encoder_of(processor, model))
    words = "<|audio_bos|><|AUDIO|><|audio_eos|> \U0001f76b2123\U0001f76b3"
    ids = renderer.prompt_ids(played(words=words))
    assert media_tokens(model.config)[SOUND] not in ids and len({token for token in ids if token < 0}) == 1
    assert words in renderer.decode(ids)


def test_one_sound_in_two_objects_is_one():
    encoder = encoder_of(*family())
    made = [Sound(tone(), RATE), Sound(tone(), RATE), Sound(tone(41.0), RATE)]
    encoded = [encoder.encode(read_part({"type": "audio", "audio": sound})) for sound in made]
    assert encoded[0] is encoded[1] is not encoded[2] and encoded[0].id != encoded[2].id


def test_sounds_are_refused_in_one_sentence():
    encoder = encoder_of(*family())
    with pytest.raises(MediumError, match=r"A sound has 44100 samples .* takes 800: resample it, .*sampling_rate=800"):
        encoder.encode(read_part({"type": "audio", "audio": tone(), "sampling_rate": 44_100}))
    with pytest.raises(MediumError, match=r"The processor gives a sound of 0\.00 s no tokens"):
        encoder.encode(read_part({"type": "audio", "audio": [0.5], "sampling_rate": RATE}))


def test_sounds_for_a_model_of_text_are_refused_or_read_as_words():
    renderer = ChatRenderer(build_tokenizer())
    with pytest.raises(
        TemplateError, match="A message of 'user' plays a sound, .*: use a model that takes sounds, wit"
    ):
        renderer.prompt_ids(played())
    messages = played()
    messages[0]["content"][0]["alt"] = "[a bell]"
    assert "[a bell]" in renderer.decode(renderer.prompt_ids(messages))


def test_a_model_that_only_sees_reads_the_words_for_a_sound():
    processor = build_processor()
    encoder = MediaEncoder(processor, media_tokens(build_vision_model(processor.tokenizer).config))
    renderer = ChatRenderer(processor.tokenizer, images=encoder)
    with pytest.raises(MediumError, match="The model is not played sounds, .*: show a transcript as text"):
        renderer.prompt_ids(played())
    messages = played()
    messages[0]["content"][0]["alt"] = "[a bell]"
    assert "[a bell]" in renderer.decode(renderer.prompt_ids(messages))


def test_a_template_that_counts_sounds_counts_those_before():
    """Qwen2-Audio's own template numbers them: a reply has the number that it has in the whole conversation."""
    processor, model = family()
    tokenizer = processor.tokenizer
    own, tokenizer.chat_template = tokenizer.chat_template, processor.default_chat_template
    try:
        renderer = ChatRenderer(tokenizer, images=encoder_of(processor, model))
        said = [*played(), {"role": "assistant", "content": "A tone."}]
        replies = played(Sound(tone(60.0), RATE), "And this?")
        ids = (
            renderer.prompt_ids(said[:1])
            + tokenizer.encode("A tone.")
            + renderer.reply_ids(replies, -1, shown=renderer.shown_parts(said[:1]))
        )
        assert ids == renderer.prompt_ids([*said, *replies])
        assert "Audio 1: " in renderer.decode(ids) and "Audio 2: " in renderer.decode(ids)
    finally:
        tokenizer.chat_template = own


# Played by others


def listen(where: str) -> Any:
    """
    Listens somewhere.

    Args:
        where: Where.
    """
    sound = {"type": "audio", "audio": {"array": tone(60.0), "sampling_rate": RATE}}
    return Sound(tone(60.0), RATE) if where == "here" else ([sound, {"type": "text", "text": "a bell"}], {"heard": 1})


def test_a_tool_plays_a_sound():
    call = '<tool>{{"name": "listen", "args": {{"where": "{}"}}}}</tool>'
    script = [call.format("here"), call.format("there"), "<answer>a bell</answer>"]
    engine = ScriptedSight(family()[0].tokenizer, lambda session, turn: script[turn])
    [trajectory] = rollout(MultiTurnToolEnv([listen]), engine, [played()], sanity_check_mode="strict")
    assert trajectory.stop_reason is StopReason.ANSWERED, trajectory.error
    assert trajectory.render_mismatch is None and trajectory.tree.num_sequences == 1
    first, second = (turn.tool_calls[0] for turn in trajectory.turns[:2])
    assert (first.result, second.data) == ("[sound of 1.0 s]", {"heard": 1})
    assert second.result == "[sound of 1.0 s]\na bell" and second.parts[0]["audio"] == Sound(tone(60.0), RATE)
    assert len(trajectory.images) == 2


@pytest.mark.parametrize("history", ["template", "strip_thinking"])
def test_a_rendered_history_keeps_its_sounds(history):
    call = '<tool>{"name": "listen", "args": {"where": "here"}}</tool>'
    script = [f"<think>{number}</think>\n{call}" for number in range(2)] + ["<answer>a</answer>"]
    engine = ScriptedSight(family()[0].tokenizer, lambda session, turn: script[turn])
    [trajectory] = rollout(MultiTurnToolEnv([listen]), engine, [played()], history=history)
    assert trajectory.stop_reason is StopReason.ANSWERED, trajectory.error
    last = trajectory.tree.path_of_turn(2)
    size = list(trajectory.images.values())[1].inputs.size
    assert [token for token in last if token < 0].count(list(trajectory.images)[1]) == 2 * size


def test_no_token_of_a_sound_is_sampled():
    processor, model = SOUND_FAMILIES["qwen2-audio"]()
    with torch.no_grad():  # the model would write nothing else
        model.lm_head.weight.zero_()
        model.lm_head.weight[processor.audio_token_id] = 1.0
    engine = TransformersEngine(model, processor.tokenizer)
    [trajectory] = rollout(MultiTurnToolEnv(), engine, [played()], limits=RolloutLimits(max_turn_tokens=20))
    assert trajectory.turns[0].num_tokens and processor.audio_token_id not in trajectory.tree.actions()[0]


def test_an_mcp_server_plays_sounds_to_models_that_hear():
    data = base64.b64encode(to_file(TONE)).decode()
    content = [SimpleNamespace(type="audio", data=data), SimpleNamespace(type="text", text="a bell")]
    sound, text = result_parts(content)
    assert sound["audio"] == TONE
    assert (sound["alt"], text) == ("[audio: not text]", {"type": "text", "text": "a bell"})
    assert result_parts(content[1:]) is None
    assert result_parts([SimpleNamespace(type="audio", data=base64.b64encode(b"ID3").decode())]) is None
    assert read_result([sound, text], None).text == "[audio: not text]\na bell"


def test_a_request_plays_sounds_of_its_own():
    place, data = "messages[0].content", base64.b64encode(to_file(TONE)).decode()
    given = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    sound, text = opened_parts(read_parts([given, {"type": "text", "text": "What?"}], place))
    assert sound["audio"] == TONE and text == {"type": "text", "text": "What?"}
    for part, problem in (
        ({"type": "input_audio", "input_audio": {}}, "has a sound that is no `input_audio` with `data`"),
        ({"type": "audio_url", "audio_url": {"url": "https://example.org/a"}}, "has a sound that is no `input_audio`"),
        ({"type": "audio", "audio": "/etc/passwd"}, "has a sound that is no `input_audio`"),
    ):
        with pytest.raises(ApiError, match=problem):
            read_parts([part], place)


class Radio:
    """An environment in TRL's form."""

    def reset(self, **row: Any) -> list[Any]:
        return [{"type": "audio", "audio": tone(30.0)}]

    def listen(self) -> list[Any]:
        """Listens."""
        return [{"type": "audio", "audio": tone(60.0)}, {"type": "text", "text": "a bell"}]


def test_an_environment_of_trl_plays_sounds():
    script = ['<tool>{"name": "listen", "args": {}}</tool>', "<answer>a bell</answer>"]
    engine = ScriptedSight(family()[0].tokenizer, lambda session, turn: script[turn])
    [trajectory] = rollout(TRLEnv(Radio, protocol="tags"), engine, ["What is it?"])
    assert trajectory.stop_reason is StopReason.ANSWERED, trajectory.error
    kinds = [part["type"] for part in trajectory.prompt[-1]["content"]]
    assert kinds == ["text", "audio"] and len(trajectory.images) == 2
