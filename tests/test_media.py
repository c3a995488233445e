"""Images and sounds of strangers: of few formats, bounded before they are decoded, and no files of this machine."""

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
from zlib import compress, crc32

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
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams
from mt_grpo.rollout.engines import ScriptedEngine
from mt_grpo.rollout.escaped_text import MediaEncoder
from mt_grpo.runlog.writer import Batch, RunWriter
from mt_grpo.sounds import Sound
from mt_grpo.tools.function import _read_result
from mt_grpo.tools.mcp import _result_parts
from mt_grpo.trajectory import StopReason, Trajectory

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
GREEN = picture("green", (16, 16))


def part(image: Any, **options: Any) -> dict[str, Any]:
    return {"type": "image", "image": image, **options}


def saved(image: Any, kind: str = "PNG") -> bytes:
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
    return _result_parts([SimpleNamespace(type="image", data=base64.b64encode(data).decode())])


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


# Formats


def test_no_image_starts_a_program(ghostscript):
    for read in (
        lambda: read_image(EPS),
        lambda: read_image(url(EPS)),
        lambda: from_server(EPS),
        lambda: _read_result([part(EPS)], None),
        lambda: _read_result(opened(EPS), None),
        lambda: read_parts([{"type": "video", "video": [opened(EPS)]}]),
    ):
        with pytest.raises(MediumError):
            read()
    assert not ghostscript.exists()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "MPO"])
def test_images_of_these_formats_are_read(kind):
    data = saved(GREEN, kind)
    image = read_image(data)
    assert (image.size, is_decoded(image), to_file(image)) == ((16, 16), False, data)
    for same in (copy.deepcopy(image), pickle.loads(pickle.dumps(image)), image):
        assert not is_decoded(same) and digest(same) == digest(image)
        [shown] = _read_result(same, None).parts
        assert shown["image"].tobytes() == opened(data).tobytes()


@pytest.mark.parametrize("kind", ["TIFF", "BMP", "PPM", "ICO"])
def test_an_image_of_another_format_is_one_sentence(kind):
    data = saved(GREEN, kind)
    with pytest.raises(MediumError, match=r"cannot be read .* no known kind \(PNG, JPEG, WEBP, GIF\); save"):
        read_image(data)
    loaded = opened(data)
    loaded.load()  # by the user's own code
    assert read_image(loaded) is loaded


# Sizes


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [9_000, 13_000, 20_000])
def test_an_image_of_too_many_pixels_is_never_decoded(monkeypatch, side):
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("it was decoded"))
    with pytest.raises(MediumError, match=r"An image of \d+ bytes has .* pixels"):
        read_image(large(side, side))


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
def test_the_words_of_an_image_are_not_unpacked(kind):
    packed = compress(bytes(900_000))
    body = b"word\0" + (b"\1\0\0\0" if kind == b"iTXt" else b"\0") + packed
    chunk = struct.pack(">I", len(body)) + kind + body + struct.pack(">I", crc32(kind + body))
    file = saved(GREEN)
    image = read_image(file[:33] + 40 * chunk + file[33:])
    assert not image.info
    assert (read_image(to_file(image)).tobytes(), to_file(image)) == (GREEN.tobytes(), file)


def test_the_images_of_a_message_are_bounded_together():
    data = large(5_000, 5_000)
    assert len(read_parts([part(data)] * 2)) == 2
    with pytest.raises(
        MediumError, match="A message shows images and sounds of 75,000,000 pixels and samples, and 67"
    ):
        read_parts([part(data), {"type": "video", "video": [data, data]}])
    with pytest.raises(MediumError, match="A message shows 1,025 images, frames and sounds, and 1,024 are the most"):
        read_parts([part(large(1, 1))] * (IN_MESSAGE.number + 1))


# In conversations


class Shows:
    """Shows what it is given, one after another, and asks after each."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    async def run(self, policy: Any, row: dict[str, Any]) -> Outcome:
        messages = list(row["prompt"]) if isinstance(row["prompt"], list) else []
        for part in self.parts:
            messages.append({"role": "user", "content": [part, {"type": "text", "text": "And now?"}]})
            messages.append((await policy.reply(messages)).message)
        return Outcome()

    async def close(self) -> None:
        pass


def model_of(sees: bool = True) -> tuple[ScriptedEngine, MediaEncoder | None]:
    """One that sees, or one of text."""
    processor = build_processor() if sees else None
    kind, tokenizer = (ScriptedSight, processor.tokenizer) if sees else (ScriptedEngine, build_tokenizer())
    return kind(tokenizer, lambda session, turn: "Fine."), MediaEncoder(processor) if sees else None


def converse(env: Any, model: Any = None, prompt: Any = "What?") -> Trajectory:
    engine, encoder = model or model_of()
    runner = RolloutRunner(lambda: env, engine, media=encoder)
    trajectory = asyncio.run(runner.run([RolloutRequest(prompt, "a", {}, 0)], SamplingParams()))[0]
    assert (trajectory.stop_reason is StopReason.ENV_DONE) == (trajectory.error is None)
    return trajectory


@pytest.fixture
def bound(monkeypatch):
    """Sets the most of a conversation."""
    return lambda **most: monkeypatch.setattr("mt_grpo.media.IN_CONVERSATION", IN_CONVERSATION._replace(**most))


def test_the_images_of_a_conversation_are_bounded_together(bound):
    bound(values=1_000)
    parts = [part(picture(color, (16, 16))) for color in ("red", "green", "blue", "white")]
    assert converse(Shows(parts[0], *parts[:3])).error is None
    trajectory = converse(Shows(*parts))
    assert "A conversation shows images and sounds of 1,024 pixels and samples, and 1,000" in trajectory.error
    assert len(trajectory.turns) == 3


def test_a_model_of_text_has_no_image_decoded():
    [shown] = from_server(saved(GREEN, "JPEG"))
    assert converse(Shows(shown, shown), model_of(sees=False)).error is None
    assert not is_decoded(shown["image"])
    assert not is_decoded(_read_result([shown], None).parts[0]["image"])


def test_results_name_no_place_in_memory():
    result = _read_result(["here", picture()], None)
    assert result.text == "here\n[image]" and [part["type"] for part in result.parts] == ["text", "image"]
    assert _read_result({"board": picture()}, None).text == '{"board": "[image]"}'


def test_images_are_decoded_in_a_thread_and_once(monkeypatch):
    threads, load = [], ImageFile.ImageFile.load

    def noted(image: Any) -> Any:
        if image.tile:
            threads.append(threading.current_thread().name)
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", noted)
    assert converse(Shows(*[part(saved(GREEN))] * 3)).error is None
    assert threads == ["mt-grpo-decode"]


class Redraws(Shows):
    """Makes its images and sounds anew for each of three requests."""

    file = saved(picture("red", (16, 16)))

    async def run(self, policy: Any, row: dict[str, Any]) -> Outcome:
        said: list[Any] = []
        for _ in range(3):
            parts = [part(image, alt="a square") for image in (picture("green", (32, 16)), opened(self.file))]
            sound = Sound(np.ones(160, dtype=np.float32), 16_000)
            parts.append({"type": "audio", "audio": sound, "seconds": 0.01, "alt": "a tone"})
            turn = await policy.reply([{"role": "user", "content": parts}, *said])
            said += [turn.message, {"role": "user", "content": "And now?"}]
        return Outcome()


@pytest.mark.parametrize("sees", [True, False])
def test_images_made_anew_are_compared_in_a_thread(monkeypatch, bound, sees):
    bound(number=3)
    model = model_of(sees)
    begin, looked = threading.get_ident(), []
    for name in ("tobytes", "__eq__"):
        method = getattr(Image.Image, name)

        def noted(self: Any, *others: Any, method: Any = method) -> Any:
            looked.append(threading.get_ident())
            return method(self, *others)

        monkeypatch.setattr(Image.Image, name, noted)
    trajectory = converse(Redraws(), model)
    assert trajectory.error is None and [turn.fork_cause for turn in trajectory.turns] == [None] * 3
    assert begin not in looked and bool(looked) == sees


def test_requests_at_once_open_their_images_in_turn(monkeypatch, bound):
    opening, release, read = threading.Event(), threading.Event(), []

    def slowly(messages: Any, of_row: bool, known: Any) -> Any:
        read.append(messages)
        opening.set()
        assert len(read) > 1 or release.wait(60)
        return read_messages(messages, of_row, known)

    class AtOnce(Shows):
        async def run(self, policy: Any, row: dict[str, Any]) -> Outcome:
            first, second = (policy.opened([{"role": "user", "content": [part(image)]}]) for image in self.parts)
            slow = asyncio.ensure_future(first)
            await asyncio.to_thread(opening.wait, 60)
            quick = asyncio.ensure_future(second)
            await asyncio.wait([quick], timeout=0.1)
            assert len(read) == 1
            release.set()
            await slow
            with pytest.raises(MediumError, match="shows 2 images"):
                await quick
            return Outcome()

    monkeypatch.setattr("mt_grpo.rollout.policy.read_messages", slowly)
    bound(number=1)
    assert converse(AtOnce(saved(GREEN), saved(picture("red", (16, 16)))), model_of(sees=False)).error is None


CUT_OFF = saved(Image.effect_noise((64, 64), 50))[:900]


def test_a_file_that_is_cut_off_fails_the_call_and_not_more(tmp_path):
    assert not is_decoded(_read_result([part(CUT_OFF)], None).parts[0]["image"])  # nobody is shown it
    trajectory = converse(Shows(part(CUT_OFF)))
    assert trajectory.error == "MediumError: An image of 64 by 64 pixels cannot be read as an image: it is broken."
    trajectory = converse(Shows(part(opened(CUT_OFF))))
    assert "it is broken" in trajectory.error
    trajectory.prompt = [{"role": "user", "content": [part(opened(CUT_OFF))]}]
    lines = RunWriter(tmp_path).write(Batch("train", 0, 0, 1, [0], [trajectory]))
    assert [line["kind"] for line in lines] == ["file", "rollout"]  # it is written as words


# Origins


@pytest.fixture
def private(tmp_path) -> Path:
    path = tmp_path / "private.png"
    path.write_bytes(to_file(picture("red", (16, 16))))
    return path


def test_text_is_a_path_in_rows_alone(private):
    [read] = read_parts([part(str(private))], of_row=True)
    assert read["image"].size == (16, 16)
    for shown in (read, part(str(private))):
        prompt = [{"role": "user", "content": [shown, {"type": "text", "text": "What?"}]}]
        assert converse(Shows(part(private)), prompt=prompt).error is None
    assert _read_result([part(private)], None).parts[0]["image"].size == (16, 16)


@pytest.mark.parametrize("key", ["image", "image_url", "input_image", "audio", "audio_url", "video"])
def test_text_that_a_tool_passes_on_opens_no_file(private, key):
    path: Any = [str(private)] if key == "video" else str(private)
    shapes = [{"type": key, "image_url" if key == "input_image" else key: path}]
    if key.endswith("_url"):
        shapes.append({"type": key, key: {"url": path}})
    elif key in ("image", "audio"):
        shapes += [{"type": key, key: {"path": path}}, {"type": key, key: {"path": path, "bytes": None}}]
    for shape in shapes:
        with pytest.raises(MediumError, match="is text, and only rows of a dataset name files by text"):
            _read_result([shape], None)
        assert "is text, and only rows of a dataset name files by text" in converse(Shows(shape)).error


def test_a_part_that_a_tool_passes_on_asks_the_processor_nothing():
    data = to_file(picture("red", (16, 16)))
    assert _read_result([part(data, max_pixels=64)], None).parts[0]["max_pixels"] == 64
    asked = part(url(data), alt="a map")
    for given in (asked, {"type": "video", "video": [url(data)], "fps": 1}):
        with pytest.raises(MediumError, match="A part whose image is text has 'min_pixels' beside it"):
            _read_result([{**given, "min_pixels": 10**12}], None)
    assert _read_result([asked], None).text == "a map"
    assert read_parts([{**asked, "max_pixels": 64}], of_row=True)[0]["max_pixels"] == 64


def test_what_is_no_regular_file_is_one_sentence(private, tmp_path, monkeypatch):
    fifo, link = tmp_path / "fifo", tmp_path / "link.png"
    os.mkfifo(fifo)
    link.symlink_to(private)
    for path in (fifo, Path("/dev/zero"), tmp_path, link):
        for given in (part(path), {"type": "audio", "audio": path}):
            with pytest.raises(MediumError, match="is no regular file: give the path of one, behind all links"):
                read_parts([given])
    for path in (fifo, "/dev/zero", str(tmp_path)):
        with pytest.raises(MediumError, match="is no regular file"):
            read_image(path, of_row=True)
    assert read_image(str(link), of_row=True).size == (16, 16)  # a cache of datasets is full of links
    monkeypatch.setattr("mt_grpo.sounds.MOST_BYTES", 20)
    for given in (private, url(private.read_bytes()), private.read_bytes()):
        with pytest.raises(MediumError, match="has more than 20 bytes, the most of a file"):
            read_image(given)


@pytest.mark.parametrize(
    ("video", "problem"),
    [
        ("film.mp4", "Give a video as a list of images; got .*decode it first"),
        (["film.png"], "The image 'film.png' cannot be read: No such file"),
    ],
)
def test_a_video_that_is_no_list_of_frames_is_one_sentence(video, problem):
    with pytest.raises(MediumError, match=problem):
        read_parts([{"type": "video", "video": video}], of_row=True)
