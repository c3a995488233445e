"""Images in columns of datasets: opened as those of tools are, and the same as `datasets` decodes."""

import io
import struct

import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageColumn
from PIL import Image

from mt_grpo.data import load_rows
from mt_grpo.data.images import ImageOfRowError, OpenedImage, undecoded, with_own_opener
from mt_grpo.media import is_decoded

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"


def saved(kind, mode="RGB", **options):
    file = io.BytesIO()
    Image.linear_gradient("L").resize((24, 16)).convert(mode).save(file, format=kind, **options)
    return file.getvalue()


def written(tmp_path, **images):
    """A parquet file of one row."""
    features = {
        name: List(ImageColumn()) if isinstance(image, list) else ImageColumn() for name, image in images.items()
    }
    rows = Dataset.from_list([{"prompt": "What?", **images}], Features({"prompt": Value("string"), **features}))
    rows.to_parquet(tmp_path / "train.parquet")
    return str(tmp_path / "train.parquet")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_an_image_of_a_row_starts_no_program(tmp_path, ghostscript, streaming, several):
    path = written(tmp_path, photo=[EPS] if several else EPS)
    with pytest.raises(ImageOfRowError, match="in the column 'photo': An image of .* no known kind"):
        list(load_rows(path, "train", streaming=streaming))
    assert not ghostscript.exists()


@pytest.mark.parametrize("streaming", [False, True])
def test_images_of_rows_are_opened_and_not_decoded(tmp_path, streaming):
    path = written(tmp_path, photo=saved("PNG"), views=[saved("PNG"), saved("JPEG")])
    mapping = {"image": "photo", "images": "views"}
    [row] = load_rows(path, "train", column_mapping=mapping, streaming=streaming)
    shown = [row["photo"], row["image"], *row["views"], *row["images"]]
    assert [image.format for image in shown] == ["PNG", "PNG", "PNG", "JPEG", "PNG", "JPEG"]
    assert not any(map(is_decoded, shown))


TURNED = Image.Exif()
TURNED[0x112] = 6
FILES = [saved("PNG"), saved("JPEG"), saved("JPEG", exif=TURNED), saved("WEBP"), saved("GIF", "P")]


@pytest.mark.parametrize("mode", [None, "L"])
@pytest.mark.parametrize("file", FILES)
def test_an_image_is_what_datasets_makes_of_it(mode, file):
    value = {"bytes": file, "path": None}
    theirs, ours = ImageColumn(mode).decode_example(value), OpenedImage(mode).decode_example(value)
    assert (ours.mode, ours.size, ours.tobytes()) == (theirs.mode, theirs.size, theirs.tobytes())


def exif_of(*entries):
    """EXIF data by tag, type and value."""
    packed = [struct.pack(">HHI4s", tag, kind, 1, value) for tag, kind, value in entries]
    return b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">H", len(packed)) + b"".join(packed) + bytes(4)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_broken_exif_data_leave_an_image_as_it_is():
    turned = (0x112, 3, b"\0\6\0\0")
    broken = [(0x100, 2, b"six\0"), (0x11A, 7, b"six\0"), (0x10E, 11, bytes(4))]
    for exif in (b"Exif\0\0of no kind", *(exif_of(*sorted([turned, one])) for one in broken)):
        value = {"bytes": saved("PNG", exif=exif), "path": None}
        assert OpenedImage().decode_example(value).size == (24, 16)


def test_files_in_archives_are_read(tmp_path):
    from zipfile import ZipFile

    with ZipFile(tmp_path / "photos.zip", "w") as archive:
        archive.writestr("one.png", saved("PNG"))
    path = f"zip://one.png::{tmp_path}/photos.zip"
    assert OpenedImage().decode_example({"bytes": None, "path": path}).size == (24, 16)


def test_other_columns_and_what_is_not_to_be_decoded_stay(tmp_path):
    rows = Dataset.from_list([{"prompt": "What?"}])
    assert with_own_opener(rows) is rows
    given = {"bytes": EPS, "path": None}
    rows = Dataset.from_list([{"image": given}], Features({"image": ImageColumn(decode=False)}))
    assert with_own_opener(rows)[0]["image"] == undecoded(rows)[0]["image"] == given
