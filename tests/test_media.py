"""Images and sounds of strangers: of few formats, bounded before they are decoded, and no files of this machine."""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import os
import pickle
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from PIL import Image, ImageFile
from support.images import ScriptedSight, build_processor, picture
from support.models import build_tokenizer

from mt_grpo.envs import Outcome
from mt_grpo.media import (
    IN_CONVERSATION,
    IN_MESSAGE,
    MediumError,
    digest,
    is_decoded,
    read_image,
    read_messages,
    read_parts,
    to_file,
)
from mt_grpo.media_files import MOST_BYTES
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams
from mt_grpo.rollout.engine import ScriptedEngine
from mt_grpo.rollout.media import MediaEncoder
from mt_grpo.runlog.writer import Batch, RunWriter
from mt_grpo.sounds import Sound, read_sound
from mt_grpo.tools.function import read_result
from mt_grpo.tools.mcp import result_parts
from mt_grpo.trajectory import StopReason, Trajectory

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"


def saved(image: Any, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, format=kind)
    return file.getvalue()


def large(width: int, height: int) -> bytes:
    """The file of an image of which only the header is there."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = struct.pack(">I", 13) + head + struct.pack(">I", crc32(head)) + struct.pack(">I", 0) + b"IDAT"
    return b"\x89PNG\r\n\x1a\n" + chunks + struct.pack(">I", crc32(b"IDAT"))


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def from_server(data: bytes) -> Any:
    return result_parts([SimpleNamespace(type="image", data=base64.b64encode(data).decode())])


# Formats


def test_no_image_starts_a_program(ghostscript):
    for read in (
        lambda: read_image(EPS),
        lambda: read_image(url(EPS)),
        lambda: from_server(EPS),
        lambda: read_result([{"type": "image", "image": EPS}], None),
        lambda: read_result(Image.open(io.BytesIO(EPS)), None),
        lambda: read_parts([{"type": "video", "video": [Image.open(io.BytesIO(EPS))]}]),
    ):
        with pytest.raises(MediumError):
            read()
    assert not ghostscript.exists()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "MPO"])
def test_images_of_these_formats_are_read(kind):
    data = saved(picture("green", (16, 16)), kind)
    image = read_image(data)
    assert (image.size, is_decoded(image), to_file(image)) == ((16, 16), False, data)
    for same in (copy.deepcopy(image), pickle.loads(pickle.dumps(image)), image):
        assert not is_decoded(same) and digest(same) == digest(image)
        [shown] = read_result(same, None).parts
        assert shown["image"].tobytes() == Image.open(io.BytesIO(data)).tobytes()


@pytest.mark.parametrize("kind", ["TIFF", "BMP", "PPM", "ICO"])
def test_an_image_of_another_format_is_one_sentence(kind):
    data = saved(picture("green", (16, 16)), kind)
    with pytest.raises(MediumError, match=r"cannot be read as an image: .* no known kind \(PNG, JPEG, WEBP, GIF\)"):
        read_image(data)
    loaded = Image.open(io.BytesIO(data))
    loaded.load()  # by the user's own code
    assert read_image(loaded) is loaded


# Sizes


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_of_too_many_pixels_is_never_decoded(monkeypatch):
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("it was decoded"))
    for side in (9_000, 13_000, 20_000):
        with pytest.raises(MediumError, match=r"An image of \d+ bytes has .* pixels"):
            read_image(large(side, side))


def test_the_images_of_a_message_are_bounded_together():
    data = large(5_000, 5_000)
    assert len(read_parts([{"type": "image", "image": data}] * 2)) == 2
    with pytest.raises(
        MediumError, match="A message shows images and sounds of 75,000,000 pixels and samples, and 67,"
    ):
        read_parts([{"type": "image", "image": data}, {"type": "video", "video": [data, data]}])
    dot = {"type": "image", "image": large(1, 1)}
    with pytest.raises(MediumError, match="A message shows 1,025 images, frames and sounds, and 1,024 are the most"):
        read_parts([dot] * (IN_MESSAGE.number + 1))


def header(length: int, channels: int = 1, rate: int = 16_000, bits: int = 16) -> bytes:
    """A WAV file with `length` bytes of silence."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, channels, rate, 0, 0, bits)
    return b"RIFF\0\0\0\0WAVE" + form + struct.pack("<4sI", b"data", length) + bytes(length)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (header(4_000, channels=33), "has 33 channels, and 32 are the most"),
        (header(20_000, rate=2), "A sound is 5,000 s long, and 3,600 s are the most: give a part of it"),
        (header(MOST_BYTES), "has more than 67,108,864 bytes, the most of a file"),
        (header(200, rate=0), "A sound has 0 samples per second"),
        (np.zeros(IN_MESSAGE.values + 1, np.int8), "A sound is 4,194 s long|67,108,865 pixels and samples"),
    ],
    ids=["channels", "seconds", "bytes", "rate", "samples"],
)
def test_a_sound_that_is_too_large_is_one_sentence(data, problem):
    with pytest.raises(MediumError, match=problem):
        read_sound(data)


def test_a_sound_is_decoded_when_it_is_looked_at():
    sound = read_sound(to_file(Sound(np.ones(160, np.float32), 16_000)))
    same = pickle.loads(pickle.dumps(sound))
    assert (sound.seconds, sound, is_decoded(sound), is_decoded(same)) == (0.01, same, False, False)
    assert sound.samples.tolist() == [1.0] * 160 and is_decoded(sound)


def converse(env: Any, engine: Any, images: MediaEncoder | None = None, prompt: Any = "What?") -> Trajectory:
    runner = RolloutRunner(env, engine, media=images)
    return asyncio.run(runner.run([RolloutRequest(prompt, "a", {}, 0)], SamplingParams()))[0]


class Shows:
    """Shows what it is given, one after another, and asks after each."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __call__(self) -> Shows:
        return self

    async def run(self, policy: Any, row: dict[str, Any]) -> Outcome:
        messages = list(row["prompt"]) if isinstance(row["prompt"], list) else []
        for part in self.parts:
            messages.append({"role": "user", "content": [part, {"type": "text", "text": "And now?"}]})
            messages.append((await policy.reply(messages)).message)
        return Outcome()

    async def close(self) -> None:
        pass


def sighted() -> tuple[ScriptedSight, MediaEncoder]:
    processor = build_processor()
    return ScriptedSight(processor.tokenizer, lambda session, turn: "Fine."), MediaEncoder(processor)


def test_the_images_of_a_conversation_are_bounded_together(monkeypatch):
    monkeypatch.setattr("mt_grpo.media.IN_CONVERSATION", IN_CONVERSATION._replace(values=1_000))
    parts = [{"type": "image", "image": picture(color, (16, 16))} for color in ("red", "green", "blue", "white")]
    again = [parts[0], *parts[:3]]
    assert converse(Shows(*again), *sighted()).stop_reason is StopReason.ENV_DONE
    trajectory = converse(Shows(*parts), *sighted())
    assert "A conversation shows images and sounds of 1,024 pixels and samples, and 1,000" in trajectory.error
    assert len(trajectory.turns) == 3


def test_a_model_of_text_has_no_image_decoded(tmp_path):
    [part] = from_server(saved(picture("green", (16, 16)), "JPEG"))
    engine = ScriptedEngine(build_tokenizer(), lambda session, turn: "Fine.")
    trajectory = converse(Shows(part, part), engine)
    assert trajectory.stop_reason is StopReason.ENV_DONE, trajectory.error
    assert not is_decoded(part["image"])
    assert not is_decoded(read_result([part], None).parts[0]["image"])


def test_images_are_decoded_in_a_thread_and_once(monkeypatch):
    threads, load = [], ImageFile.ImageFile.load

    def noted(image: Any) -> Any:
        if image.tile:
            threads.append(threading.current_thread().name)
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", noted)
    given = {"type": "image", "image": saved(picture("green", (16, 16)), "PNG")}
    assert converse(Shows(given, given, given), *sighted()).error is None
    assert threads == ["mt-grpo-decode"]


class Redraws:
    """Makes its images and sounds anew for each of three requests."""

    file = saved(picture("red", (16, 16)), "PNG")

    def __call__(self) -> Redraws:
        return self

    async def run(self, policy: Any, row: dict[str, Any]) -> Outcome:
        said: list[Any] = []
        for _ in range(3):
            images = [picture("green", (32, 16)), Image.open(io.BytesIO(self.file))]
            parts: list[Any] = [{"type": "image", "image": image, "alt": "a square"} for image in images]
            sound = Sound(np.ones(160, dtype=np.float32), 16_000)
            parts.append({"type": "audio", "audio": sound, "seconds": 0.01, "alt": "a tone"})
            given = {"role": "user", "content": parts}
            turn = await policy.reply([given, *said])
            said += [turn.message, {"role": "user", "content": "And now?"}]
        return Outcome()

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("sees", [True, False])
def test_images_made_anew_are_compared_in_a_thread(monkeypatch, sees):
    monkeypatch.setattr("mt_grpo.media.IN_CONVERSATION", IN_CONVERSATION._replace(number=3))
    shown = sighted() if sees else (ScriptedEngine(build_tokenizer(), lambda session, turn: "Fine."),)
    begin, looked = threading.get_ident(), []
    for name in ("tobytes", "__eq__"):
        method = getattr(Image.Image, name)

        def noted(self: Any, *others: Any, method: Any = method) -> Any:
            looked.append(threading.get_ident())
            return method(self, *others)

        monkeypatch.setattr(Image.Image, name, noted)
    trajectory = converse(Redraws(), *shown)
    assert trajectory.stop_reason is StopReason.ENV_DONE, trajectory.error
    assert [turn.fork_cause for turn in trajectory.turns] == [None] * 3
    assert begin not in looked and bool(looked) == sees


def test_requests_at_once_open_their_images_in_turn(monkeypatch):
    opening, release, opened = threading.Event(), threading.Event(), []

    def slowly(messages: Any, of_row: bool, known: Any) -> Any:
        opened.append(messages)
        opening.set()
        assert len(opened) > 1 or release.wait(60)
        return read_messages(messages, of_row, known)

    monkeypatch.setattr("mt_grpo.rollout.policy.read_messages", slowly)
    monkeypatch.setattr("mt_grpo.media.IN_CONVERSATION", IN_CONVERSATION._replace(number=1))
    first, second = saved(picture("green", (16, 16)), "PNG"), picture("red", (16, 16))

    class AtOnce(Shows):
        async def run(self, policy: Any, row: dict[str, Any]) -> Outcome:
            asked = [policy.opened([{"role": "user", "content": [{"type": "image", "image": image}]}])
                     for image in (first, second)]  # fmt: skip
            slow = asyncio.ensure_future(asked[0])
            await asyncio.to_thread(opening.wait, 60)
            quick = asyncio.ensure_future(asked[1])
            await asyncio.wait([quick], timeout=0.1)
            assert len(opened) == 1
            release.set()
            await slow
            with pytest.raises(MediumError, match="shows 2 images"):
                await quick
            return Outcome()

    engine = ScriptedEngine(build_tokenizer(), lambda session, turn: "Fine.")
    trajectory = converse(AtOnce(), engine)
    assert trajectory.stop_reason is StopReason.ENV_DONE, trajectory.error


def test_a_file_that_is_cut_off_fails_the_call_and_not_more():
    data = saved(Image.effect_noise((64, 64), 50), "PNG")[:900]
    result = read_result([{"type": "image", "image": data}], None)
    assert not is_decoded(result.parts[0]["image"])  # nobody is shown it
    trajectory = converse(Shows({"type": "image", "image": data}), *sighted())
    assert trajectory.error == "MediumError: An image of 64 by 64 pixels cannot be read as an image: it is broken."


def test_an_image_that_a_tool_left_cut_off_is_written_as_words(tmp_path):
    data = saved(Image.effect_noise((64, 64), 50), "PNG")[:900]
    trajectory = converse(Shows({"type": "image", "image": Image.open(io.BytesIO(data))}), *sighted())
    assert "it is broken" in trajectory.error
    trajectory.prompt = [{"role": "user", "content": [{"type": "image", "image": Image.open(io.BytesIO(data))}]}]
    lines = RunWriter(tmp_path).write(Batch("train", 0, 0, 1, [0], [trajectory]))
    assert [line["kind"] for line in lines] == ["file", "rollout"]


# Origins


@pytest.fixture
def private(tmp_path) -> Path:
    path = tmp_path / "private.png"
    path.write_bytes(to_file(picture("red", (16, 16))))
    return path


def test_text_is_a_path_in_rows_alone(private):
    [part] = read_parts([{"type": "image", "image": str(private)}], of_row=True)
    assert part["image"].size == (16, 16)
    shown = {"type": "image", "image": private}
    assert converse(Shows(shown), *sighted(), [{"role": "user", "content": [dict(part)]}]).error is None
    row = [{"role": "user", "content": [{"type": "image", "image": str(private)}, {"type": "text", "text": "What?"}]}]
    assert converse(Shows(shown), *sighted(), row).error is None
    assert read_result([shown], None).parts[0]["image"].size == (16, 16)


@pytest.mark.parametrize("key", ["image", "image_url", "input_image", "audio", "audio_url", "video"])
def test_text_that_a_tool_passes_on_opens_no_file(private, key):
    path: Any = [str(private)] if key == "video" else str(private)
    shapes = [{"type": key, key: path}]
    if key == "input_image":
        shapes = [{"type": key, "image_url": path}]
    elif key in ("image_url", "audio_url"):
        shapes.append({"type": key, key: {"url": path}})
    elif key in ("image", "audio"):
        shapes += [{"type": key, key: {"path": path}}, {"type": key, key: {"path": path, "bytes": None}}]
    for part in shapes:
        with pytest.raises(MediumError, match="is text, and only rows of a dataset name files by text"):
            read_result([part], None)
        trajectory = converse(Shows(part), *sighted())
        assert "is text, and only rows of a dataset name files by text" in trajectory.error


def test_a_part_that_a_tool_passes_on_asks_the_processor_nothing():
    data = to_file(picture("red", (16, 16)))
    small = {"type": "image", "image": data, "max_pixels": 64}
    assert read_result([small], None).parts[0]["max_pixels"] == 64
    asked = {"type": "image", "image": url(data), "alt": "a map", "min_pixels": 10**12}
    for part in (asked, {"type": "video", "video": [url(data)], "fps": 1, "min_pixels": 10**12}):
        with pytest.raises(MediumError, match="A part whose image is text has 'min_pixels' beside it"):
            read_result([part], None)
    del asked["min_pixels"]
    assert read_result([asked], None).text == "a map"
    assert read_parts([{**asked, "max_pixels": 64}], of_row=True)[0]["max_pixels"] == 64


def test_what_is_no_regular_file_is_one_sentence(private, tmp_path, monkeypatch):
    fifo, link = tmp_path / "fifo", tmp_path / "link.png"
    os.mkfifo(fifo)
    link.symlink_to(private)
    for path in (fifo, Path("/dev/zero"), tmp_path, link):
        for part in ({"type": "image", "image": path}, {"type": "audio", "audio": path}):
            with pytest.raises(MediumError, match="is no regular file: give the path of one, behind all links"):
                read_parts([part])
    for path in (fifo, "/dev/zero", str(tmp_path)):
        with pytest.raises(MediumError, match="is no regular file"):
            read_image(path, of_row=True)
    assert read_image(str(link), of_row=True).size == (16, 16)  # a cache of datasets is full of links
    monkeypatch.setattr("mt_grpo.media_files.MOST_BYTES", 20)
    for given in (private, url(private.read_bytes()), private.read_bytes()):
        with pytest.raises(MediumError, match="has more than 20 bytes, the most of a file"):
            read_image(given)
