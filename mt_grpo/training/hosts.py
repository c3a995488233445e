"""
Runs over several hosts that share no folder. The first host keeps whatever is to last: checkpoints, and conversations
of all processes. The others get from it what they resume from. On a shared folder nothing is lacking, nor copied.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from mt_grpo.errors import ConfigError
from mt_grpo.training.checkpoint import find_checkpoint

CHUNK = 1 << 26
"""Bytes that are sent at once."""


def several_hosts(args: TrainingArguments) -> bool:
    """Whether processes run on more than one host, as torch's launcher says it."""
    return args.world_size > int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))


def resume_point(wanted: str | bool | None, args: TrainingArguments) -> str | None:
    """
    The checkpoint that `resume_from_checkpoint` names, of which every host then has a copy. Where the latest one is
    asked for, it is the latest of any host: a launcher may give the first place to another one. This is a collective
    call.

    Raises:
        ConfigError: As `find_checkpoint`, in every process, if no host has it.
    """
    if not several_hosts(args):
        return find_checkpoint(wanted, args.output_dir)
    found, error = None, None
    try:
        found = find_checkpoint(wanted, args.output_dir)
    except ConfigError as refusal:
        error = str(refusal)
    answers = gather_object([(found, error)])
    folders = [folder for folder, _ in answers if folder is not None]
    if not folders:
        errors = [sentence for _, sentence in answers if sentence is not None]
        if errors:
            raise ConfigError(errors[0])
        return None
    chosen = max(folders, key=_step)  # the first of equals
    _copy(Path(chosen), [folder for folder, _ in answers].index(chosen), args.local_process_index == 0)
    return chosen


def _step(folder: str) -> int:
    number = Path(folder).name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def keep_checkpoint(folder: Path, args: TrainingArguments) -> None:
    """Has the first host keep what processes of other hosts wrote to a checkpoint. This is a collective call."""
    if not several_hosts(args):
        return
    _collect(folder, args)
    if args.local_process_index == 0 and not (folder / TRAINER_STATE_NAME).exists():  # the first process writes it
        shutil.rmtree(folder, ignore_errors=True)


def keep_records(folder: Path, args: TrainingArguments) -> None:
    """Has the first host keep conversations of processes of other hosts. This is a collective call."""
    if several_hosts(args):
        _collect(folder, args)


def _collect(folder: Path, args: TrainingArguments) -> None:
    heads = gather_object([args.local_process_index == 0])  # which also waits until every process has written
    for source in [rank for rank, head in enumerate(heads) if head and rank]:
        _copy(folder, source, args.process_index == 0)


def _copy(folder: Path, source: int, receives: bool) -> None:
    """Copies from a process what others lack of a folder, or have in another size. This is a collective call."""
    sends = PartialState().process_index == source
    here = {path.relative_to(folder).as_posix(): path.stat().st_size for path in _files(folder)}
    there = [here]
    broadcast_object_list(there, from_process=source)
    lacking = {name for name, size in there[0].items() if receives and here.get(name) != size}
    for name in sorted(set().union(*gather_object([lacking]))):
        path = folder / name
        partial = path.with_name(f"{path.name}.partial")
        if name in lacking:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.unlink(missing_ok=True)
        for start in range(0, max(there[0][name], 1), CHUNK):
            chunk = [_read(path, start) if sends else b""]
            broadcast_object_list(chunk, from_process=source)
            if name in lacking:
                with partial.open("ab") as file:
                    file.write(chunk[0])
        if name in lacking:
            partial.replace(path)


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".partial")


def _read(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(CHUNK)
