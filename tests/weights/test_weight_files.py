"""Weights as a file: complete or absent, and the walk over parameters always finished."""

import os
import subprocess
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.memory import peak_memory

from mt_grpo.errors import ConfigError
from mt_grpo.vllm_plugin.fetch import Checksum
from mt_grpo.weights.files import WeightFiles, _WeightFile, make_folder
from mt_grpo.weights.transport import Source

TENSORS = {
    "odd": torch.arange(3, dtype=torch.bfloat16),
    "wide": torch.randn(5, 7, dtype=torch.float64),
    "flags": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "matrix": torch.randn(4, 3),
    "strided": torch.randn(6, 4).T,
    "scalar": torch.tensor(2.0),
    "large": torch.randn(1500, 1501),
    "odd and large": torch.randn(700_001).bfloat16(),
    "large and strided": torch.randn(900, 800).T,
    "empty": torch.empty(0, 4),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "w.safetensors"


def file_of(tmp_path, tensors=TENSORS):
    layout = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    return _WeightFile(tmp_path / "0.partial", layout)


def test_what_is_written_is_what_safetensors_reads(tmp_path):
    """A file has its name only when it is complete, and the checksum of what is written."""
    file = file_of(tmp_path)
    for factor in (1, 3):
        tensors = {name: tensor * factor for name, tensor in TENSORS.items()}
        alone = Checksum()

        def walk(tensors=tensors, alone=alone):
            for name, tensor in tensors.items():
                assert not list(tmp_path.glob("*.safetensors"))
                alone.add(name, tensor)
                yield name, tensor

        file.withdraw()
        written = file.fill(tmp_path / f"{factor}.safetensors", walk())
        assert [entry.name for entry in tmp_path.iterdir()] == [f"{factor}.safetensors"]
        assert written == alone.hexdigest() == Checksum.of_file(file.path)
        torch.testing.assert_close(load_file(file.path), tensors, rtol=0, atol=0)


def test_the_tensors_of_a_file_begin_at_a_cache_line(tmp_path):
    for count in range(1, 9):
        tensors = {"w" * length: torch.empty(16) for length in range(1, count + 1)}
        file = file_of(tmp_path, tensors)
        assert {file.place(name).data_ptr() % 64 for name in tensors} == {0}


def checksum(tensor) -> str:
    alone = Checksum()
    alone.add("weight", tensor)
    return alone.hexdigest()


def swapped(tensor, one, other):
    """A tensor in which two parts have changed places."""
    other_order = tensor.clone()
    other_order[one], other_order[other] = tensor[other], tensor[one]
    return other_order


def test_a_checksum_tells_the_place_of_every_word():
    """Words and rows that change places, in one block, in two, and behind the last; a bit; a transposition."""
    weight = torch.randn(401, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    flat = weight.view(-1)
    places = [(0, 1), (0, 4), (1, 1024 * 4 + 1), (0, 1024 * 4 + 4), (5, 16 * 1024 * 4 + 5), (3, flat.numel() - 1)]
    found = [checksum(swapped(flat, *each).view_as(weight)) for each in places]
    found += [checksum(swapped(weight, *each)) for each in ((0, 1), (0, 16), (17, 40), (100, 400))]
    one_bit = weight.clone()
    one_bit.view(torch.int16)[200, 7] ^= 1
    found += [checksum(each) for each in (weight, one_bit, weight.roll(1, 0), weight.T, weight.view(1024, 401))]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("number", "digest"),
    [
        (3, "879812608db630bdfd958778c6e2ba8f"),
        (70_000, "829060f34bf27d5fbbe14c93dafa34de"),
        (1_000_003, "078da1acf1ba432092a03b98e0f487f0"),
    ],
)
def test_a_checksum_is_the_same_everywhere(number, digest):
    """In each process and version: trainer and server may run in environments of their own."""
    values = torch.arange(number, dtype=torch.int32) * 40503
    assert checksum(values.to(torch.int16)) == checksum(torch.cat([values[:1], values]).to(torch.int16)[1:]) == digest


def test_a_large_weight_is_summed_in_little_memory():
    weight = torch.ones(2**27, dtype=torch.uint8)
    assert peak_memory(lambda: checksum(weight)) < 2**24


def test_an_error_of_the_thread_that_sums_is_raised(path, monkeypatch):
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, path)
    monkeypatch.setattr("mt_grpo.vllm_plugin.fetch._line_of", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Checksum.of_file(path)


def test_tensors_that_nobody_read_are_not_in_the_checksum(path):
    tensors = {name: TENSORS[name].contiguous() for name in ("odd", "wide", "matrix")}
    save_file(tensors, path)
    read, whole, alone = Checksum(), Checksum(), Checksum()
    some = read.read(path)
    alone.add(*next(some))
    some.close()
    torch.testing.assert_close(dict(whole.read(path)), tensors, rtol=0, atol=0)
    assert alone.hexdigest() == read.hexdigest() != whole.hexdigest() == Checksum.of_file(path)


def test_a_tensor_is_summed_before_the_walk_goes_on(tmp_path, path):
    """A gathered or merged tensor is another one then."""
    large = torch.arange(1 << 18)
    file = file_of(tmp_path, {"a": large, "b": large})

    def walk():
        for name in "ab":
            shared = large.clone()
            yield name, shared
            shared.zero_()

    assert file.fill(path, walk()) == Checksum.of_file(file.path)


def test_a_failed_write_leaves_no_file_and_finishes_the_walk(tmp_path):
    """The first walk tells what there is, and in the second a tensor has another shape."""
    walked = []

    class Given(Source):
        accelerator = SimpleNamespace(is_main_process=True)

        def __init__(self):
            pass

        @property
        def parameters(self):
            again = bool(walked)
            for name, tensor in TENSORS.items():
                walked.append(name)
                yield name, torch.zeros(99) if again and name == "flags" else tensor

    with pytest.raises(ValueError, match="size"):
        WeightFiles(Given(), tmp_path).pack(1)
    assert walked == 2 * list(TENSORS) and [file.name for file in tmp_path.iterdir()] == ["0.partial"]


def test_a_full_disk_is_an_error_that_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left.*weight_sync_folder"):
        file_of(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shared", [False, True])
def test_what_a_killed_process_left_is_removed(shared, tmp_path):
    root = str(tmp_path) if shared else None
    gone = subprocess.Popen(["true"])
    gone.wait()
    kept = make_folder(root)
    left = kept.with_name(kept.name.replace(f"-{os.getpid()}-", f"-{gone.pid}-"))
    kept.rename(left)
    (left / "weights.partial").write_bytes(b"half")
    kept, own = make_folder(root), make_folder(root)
    assert kept.exists() and own.exists() and not left.exists()
    kept.rmdir()
    own.rmdir()


@pytest.mark.parametrize("folder", ["/proc/x", "/dev/null/x"])
def test_a_place_that_takes_no_weights_is_said_at_the_start(folder):
    with pytest.raises(ConfigError, match=f"can be made in {folder} .*set `weight_sync_folder`") as caught:
        make_folder(folder)
    assert "\n" not in str(caught.value)
