"""
The processes of a run, together: a failure of one ends all, so that none waits for it in a collective; what they begin
with is compared; and of several hosts that share no folder, the first keeps whatever is to last: checkpoints, and
conversations of all processes. On a shared folder nothing is lacking, nor copied. Files are compared by their content:
a copy of a checkpoint that has been written again since is often of its size.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import shutil
import socket
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed import DistError
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from mt_grpo.concurrency import run
from mt_grpo.errors import ConfigError, ServerGoneError, ServerSetupError, UserError, WeightSyncError
from mt_grpo.preemption import is_said_here
from mt_grpo.rewards import RewardError
from mt_grpo.rollout import EngineError, RolloutError
from mt_grpo.rollout.engines.transformers import on_device
from mt_grpo.runlog import RunLogError
from mt_grpo.vllm_plugin.fetch import Checksum

T = TypeVar("T")

_CHUNK = 1 << 26  # bytes that are sent at once

_SENTENCES = (
    ServerGoneError,
    ServerSetupError,
    WeightSyncError,
    RolloutError,
    RewardError,
    ConfigError,
    EngineError,
    RunLogError,
)
"""Failures whose message is enough. Others are shown with their traceback."""


class RankError(RuntimeError):
    """Another process failed unexpectedly. The message has its traceback."""


class ProcessGoneError(UserError, RuntimeError):
    """Another process of the run did not come, has ended without a word, or cannot be reached."""


@contextmanager
def says_who_is_gone(output_dir: str) -> Iterator[None]:
    """Turns what a backend of torch raises into a sentence: no group, or a process is gone. Warnings are said once."""
    for handler in filter(None, (logging.lastResort, *logging.getLogger("transformers").handlers)):
        handler.addFilter(is_said_here)
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, UserError) or not (isinstance(error, DistError) or "gloo" in str(error).lower()):
            raise
        # without the place in the backend's code
        why = re.sub(r"\[/[^]]*\] *", "", str(error)).split(". ")[0].partition("\n")[0][:160]
        if not dist.is_initialized():
            raise ProcessGoneError(
                f"The processes of the run do not reach each other ({why}): see that all of them run; on several "
                "hosts set `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` to the network interface that joins them, "
                "and open their ports to each other."
            ) from error
        raise ProcessGoneError(
            f"Another process of the run is gone, or its host or the network is ({why}); what it printed last may say "
            f"why. Checkpoints are in {output_dir}: run the same command on every host with `--resume_from_checkpoint "
            "auto` to go on."
        ) from error


def everywhere(work: Callable[[], T]) -> T:
    """Does this process's part of the work of all processes. This is a collective call."""
    failure: BaseException | None = None
    try:
        result = work()
    except (Exception, asyncio.CancelledError, SystemExit) as error:  # Ctrl-C comes to every process by itself
        failure = error
    failures = gather_object([failure and _told(failure)])
    first = next((rank for rank, entry in enumerate(failures) if entry is not None), None)
    if first is None:
        return result
    if failure is not None and first == PartialState().process_index:
        raise failure
    kind, message = failures[first]  # also where this process failed as well: all end for the same reason
    raise kind(message) from failure


def run_here(work: Coroutine[object, object, T], device: torch.device) -> T:
    """Runs a coroutine in the background thread, with `device` as the current GPU."""

    async def on() -> T:
        with on_device(device):
            return await work

    return run(on())


def _told(failure: BaseException) -> tuple[type[Exception], str]:
    """The kind and message of the error that other processes raise."""
    kind = next((kind for kind in _SENTENCES if isinstance(failure, kind)), None)
    if kind is not None:
        return kind, str(failure)
    rank, lines = PartialState().process_index, traceback.format_exception(failure)
    return RankError, f"Process {rank} failed:\n{''.join(lines)}"


# Several hosts


def several_hosts(args: TrainingArguments) -> bool:
    """Whether processes run on more than one host, as torch's launcher says it."""
    return args.world_size > int(os.environ.get("LOCAL_WORLD_SIZE", str(args.world_size)))


def clear_checkpoint(folder: Path, args: TrainingArguments) -> None:
    """Removes a checkpoint that is about to be written, of every host. This is a collective call."""
    for turn in (args.process_index == 0, args.local_process_index == 0):  # a shared folder is empty by the second
        if turn:
            shutil.rmtree(folder, ignore_errors=True)
        PartialState().wait_for_everyone()


def keep_checkpoint(folder: Path, args: TrainingArguments) -> None:
    """Has the first host keep what others wrote to a cleared checkpoint. This is a collective call."""
    if not several_hosts(args):
        return
    _collect(folder, args, replaces=False)
    if args.local_process_index == 0 and not (folder / TRAINER_STATE_NAME).exists():  # the first process writes it
        shutil.rmtree(folder, ignore_errors=True)


def keep_records(folder: Path, args: TrainingArguments) -> None:
    """Has the first host keep conversations of processes of other hosts. This is a collective call."""
    if several_hosts(args):
        _collect(folder, args, replaces=True)


def _collect(folder: Path, args: TrainingArguments, replaces: bool) -> None:
    heads = gather_object([args.local_process_index == 0])  # which also waits until every process has written
    for source in [rank for rank, head in enumerate(heads) if head and rank]:
        copy_folder(folder, source, args.process_index == 0, replaces=replaces)


def copy_folder(folder: Path, source: int, receives: bool, replaces: bool = True, mirrors: bool = False) -> None:
    """Copies from a process what others lack of a folder. This is a collective call."""
    sends = PartialState().process_index == source
    here = _identities(folder) if sends or receives else {}
    there = _broadcast(here, source)
    known = {name for name in there if receives and name in here}
    alike = {name for name in known if replaces and here[name].size == there[name].size and here[name] != there[name]}
    asked = sorted(set().union(*gather_object([alike])))
    contents = _broadcast({name: _digest(folder / name) for name in asked if sends}, source)
    lacking = {name for name in there if receives and name not in here}
    lacking |= {name for name in known if replaces and here[name].size != there[name].size}
    lacking |= {name for name in alike if _digest(folder / name) != contents[name]}
    if mirrors and receives and not any(here[name] == there[name] for name in known):  # the folder is no shared one
        for name in here.keys() - there.keys():
            (folder / name).unlink()
    for name in sorted(set().union(*gather_object([lacking]))):
        path = folder / name
        partial = path.with_name(f"{path.name}.partial")
        if name in lacking:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.unlink(missing_ok=True)
        for start in range(0, max(there[name].size, 1), _CHUNK):
            chunk = _broadcast(_read(path, start) if sends else b"", source)
            if name in lacking:
                with partial.open("ab") as file:
                    file.write(chunk)
        if name in lacking:
            partial.replace(path)


class _Identity(NamedTuple):
    """What a file of a shared folder has in common on all hosts, and copies of it have not."""

    size: int
    inode: int
    changed: int


def _identities(folder: Path) -> dict[str, _Identity]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".partial")
    found = {path.relative_to(folder).as_posix(): path.stat() for path in files}
    return {name: _Identity(each.st_size, each.st_ino, each.st_mtime_ns) for name, each in found.items()}


def _broadcast(value: T, source: int) -> T:
    values = [value]
    broadcast_object_list(values, from_process=source)
    return values[0]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _read(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(_CHUNK)


def check_same(what: str, tensors: Mapping[str, object], mend: str) -> None:
    """Compares a checksum of tensors across all processes, each of which has them whole. This is a collective call."""
    if PartialState().num_processes == 1:
        return
    checksum = Checksum()
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and not is_traceable_wrapper_subclass(tensor):
            checksum.add(name, tensor)
    answers = gather_object([(checksum.hexdigest(), socket.gethostname())])
    other = [rank for rank, (found, _) in enumerate(answers) if found != answers[0][0]]
    if other:
        raise ConfigError(
            f"The processes of the run begin with different {what}: of process {other[0]} on {answers[other[0]][1]} "
            f"they are not those of process 0 on {answers[0][1]}: {mend}."
        )
