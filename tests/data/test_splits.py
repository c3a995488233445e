"""Splits of any source are sliced, refused where they are none, and kept apart where one is measured on."""

from __future__ import annotations

import json

import pytest

from mt_grpo.data import DatasetError, check_apart, load_rows


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{number}"}) + "\n" for number in range(10)))
    return path


def asked(rows):
    return [row["prompt"][0]["content"] for row in rows]


@pytest.mark.parametrize(("split", "first", "last"), [("train[7:]", 7, 9), ("train[:2]", 0, 1), ("train[2:4]", 2, 3)])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_is_sliced(file, split, first, last, streaming):
    found = asked(load_rows(str(file), split, streaming=streaming))
    assert found == [f"q{number}" for number in range(first, last + 1)]


@pytest.mark.parametrize("split", ["train[5:5]", "train[7:5]"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_slice_without_rows_is_refused(split, streaming):
    with pytest.raises(DatasetError, match="is empty"):
        load_rows("embedded", split, streaming=streaming)


@pytest.mark.parametrize("split", ["train[:50%]", "train[-2:]"])
def test_a_slice_that_a_stream_cannot_have_is_refused(file, split):
    assert len(load_rows(str(file), split)) in (5, 2)
    with pytest.raises(DatasetError, match=r"count rows from the first on, as `train\[:100\]`"):
        load_rows(str(file), split, streaming=True)


@pytest.mark.parametrize("folder", [False, True])
def test_a_split_that_is_none_is_refused_with_the_nearest(file, folder):
    if folder:
        file.rename(file.with_name("train.jsonl"))
    with pytest.raises(DatasetError, match="'trian'; the nearest is 'train'"):
        load_rows(str(file.parent if folder else file), "trian")


def test_the_embedded_task_names_the_nearest_split_too():
    with pytest.raises(DatasetError, match="'validaton'; the nearest is 'validation'"):
        load_rows("embedded", "validaton[:4]")


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train", "test"),
        ("train", "train"),
        ("train[2:]", "train[:3]"),
        ("train", "validation[:4]"),
        ("train[:-1]", "test"),
    ],
)
def test_a_file_is_not_measured_on_what_it_trains_on(file, train, test):
    with pytest.raises(DatasetError) as refused:
        check_apart(str(file), train, test, load_rows(str(file), train))
    assert "`dataset_train_split: train[20:]` and `dataset_test_split: train[:20]`" in str(refused.value)
    with pytest.raises(DatasetError):
        check_apart(f"gsm8k:{file}", train, test, load_rows(str(file), train))


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train[2:]", "train[:2]"),
        ("train[2:]", "test[:2]"),
        ("train[:80%]", "train[80%:]"),
        ("train[:-2]", "train[-2:]"),
    ],
)
def test_slices_without_a_row_in_common_are_taken(file, train, test):
    check_apart(str(file), train, test, load_rows(str(file), train))


def test_other_sources_are_told_apart_by_their_splits(tmp_path):
    for name in (str(tmp_path), "somebody/dataset"):
        check_apart(name, "train", "test")
        check_apart(name, "train+validation[:10]", "validation[10:]")
        with pytest.raises(DatasetError):
            check_apart(name, "train", "train[:20]")
        with pytest.raises(DatasetError):
            check_apart(name, "train+validation", "validation[10:]")
    check_apart("embedded", "train", "test")
    with pytest.raises(DatasetError):
        check_apart("embedded", "validation", "test[:4]")
