"""Sounds in messages: read from what datasets, tools and requests have, named by their content, written as WAV."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mt_grpo.errors import UserError

if TYPE_CHECKING:
    import numpy as np

KINDS = ("audio", "input_audio", "audio_url")
"""Types of parts that play a sound: of chat templates, of OpenAI's interface, and of vLLM's."""

_GIVEN = ("audio", "input_audio", "audio_url", "url", "path", "base64")
"""Keys of such a part under which the sound may stand."""

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_UNKNOWN_RATE = 16_000
"""The rate that is written for a sound of which none is known: that of nearly all models."""


class SoundError(UserError, ValueError):
    """Something that is played as a sound, and is none. The message is one sentence fit for the user."""


@dataclass(frozen=True, eq=False)
class Sound:
    """
    A sound of one channel.

    Args:
        samples (`np.ndarray`): `(N,)` float32, between -1 and 1.
        rate (`int`, *optional*): Samples per second. Unset, they are taken to be as many as the model's processor
            wants, which is what transformers takes an array for.
    """

    samples: np.ndarray
    rate: int | None = None

    __array_ufunc__ = None  # an array that is compared with a sound asks the sound, and gets one answer

    @property
    def seconds(self) -> float:
        """How long it is."""
        return len(self.samples) / (self.rate or _UNKNOWN_RATE)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sound):
            return False
        return self is other or (self.rate == other.rate and self.samples.tobytes() == other.samples.tobytes())

    def __hash__(self) -> int:
        return hash((self.rate, len(self.samples)))

    def __repr__(self) -> str:
        return f"Sound({self.seconds:.2f} s)"


def is_sound_part(part: Any) -> bool:
    """Whether a part of a message's content plays a sound."""
    return isinstance(part, dict) and part.get("type") in KINDS


def is_read(part: dict[str, Any]) -> bool:
    """Whether such a part is in the form that `read_part` gives it."""
    return part["type"] == "audio" and isinstance(part.get("audio"), Sound) and "seconds" in part


def read_part(part: dict[str, Any]) -> dict[str, Any]:
    """
    A part that plays a sound in the form that chat templates take: `{"type": "audio", "audio": ..., "seconds": ...}`,
    with a `Sound`. Its other keys stay.

    Raises:
        SoundError: If there is no sound in it, or none that can be read.
    """
    found = [(key, part[key]) for key in _GIVEN if part.get(key) is not None]
    if len(found) != 1:
        keys = " and ".join(repr(key) for key, _ in found)
        raise SoundError(
            f"A message has a sound under {keys}: give it once, as `audio`."
            if found
            else "A message has a place for a sound and no sound: give it in the part itself, as `audio`."
        )
    ((key, value),) = found
    rate = part.get("sampling_rate")
    if key == "input_audio":
        if not isinstance(value, dict) or not isinstance(value.get("data"), str):
            raise SoundError("A sound of type 'input_audio' has no `data`: give the file there, in base64.")
        value = _decoded(value["data"].rpartition("base64,")[2], "A sound of type 'input_audio'")
    elif key == "base64" and isinstance(value, str):
        value = _decoded(value, "A sound under 'base64'")
    elif key == "audio_url" and isinstance(value, dict):
        value = value.get("url")
    sound = read_sound(value, rate)
    rest = {name: each for name, each in part.items() if name not in (*_GIVEN, "type", "sampling_rate", "seconds")}
    return {"type": "audio", "audio": sound, "seconds": round(sound.seconds, 3), **rest}


def read_sound(value: Any, rate: int | None = None) -> Sound:
    """
    A sound, from what datasets, tools and requests have: an array, `{"array": ..., "sampling_rate": ...}`, a decoder
    of torchcodec's (rows of `datasets.Audio`), a path, the bytes of a file, `{"bytes": ...}` or `{"path": ...}`, or a
    `data:` URL. Channels of a file are averaged, as transformers does.

    Args:
        value: One of these.
        rate (`int`, *optional*): Samples per second of an array.

    Raises:
        SoundError: If it is none of them, cannot be read, or has no samples, another number of dimensions than one,
            or numbers that are not finite.
    """
    if isinstance(value, Sound):
        return value
    if _is_decoder(value):
        decoded = value.get_all_samples()
        return _checked(decoded.data.numpy().mean(axis=0), decoded.sample_rate)
    if isinstance(value, dict) and value.get("array") is not None:
        return read_sound(value["array"], value.get("sampling_rate") or rate)
    if isinstance(value, dict):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, (bytes, bytearray)):
        return _file(bytes(value), f"A sound of {len(value)} bytes")
    if isinstance(value, (str, Path)):
        return _file(*_opened(value))
    import numpy as np

    try:
        samples = np.asarray(value)
    except (ValueError, TypeError, RuntimeError):  # lists of several lengths; a tensor of a GPU, or with a gradient
        samples = np.empty(0, dtype=object)
    if samples.dtype.kind not in "iuf" or not samples.ndim:
        raise SoundError(
            f"A value of {type(value).__name__} is no sound: give an array of samples, a path, or the bytes of a file."
        )
    return _checked(samples, rate)


def _is_decoder(value: Any) -> bool:
    """Whether a value is a decoder of torchcodec's. Where nobody has imported torchcodec, nothing is."""
    torchcodec = sys.modules.get("torchcodec.decoders")
    return torchcodec is not None and isinstance(value, torchcodec.AudioDecoder)


def _opened(value: str | Path) -> tuple[bytes, str]:
    """The bytes of a file, and what to say of it."""
    text = str(value)
    name = f"The sound {text[:60] + '…' if len(text) > 60 else text!r}"
    if text.startswith("data:"):
        return _decoded(text.partition(",")[2], name), name
    if text.startswith(("http://", "https://")):
        raise SoundError(f"{name} is an address, which rollouts do not fetch: give the sound, a file or its bytes.")
    try:
        return Path(value).read_bytes(), name
    except OSError as error:
        raise SoundError(f"{name} cannot be read: {error.strerror or error}.") from error


def _decoded(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SoundError(f"{name} cannot be read: it is no base64.") from error


def is_wav(data: bytes) -> bool:
    """Whether the bytes of a file are a WAV file's, which is read without any library."""
    return data[:4] == b"RIFF" and data[8:12] == b"WAVE"


def _file(data: bytes, name: str) -> Sound:
    if is_wav(data):
        try:
            samples, rate = _from_wav(data)
        except struct.error as error:
            raise SoundError(f"{name} cannot be read as a sound: it ends within its header.") from error
        except ValueError as error:
            raise SoundError(f"{name} cannot be read as a sound: {error}.") from error
        return _checked(samples, rate)
    try:
        import soundfile  # type: ignore[import-not-found]
    except ImportError:
        raise SoundError(
            f"{name} is no WAV file, and what reads others is not installed: `pip install soundfile`, or give samples."
        ) from None
    try:
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, RuntimeError) as error:
        raise SoundError(f"{name} cannot be read as a sound: it is broken, or of no known kind.") from error
    return _checked(samples.mean(axis=1), rate)


def _from_wav(data: bytes) -> tuple[np.ndarray, int]:
    """Samples of a WAV file, its channels averaged, and its rate."""
    import numpy as np

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
        body = body[: len(body) // frame * frame]  # a file that was cut off ends within a sample
        if kind == _FLOAT:
            samples = np.frombuffer(body, f"<f{bits // 8}")
        elif bits == 24:
            parts = np.frombuffer(body, np.uint8).reshape(-1, 3)
            samples = np.pad(parts, ((0, 0), (1, 0))).reshape(-1).view("<i4")
        else:
            samples = np.frombuffer(body, "u1" if bits == 8 else f"<i{bits // 8}")
        return _scaled(samples).reshape(-1, channels).mean(axis=1), rate
    raise ValueError("it has no samples")


def _scaled(samples: np.ndarray) -> np.ndarray:
    """Samples between -1 and 1, as float32: whole numbers are divided by their type's largest."""
    if samples.dtype.kind == "f":
        return samples.astype("float32")
    size = 2.0 ** (8 * samples.dtype.itemsize - 1)
    return ((samples - size * (samples.dtype.kind == "u")) / size).astype("float32")


def _checked(samples: np.ndarray, rate: Any) -> Sound:
    import numpy as np

    if samples.ndim != 1:
        raise SoundError(
            f"A sound is one row of samples, and this one is an array of shape {samples.shape}: average its channels."
        )
    if not len(samples):
        raise SoundError("A sound has no samples: leave it out.")
    samples = np.ascontiguousarray(_scaled(samples))
    if not np.isfinite(samples).all():
        raise SoundError("A sound has samples that are not finite numbers.")
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, (int, np.integer)) or rate < 1):
        raise SoundError(f"A sound has {rate!r} samples per second: give a whole number above 0 as `sampling_rate`.")
    samples.flags.writeable = False  # its name is made of them
    return Sound(samples, None if rate is None else int(rate))


def sound_digest(sound: Sound) -> str:
    """A name for a sound by its content: 32 hexadecimal digits, the same on every machine."""
    content = hashlib.blake2b(f"{sound.rate}/".encode(), digest_size=16)
    content.update(sound.samples.tobytes())
    return content.hexdigest()


def name_of(value: Any) -> str | None:
    """A name for a value of a row by its content, where it is a sound or any other array; `None` for another."""
    if _is_decoder(value):
        value = read_sound(value)
    if isinstance(value, Sound):
        return sound_digest(value)
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray) or value.dtype.hasobject:
        return None
    content = hashlib.blake2b(f"{value.dtype}{value.shape}".encode(), digest_size=16)
    content.update(value.tobytes())
    return content.hexdigest()


def as_wav(sound: Sound) -> bytes:
    """A sound as the bytes of a WAV file of float32, from which `read_sound` reads the same samples."""
    rate, body = sound.rate or _UNKNOWN_RATE, sound.samples.tobytes()
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, _FLOAT, 1, rate, 4 * rate, 4, 32)
    chunks = b"WAVE" + form + struct.pack("<4sI", b"data", len(body)) + body
    return struct.pack("<4sI", b"RIFF", len(chunks)) + chunks
