"""Sounds as datasets, tools and requests give them: read, named by their content, written; refused in one sentence."""

import base64
import io
import pickle
import struct
import sys
import wave
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from mt_grpo.media import IN_MESSAGE, MediumError, digest, is_decoded, media_to_digests, part_text, read_parts, to_file
from mt_grpo.sounds import MOST_BYTES, Sound, _read_sound, read_part

TONE = np.sin(np.arange(160) / 5).astype(np.float32) / 2


@pytest.fixture(autouse=True)
def no_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)


def wav(samples: np.ndarray, width: int = 2, channels: int = 1, rate: int = 16_000) -> bytes:
    """A file as Python's own library writes it."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((channels, width, rate, 0, "NONE", ""))
        scaled = np.repeat(samples[:, None], channels, 1).reshape(-1) * (2.0 ** (8 * width - 1) - 1)
        whole = (scaled + (128 if width == 1 else 0)).astype("<i8")
        writer.writeframes(b"".join(int(each).to_bytes(8, "little", signed=True)[:width] for each in whole))
    return file.getvalue()


def header(length: int, channels: int = 1, rate: int = 16_000) -> bytes:
    """A WAV file with `length` bytes of silence."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, channels, rate, 0, 0, 16)
    return b"RIFF\0\0\0\0WAVE" + form + struct.pack("<4sI", b"data", length) + bytes(length)


def test_arrays_have_the_rate_that_is_said_with_them():
    assert _read_sound(TONE).rate is None
    assert _read_sound({"array": TONE, "sampling_rate": 8_000, "path": None}).rate == 8_000
    part = read_part({"type": "audio", "audio": TONE.tolist(), "sampling_rate": 160})
    assert part == {"type": "audio", "audio": Sound(TONE, 160), "seconds": 1.0}
    assert _read_sound(torch.from_numpy(TONE)) == Sound(TONE) == _read_sound(TONE.astype(np.float64))
    assert _read_sound((TONE * 32768).astype(np.int16)).samples == pytest.approx(TONE, abs=1e-4)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_files_are_read_and_their_channels_averaged(tmp_path, width, channels):
    path, data = tmp_path / "tone.wav", wav(TONE, width, channels)
    path.write_bytes(data)
    url = "data:audio/wav;base64," + base64.b64encode(data).decode()
    for given in (path, str(path), data, {"bytes": data}, {"bytes": None, "path": str(path)}, url):
        sound = _read_sound(given, of_row=True)
        assert sound.rate == 16_000
        assert sound.samples == pytest.approx(TONE, abs=2.0 ** (2 - 8 * min(width, 3)))


def test_what_a_run_writes_is_read_again_when_it_is_looked_at():
    sound = Sound(TONE, 24_000)
    again = _read_sound(to_file(sound))
    same = pickle.loads(pickle.dumps(again))
    assert (again.seconds, is_decoded(again), is_decoded(same)) == (160 / 24_000, False, False)
    assert to_file(again) == to_file(sound) and again == sound == same
    assert digest(sound) == digest(again) != digest(Sound(TONE, 16_000))
    assert again.samples == pytest.approx(TONE) and is_decoded(again)


def test_a_file_of_many_chunks_that_was_cut_off_is_read():
    data = to_file(Sound(TONE, 8_000))
    extended = data[:12] + struct.pack("<4sI", b"LIST", 3) + b"abc\0" + data[12:-3]
    assert _read_sound(extended).samples.tolist() == TONE[:-1].tolist()


def test_parts_of_all_forms_become_one():
    data = base64.b64encode(wav(TONE)).decode()
    url = f"data:audio/wav;base64,{data}"
    expected = read_part({"type": "audio", "audio": wav(TONE)})
    forms = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": url}},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "audio", "base64": data, "audio": None},
        {"type": "audio", "url": url},
        expected["audio"],
    ]
    assert read_parts(forms) == [expected] * len(forms)
    named = {**expected, "alt": "a tone", "gain": 2}
    assert read_parts([named]) == [named]
    assert (part_text(expected), part_text(named)) == ("[sound of 0.0 s]", "a tone")


def test_a_decoder_of_torchcodec_is_read(monkeypatch):
    class AudioDecoder:
        metadata = SimpleNamespace(duration_seconds=0.02, sample_rate=None)

        def get_all_samples(self):
            return SimpleNamespace(data=torch.from_numpy(np.stack([TONE, TONE])), sample_rate=8_000)

    module = ModuleType("torchcodec.decoders")
    module.AudioDecoder = AudioDecoder
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", module)
    sound = Sound(TONE, 8_000)
    assert _read_sound(AudioDecoder()) == sound
    assert media_to_digests({"audio": [AudioDecoder(), sound]}) == {"audio": [digest(sound)] * 2}


def test_a_few_other_files_are_read_with_soundfile(monkeypatch):
    opened = []

    class LibsndfileError(RuntimeError):
        pass

    class SoundFile:
        frames, channels, samplerate = len(TONE), 2, 8_000

        def __init__(self, file):
            opened.append(file.read())
            if not opened[-1].endswith(b"fLaC"):
                raise LibsndfileError("unknown format")

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def read(self, frames, dtype, always_2d):
            return np.stack([TONE, TONE], axis=1)[:frames]

    library = SimpleNamespace(SoundFile=SoundFile, LibsndfileError=LibsndfileError)
    monkeypatch.setitem(sys.modules, "soundfile", library)
    tag = b"ID3\4\0\0\0\0\0\2ab"
    assert _read_sound(b"fLaC") == Sound(TONE, 8_000) == _read_sound(tag + b"fLaC")
    with pytest.raises(MediumError, match="A sound of 5 bytes cannot be read as a sound: it is broken, or of no "):
        _read_sound(b"OggS.")
    opened.clear()
    for other in (b"abc", b"FORM....AIFF", b"MATLAB 5.0", tag + b"FORM....AIFF", b"ID3"):
        with pytest.raises(MediumError, match=r"of no known kind \(WAV, FLAC, Ogg, MP3\)"):
            _read_sound(other)
    assert not opened


def test_arrays_of_rows_are_named_by_their_content():
    assert media_to_digests(TONE) == media_to_digests(TONE.copy()) != media_to_digests(TONE[:-1])
    assert media_to_digests({"empty": np.empty(0), "text": "a"})["text"] == "a"
    sound = Sound(TONE)
    assert not (TONE == sound) and not (sound == TONE) and sound == Sound(TONE.copy())  # one answer
    assert [{"audio": TONE}] != [{"audio": sound}]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("/no/such.wav", "The sound '/no/such.wav' cannot be read: No such file or directory"),
        ("https://example.org/a.wav", "is an address, which rollouts do not fetch: give a file or its bytes"),
        (b"fLaC....", "A sound of 8 bytes is no WAV file, and what reads others is not installed: `pip install sou"),
        (wav(TONE)[:30], "A sound of 30 bytes cannot be read as a sound: it ends within its header"),
        (b"RIFF\0\0\0\0WAVE", "A sound of 12 bytes cannot be read as a sound: it has no samples"),
        (wav(TONE).replace(b"\x01\x00\x01\x00", b"\x07\x00\x01\x00", 1), "samples are of format 7 with 16 bits"),
        (wav(TONE[:0]), "A sound has no samples: leave it out"),
        (np.empty(0), "A sound has no samples: leave it out"),
        (np.stack([TONE, TONE]), r"one row of samples, and this one is an array of shape \(2, 160\): average its"),
        (np.full(3, np.nan), "A sound has samples that are not finite numbers"),
        ({"array": TONE, "sampling_rate": 0.5}, "A sound has 0.5 samples per second: give a whole number above 0"),
        ([TONE, TONE[:3]], "A value of list is no sound"),
        (torch.zeros(3, requires_grad=True), "A value of Parameter is no sound|A value of Tensor is no sound"),
        (7, "A value of int is no sound: give an array of samples, a path, or the bytes of a file"),
        ({}, "A value of NoneType is no sound"),
        ("data:audio/wav;base64,!!", "cannot be read: it is no base64"),
        (header(4_000, channels=33), "has 33 channels, and 32 are the most"),
        (header(20_000, rate=2), "A sound is 5,000 s long, and 3,600 s are the most: give a part of it"),
        (header(MOST_BYTES), "has more than 67,108,864 bytes, the most of a file"),
        *[(header(200, rate=rate), f"A sound has {rate} samples per second") for rate in (0, 2**32 - 1)],
        (np.zeros(IN_MESSAGE.values + 1, np.int8), "A sound is 4,194 s long|67,108,865 pixels and samples"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_is_no_sound_is_one_sentence(given, problem):
    with pytest.raises(MediumError, match=problem) as raised:
        _read_sound(given, of_row=True)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "audio"}, "A message has a place for a sound and no sound"),
        ({"type": "audio", "audio": TONE, "path": "a.wav"}, "A message has a sound under 'audio' and 'path'"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "A sound of type 'input_audio' has no `data`"),
        ({"type": "input_audio", "input_audio": {"data": "?"}}, "A sound of type 'input_audio' cannot be read: it is"),
    ],
)
def test_a_part_without_one_sound_is_one_sentence(part, problem):
    with pytest.raises(MediumError, match=problem):
        read_part(part)
