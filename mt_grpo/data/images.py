"""Images in columns of datasets: they are read as all other images are, of few formats, and bounded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import datasets
from datasets.utils.file_utils import is_local_path, xopen

from mt_grpo.media import BROKEN, MediumError, decode, read_image
from mt_grpo.sounds import MOST_BYTES

Rows: TypeAlias = datasets.Dataset | datasets.IterableDataset

_ORIENTATION = 0x112  # the number of EXIF's key for how an image is turned


class ImageOfRowError(MediumError):
    """An image of a row that cannot be shown."""

    def __init__(self, error: MediumError, column: str, value: object, row: str = "A row") -> None:
        super().__init__(f"{row} has an image that cannot be shown, in the column {column!r}: {error}")
        self.error, self.column, self.value = error, column, value


@dataclass
class OpenedImage(datasets.Image):
    """A column of images, as `datasets` decodes them, of which no other program and no other reader has a part."""

    column: str = ""

    def decode_example(self, value: object, token_per_repo_id: dict[str, Any] | None = None) -> Any:
        """The image, opened; decoded where it is to be turned, or of another mode."""
        if not isinstance(value, dict):
            return value
        try:
            image = read_image(_fetched(value, token_per_repo_id or {}), of_row=True)
            if self.mode and self.mode != image.mode:
                decode(image)
            image = _turned(image)
        except MediumError as error:
            raise ImageOfRowError(error, self.column, value) from error
        return image.convert(self.mode) if self.mode and self.mode != image.mode else image


def _turned(image: Any) -> Any:
    """An image as its EXIF data say that it is to be turned; as it is where these are broken."""
    from PIL import ImageOps

    try:
        if "exif" not in image.info or image.getexif().get(_ORIENTATION) in (None, 1):
            return image
        decode(image)
        return ImageOps.exif_transpose(image)
    except MediumError:
        raise
    except (*BROKEN, AttributeError):  # the last where a number stands for text
        return image


def _fetched(value: dict[str, Any], tokens: dict[str, Any]) -> dict[str, Any]:
    """A value of a column of images, with the bytes of a file that is elsewhere, or in an archive."""
    path = value.get("path")
    if value.get("bytes") is not None or path is None or is_local_path(path):
        return value
    token = next(iter(tokens.values()), None)
    with xopen(path, "rb", download_config=datasets.DownloadConfig(token=token)) as file:
        return {"bytes": file.read(MOST_BYTES + 1), "path": None}


def with_own_opener(rows: Rows) -> Rows:
    """A dataset whose images are opened by `mt_grpo.media`, wherever in a row they stand."""
    return _with_images(rows, lambda image, column: OpenedImage(image.mode, column=column))


def undecoded(rows: Rows) -> Rows:
    """A dataset whose images are dictionaries with `bytes` and `path`."""
    return _with_images(rows, _bare)


def decoded_as(rows: datasets.Dataset, features: dict[str, Any]) -> datasets.Dataset:
    """A dataset that was made of undecoded rows, with images where they had some."""
    features = {
        name: feature for name, feature in features.items() if name in rows.features and _shows_images(feature)
    }
    for name, feature in features.items():
        bare = _each(feature, name, _bare)
        if name != "prompt" and rows.features[name] != bare:  # a copy has the types of its values
            rows = rows.cast_column(name, bare)
    same = {name: feature for name, feature in features.items() if rows.features[name] == _each(feature, name, _bare)}
    return _with_features(rows, datasets.Features({**rows.features, **same}))


def _bare(image: datasets.Image, column: str) -> datasets.Image:
    return datasets.Image(image.mode, decode=False)


def _with_images(rows: Rows, make: Callable[[datasets.Image, str], datasets.Image]) -> Rows:
    if rows.features is None or not any(map(_shows_images, rows.features.values())):
        return rows
    features = datasets.Features({name: _each(feature, name, make) for name, feature in rows.features.items()})
    return rows.cast(features) if isinstance(rows, datasets.IterableDataset) else _with_features(rows, features)


def _with_features(rows: datasets.Dataset, features: datasets.Features) -> datasets.Dataset:
    """A dataset that reads its table in another way. `cast` would write images in lists anew."""
    twin = copy.copy(rows)
    twin._info = rows.info.copy()
    twin._info.features = features
    return twin


def _each(feature: object, column: str, make: Callable[[datasets.Image, str], datasets.Image]) -> Any:
    if isinstance(feature, datasets.Image):
        return make(feature, column) if feature.decode else feature
    if isinstance(feature, dict):
        return {name: _each(inner, column, make) for name, inner in feature.items()}
    if isinstance(feature, list):
        return [_each(inner, column, make) for inner in feature]
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        return replace(feature, feature=_each(feature.feature, column, make))
    return feature


def _shows_images(feature: object) -> bool:
    """Whether a column, or something in it, is of images."""
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        return _shows_images(feature.feature)
    return isinstance(feature, datasets.Image) or any(map(_shows_images, _inside(feature)))


@contextmanager
def naming_rows(data: dict[str, Any]) -> Iterator[None]:
    """Says which row of some datasets has the image that cannot be shown: it is looked for."""
    try:
        yield
    except ImageOfRowError as error:
        for name, rows in data.items():
            if isinstance(rows, datasets.Dataset) and error.column in rows.column_names:
                for number, row in enumerate(undecoded(rows.select_columns([error.column]).with_format(None))):
                    if _has(row[error.column], error.value):
                        where = f"Row {number} (counted from 0) of the {name}"
                        raise ImageOfRowError(error.error, error.column, error.value, where) from error
        raise


def _has(value: object, wanted: object) -> bool:
    """Whether a value of a column is what is wanted, or has it inside."""
    if isinstance(value, dict) and isinstance(wanted, dict) and value.items() >= wanted.items():
        return True
    return bool(value == wanted) or any(_has(each, wanted) for each in _inside(value))


def _inside(value: object) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
