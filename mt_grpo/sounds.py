"""
Files of media: their bytes, bounded, behind no links, and fetched from nowhere; bounds of what may be shown. And
sounds in messages: read from what datasets, tools and requests have, named by their content, written as WAV.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import re
import stat
import struct
import sys
from collections.abc import Collection
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

from mt_grpo.errors import UserError

if TYPE_CHECKING:
    import numpy as np

MOST_BYTES = 64 << 20
"""Bytes of one file."""


class MediumError(UserError, ValueError):
    """Something that is shown as an image or played as a sound, and is none. The message is one sentence."""


class _Bounds(NamedTuple):
    """How much may be shown together, whatever the files' sizes: a few bytes may be an image of any size."""

    where: str
    number: int
    """Images, frames of videos, and sounds."""
    values: int
    """Their pixels and samples."""

    def check(self, sizes: Collection[int]) -> None:
        """Refuses too many, or too large ones."""
        if len(sizes) > self.number:
            raise MediumError(
                f"{self.where} shows {len(sizes):,} images, frames and sounds, and {self.number:,} are the most: show "
                "fewer."
            )
        if sum(sizes) > self.values:
            raise MediumError(
                f"{self.where} shows images and sounds of {sum(sizes):,} pixels and samples, and {self.values:,} are "
                "the most: show smaller ones, or fewer."
            )


IN_MESSAGE = _Bounds("A message", 1 << 10, 1 << 26)
IN_CONVERSATION = _Bounds("A conversation", 1 << 12, 1 << 28)


def file_of(value: Any, name: str, of_row: bool) -> bytes:
    """The bytes of an image's or sound's file."""
    if isinstance(value, str) and value.startswith("data:"):
        return decoded(value.partition(",")[2], name)
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        raise MediumError(f"{name} is an address, which rollouts do not fetch: give a file or its bytes.")
    if isinstance(value, str) and not of_row:
        raise MediumError(
            f"{name} is text, and only rows of a dataset name files by text: give the bytes, or `pathlib.Path(...)`."
        )
    data = _read(value, name, of_row) if isinstance(value, (str, os.PathLike)) else bytes(value)
    _check_bytes(len(data), name)
    return data


def file_name(value: object, kind: str) -> str:
    """How errors name the file of an image or a sound."""
    if isinstance(value, dict):
        value = value.get("path") or value.get("bytes") or value
    if isinstance(value, (bytes, bytearray)):
        return f"{'An' if kind == 'image' else 'A'} {kind} of {len(value)} bytes"
    text = str(value)
    return f"The {kind} {text[:60] + '…' if len(text) > 60 else text!r}"


def decoded(text: str, name: str) -> bytes:
    """The bytes of a file in base64; raises `MediumError` as `file_of` does."""
    _check_bytes((len(text) - 4) * 3 // 4, name)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediumError(f"{name} cannot be read: it is no base64.") from error


def _check_bytes(number: int, name: str) -> None:
    if number > MOST_BYTES:
        raise MediumError(f"{name} has more than {MOST_BYTES:,} bytes, the most of a file: give a smaller one.")


def _read(path: str | os.PathLike[str], name: str, of_row: bool) -> bytes:
    """At most one byte more of a file than `MOST_BYTES`."""
    try:
        if stat.S_ISREG(os.stat(path, follow_symlinks=of_row).st_mode):  # to open a device may do something
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if of_row else os.O_NOFOLLOW))
            with open(opened, "rb") as file:
                if stat.S_ISREG(os.fstat(opened).st_mode):
                    return file.read(MOST_BYTES + 1) or b""
    except (OSError, ValueError) as error:  # the second: a path with a NUL
        reason = error.strerror if isinstance(error, OSError) else None
        raise MediumError(f"{name} cannot be read: {reason or error}.") from error
    raise MediumError(f"{name} is no regular file: give the path of one, behind all links.")


TYPES = ("audio", "input_audio", "audio_url")
"""Types of parts that play a sound: of chat templates, of OpenAI's interface, and of vLLM's."""

_GIVEN = ("audio", "input_audio", "audio_url", "url", "path", "base64")
"""Keys of such a part under which the sound may stand."""

_COMPRESSED = re.compile(rb"fLaC|OggS|\xff[\xe2-\xff]")
"""How FLAC, Ogg and MP3 begin. What soundfile is a wrapper of has twenty more readers, which are little tested."""

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_UNKNOWN_RATE = 16_000  # the rate that is written for a sound of which none is known: that of nearly all models


MOST_CHANNELS = 32
MOST_RATE = 2**30
"""Samples per second of which a WAV file has no bytes per second any more."""
MOST_SECONDS = 3600.0
"""How long one sound may be."""


class Sound:
    """
    A sound of one channel. One from a file is decoded when its samples are first asked for.

    Args:
        samples (`np.ndarray`): `(N,)` float32, between -1 and 1.
        rate (`int`, *optional*): Samples per second. Unset, they are taken to be as many as the model's processor
            wants, which is what transformers takes an array for.
    """

    __array_ufunc__ = None  # an array that is compared with a sound asks the sound, and gets one answer

    def __init__(self, samples: np.ndarray, rate: int | None = None) -> None:
        self.rate, self.length = rate, len(samples)
        self._samples: np.ndarray | None = samples
        self.file: bytes | None = None
        """The file of one that is not decoded."""
        self.digest: str | None = None
        """See `mt_grpo.media.digest`; unset where nobody has asked for it."""

    @classmethod
    def of_file(cls, file: bytes, name: str) -> Sound:
        """A sound that is not decoded yet; errors call its file `name`."""
        frames, channels, rate = _header(file, name)
        if channels > MOST_CHANNELS:
            raise MediumError(f"{name} has {channels} channels, and {MOST_CHANNELS} are the most: average them.")
        _check_length(frames, rate)
        IN_MESSAGE.check([frames * channels])
        sound = cls.__new__(cls)
        sound.rate, sound.length, sound._samples, sound.file = rate, frames, None, file
        sound.digest = digest_of(file)
        return sound

    @property
    def samples(self) -> np.ndarray:
        """`(N,)` float32; raises `MediumError` if its file is broken."""
        file = self.file
        if file is not None:
            self._samples = samples = _checked(_decoded(file), self.rate).samples
            self.digest = _digest_of(samples, self.rate)
            self.file = None  # after the others are there: another thread may ask
        assert self._samples is not None
        return self._samples

    def content_digest(self) -> str:
        """Its digest, which is found if nobody has asked for it."""
        return self.digest or _digest_of(self.samples, self.rate)

    def to_wav(self) -> bytes:
        """The bytes of a WAV file of float32, from which `_read_sound` reads the same samples."""
        rate, body = self.rate or _UNKNOWN_RATE, self.samples.tobytes()
        form = struct.pack("<4sIHHIIHH", b"fmt ", 16, _FLOAT, 1, rate, 4 * rate, 4, 32)
        chunks = b"WAVE" + form + struct.pack("<4sI", b"data", len(body)) + body
        return struct.pack("<4sI", b"RIFF", len(chunks)) + chunks

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.length / (self.rate or _UNKNOWN_RATE)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sound) or self.rate != other.rate:
            return False
        if self is other or (self.file is not None and self.file == other.file):
            return True
        return self.samples.tobytes() == other.samples.tobytes()

    def __hash__(self) -> int:
        return hash((self.rate, self.length))

    def __repr__(self) -> str:
        return f"Sound({self.seconds:.2f} s)"


def read_part(part: dict[str, Any], of_row: bool = False) -> dict[str, Any]:
    """A part with a `Sound` as chat templates take it, with its `seconds`; its other keys stay."""
    found = [(key, part[key]) for key in _GIVEN if part.get(key) is not None]
    if len(found) != 1:
        keys = " and ".join(repr(key) for key, _ in found)
        raise MediumError(
            f"A message has a sound under {keys}: give it once, as `audio`."
            if found
            else "A message has a place for a sound and no sound: give it in the part itself, as `audio`."
        )
    ((key, value),) = found
    rate = part.get("sampling_rate")
    if key == "input_audio":
        if not isinstance(value, dict) or not isinstance(value.get("data"), str):
            raise MediumError("A sound of type 'input_audio' has no `data`: give the file there, in base64.")
        value = decoded(value["data"].rpartition("base64,")[2], "A sound of type 'input_audio'")
    elif key == "base64" and isinstance(value, str):
        value = decoded(value, "A sound under 'base64'")
    elif key == "audio_url" and isinstance(value, dict):
        value = value.get("url")
    sound = _read_sound(value, rate, of_row)
    rest = {name: each for name, each in part.items() if name not in (*_GIVEN, "type", "sampling_rate", "seconds")}
    return {"type": "audio", "audio": sound, "seconds": round(sound.seconds, 3), **rest}


def _read_sound(value: Any, rate: int | None = None, of_row: bool = False) -> Sound:
    """A `Sound` of an array, a decoder of torchcodec's, a path, bytes or a `data:` URL, alone or in a dictionary."""
    if isinstance(value, Sound):
        return value
    if _is_decoder(value):
        told = value.metadata  # what it cannot tell is `None`
        if told.duration_seconds and told.sample_rate:
            _check_length(told.duration_seconds * told.sample_rate, told.sample_rate)
        played = value.get_all_samples()
        return _checked(played.data.numpy().mean(axis=0), played.sample_rate)
    if isinstance(value, dict) and value.get("array") is not None:
        return _read_sound(value["array"], value.get("sampling_rate") or rate)
    if isinstance(value, dict):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, (bytes, bytearray, str, os.PathLike)):
        name = file_name(value, "sound")
        return Sound.of_file(file_of(value, name, of_row), name)
    import numpy as np

    try:
        samples = np.asarray(value)
    except (ValueError, TypeError, RuntimeError):  # lists of several lengths; a tensor of a GPU, or with a gradient
        samples = np.empty(0, dtype=object)
    if samples.dtype.kind not in "iuf" or not samples.ndim:
        raise MediumError(
            f"A value of {type(value).__name__} is no sound: give an array of samples, a path, or the bytes of a file."
        )
    return _checked(samples, rate)


def _is_decoder(value: object) -> bool:
    """Whether a value is a decoder of torchcodec's. Where nobody has imported torchcodec, nothing is."""
    torchcodec = sys.modules.get("torchcodec.decoders")
    return torchcodec is not None and isinstance(value, torchcodec.AudioDecoder)


def is_wav(data: bytes) -> bool:
    """Whether the bytes of a file are a WAV file's, which is read without any library."""
    return data[:4] == b"RIFF" and data[8:12] == b"WAVE"


def _header(file: bytes, name: str) -> tuple[int, int, int]:
    """Samples per channel, channels, and samples per second of a file, which is not decoded."""
    if is_wav(file):
        try:
            wav = _read_wav(file)
        except (struct.error, ValueError) as error:
            reason = error if isinstance(error, ValueError) else "it ends within its header"
            raise MediumError(f"{name} cannot be read as a sound: {reason}.") from error
        return len(wav.body) // (wav.channels * wav.bits // 8), wav.channels, wav.rate
    if not _COMPRESSED.match(file, _tags_end(file)):
        raise _broken(name)
    try:
        import soundfile  # type: ignore[import-not-found]
    except ImportError:
        raise MediumError(
            f"{name} is no WAV file, and what reads others is not installed: `pip install soundfile`, or give samples."
        ) from None
    try:
        with soundfile.SoundFile(io.BytesIO(file)) as opened:
            return opened.frames, opened.channels, opened.samplerate
    except (soundfile.LibsndfileError, RuntimeError) as error:
        raise _broken(name) from error


def _broken(name: str) -> MediumError:
    return MediumError(f"{name} cannot be read as a sound: it is broken, or of no known kind (WAV, FLAC, Ogg, MP3).")


def _tags_end(file: bytes) -> int:
    """Where the ID3 tags before a sound end."""
    end = 0
    while file[end : end + 3] == b"ID3" and len(file) >= end + 10:
        size = 0
        for byte in file[end + 6 : end + 10]:
            size = size << 7 | byte & 0x7F
        end += 10 + size
    return end


def _decoded(file: bytes) -> np.ndarray:
    """The samples of a file whose header was read, its channels averaged."""
    if is_wav(file):
        return _read_wav(file).samples()
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(file)) as opened:
            # a header may promise less than the file has
            return opened.read(opened.frames, dtype="float32", always_2d=True).mean(axis=1)
    except (soundfile.LibsndfileError, RuntimeError) as error:
        raise _broken(f"A sound of {len(file)} bytes") from error


class _Wav(NamedTuple):
    """What a WAV file holds."""

    kind: int
    channels: int
    rate: int
    bits: int
    body: memoryview

    def samples(self) -> np.ndarray:
        """Its samples, its channels averaged."""
        import numpy as np

        if self.kind == _FLOAT:
            samples = np.frombuffer(self.body, f"<f{self.bits // 8}")
        elif self.bits == 24:
            parts = np.frombuffer(self.body, np.uint8).reshape(-1, 3)
            samples = np.pad(parts, ((0, 0), (1, 0))).reshape(-1).view("<i4")
        else:
            samples = np.frombuffer(self.body, "u1" if self.bits == 8 else f"<i{self.bits // 8}")
        return _scaled(samples).reshape(-1, self.channels).mean(axis=1)


def _read_wav(file: bytes) -> _Wav:
    """The header of a WAV file; raises `struct.error` or `ValueError` if it is none."""
    data = memoryview(file)
    kind = channels = rate = bits = 0
    begin = 12
    while begin + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, begin)
        body = data[begin + 8 : begin + 8 + size]
        begin += 8 + size + size % 2
        if name == b"fmt ":
            kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", body)
            if kind == _EXTENSIBLE:
                (kind,) = struct.unpack_from("<H", body, 24)
        if name != b"data" or not kind:
            continue
        if kind not in (_PCM, _FLOAT) or bits not in ((8, 16, 24, 32) if kind == _PCM else (32, 64)) or not channels:
            raise ValueError(f"its samples are of format {kind} with {bits} bits, and not plain numbers")
        frame = channels * bits // 8
        # a file that was cut off ends within a sample
        return _Wav(kind, channels, rate, bits, body[: len(body) // frame * frame])
    raise ValueError("it has no samples")


def _check_length(length: float, rate: object) -> None:
    """Refuses a sound without samples, of too many samples or seconds, or of a rate that is none."""
    if not length:
        raise MediumError("A sound has no samples: leave it out.")
    if rate is not None and (
        isinstance(rate, bool) or not isinstance(rate, Integral) or not 0 < int(rate) < MOST_RATE
    ):
        raise MediumError(
            f"A sound has {rate!r} samples per second: give a whole number above 0, and below {MOST_RATE:,}, as "
            "`sampling_rate`."
        )
    seconds = length / int(rate or _UNKNOWN_RATE)
    if seconds > MOST_SECONDS:
        raise MediumError(
            f"A sound is {seconds:,.0f} s long, and {MOST_SECONDS:,.0f} s are the most: give a part of it."
        )
    IN_MESSAGE.check([int(length)])


def _scaled(samples: np.ndarray) -> np.ndarray:
    """Samples between -1 and 1, as float32: whole numbers are divided by their type's largest."""
    if samples.dtype.kind == "f":
        return samples.astype("float32")
    size = 2.0 ** (8 * samples.dtype.itemsize - 1)
    exact = samples.astype("float32" if samples.dtype.itemsize < 4 else "float64")
    return ((exact - size * (samples.dtype.kind == "u")) / size).astype("float32", copy=False)


def _checked(samples: np.ndarray, rate: Any) -> Sound:
    import numpy as np

    if samples.ndim != 1:
        raise MediumError(
            f"A sound is one row of samples, and this one is an array of shape {samples.shape}: average its channels."
        )
    _check_length(len(samples), rate)
    samples = np.ascontiguousarray(_scaled(samples))
    if not np.isfinite(samples).all():
        raise MediumError("A sound has samples that are not finite numbers.")
    samples.flags.writeable = False  # its name is made of them
    return Sound(samples, None if rate is None else int(rate))


def _digest_of(samples: np.ndarray, rate: int | None) -> str:
    return digest_of(f"{rate}/".encode(), samples.tobytes())


def digest_of(*contents: bytes) -> str:
    """A name for contents behind one another: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for content in contents:
        digest.update(content)
    return digest.hexdigest()


def name_of(value: object) -> str | None:
    """A name for a value of a row by its content, where it is a sound or any other array; `None` for another."""
    if _is_decoder(value):
        value = _read_sound(value)
    if isinstance(value, Sound):
        return value.content_digest()
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray) or value.dtype.hasobject:
        return None
    return digest_of(f"{value.dtype}{value.shape}".encode(), value.tobytes())
