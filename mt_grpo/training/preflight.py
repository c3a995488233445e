"""
Every refusal before any work: the machine, the batch sizes, the rows, the columns that rewards need, and an output
folder with an earlier run's files, which are neither mixed with another run nor removed unasked.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from accelerate.utils import broadcast_object_list
from huggingface_hub import get_token
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME

from mt_grpo.data import hub_fault
from mt_grpo.errors import ConfigError, refuse_first
from mt_grpo.imports import choose
from mt_grpo.options.rules import check_batches, check_trainable
from mt_grpo.runlog.schema import FOLDER
from mt_grpo.training.checkpoint import ABANDONED, is_whole
from mt_grpo.training.config import MTGRPOConfig, has_bfloat16
from mt_grpo.training.step_log import serving

_RECORDS = ("metrics.jsonl", "trajectories*.jsonl", "summary.json", "learning_curve.png", "audit.jsonl")

_MODEL = ("model*.safetensors", "model*.safetensors.index.json", "adapter_model*.safetensors", "adapter_config.json")

_ROLLOUTS = ("index*.jsonl", "*.rank*.parquet", "*.partial")  # what a run leaves in its folder of conversations

LOCK = ".lock"
"""Locked by the run that trains in a folder. The system lets go of it when the process ends, however it ends."""

_CHECKPOINT = re.compile(rf"({ABANDONED})?checkpoint-\d+(-\d+)?")


def check_surroundings(args: MTGRPOConfig) -> None:
    """Whether the machine has what the options ask of it: a device, packages, the Hub."""
    _check_device(args)
    check_trackers(args)
    if args.metrics_address is not None and args.process_index == 0:
        with serving(args.metrics_address, "run", dict):  # for a moment
            pass
    if args.push_to_hub:
        check_push(args)


def check_trackers(args: MTGRPOConfig) -> None:
    """Whether the packages that `report_to` names are installed."""
    available = get_available_reporting_integrations()
    for name in args.report_to:
        # the list never has flyte, nor azure_ml beside mlflow
        choose("report_to", name, sorted(INTEGRATION_TO_CALLBACK))
        if name not in (*available, "flyte", "azure_ml"):
            raise ConfigError(
                f"`report_to: {name}` needs a package that is not installed: `pip install {name}`, or set `report_to: "
                "none`."
            )


def _check_device(args: MTGRPOConfig) -> None:
    loading = vars(args.accelerator_config)
    refuse_first(
        *(
            (loading[name], f"`accelerator_config: {{{name}: true}}` takes groups of a prompt apart: leave it out.")
            for name in ("dispatch_batches", "split_batches")
        ),
        (
            args.torch_compile and args.forward != "padded",
            f"`torch_compile: true` does not compile `forward: {args.forward}`: leave it out, or set `forward: "
            "padded`.",
        ),
        (
            args.bf16 and not args.use_cpu and not has_bfloat16(),
            "`bf16: true` needs a GPU that computes in bfloat16, and there is none here: leave `bf16` out, which "
            "trains in float32, or set `use_cpu: true`.",
        ),
        (
            args.fp16 and args.device.type == "cpu",
            "`fp16: true` needs a GPU, and this run is on a CPU: leave it out.",
        ),
    )


def check_push(args: MTGRPOConfig) -> None:
    """Whether the Hub can be pushed to."""
    if not args.hub_token and get_token() is None:
        raise ConfigError(
            "`push_to_hub: true` needs a token: run `hf auth login`, set `HF_TOKEN`, or leave `push_to_hub` out."
        )
    fault = hub_fault()
    if fault is not None:
        raise ConfigError(
            f"`push_to_hub: true` needs the Hugging Face Hub, and {fault}: leave it out, and push `output_dir` "
            "afterwards (`hf upload`)."
        )


def check_batch_sizes(args: MTGRPOConfig) -> None:
    """Whether the processes of this run make whole groups, and the options leave something to train."""
    check_batches(vars(args), args.world_size)
    check_trainable(vars(args))


# The output folder


def left_by_runs(output_dir: str) -> list[Path]:
    """Records, checkpoints and models in a folder."""
    folder = Path(output_dir)
    records, models = ([path for name in names for path in sorted(folder.glob(name))] for names in (_RECORDS, _MODEL))
    conversations = [folder / FOLDER] if _conversations(folder / FOLDER) else []
    checkpoints = [path for path in sorted(folder.glob("*checkpoint-*")) if _is_checkpoint(path)]
    return [*records, *conversations, *models, *checkpoints]


def _conversations(folder: Path) -> list[Path]:
    return [path for pattern in _ROLLOUTS for path in folder.glob(pattern)]


def _is_checkpoint(path: Path) -> bool:
    """Whether this trainer wrote the checkpoint, wholly or partly."""
    marks = [path / TRAINER_STATE_NAME, *path.glob("rollouts-rank*.pt")]
    return _CHECKPOINT.fullmatch(path.name) is not None and any(mark.exists() for mark in marks)


def check_folder(args: MTGRPOConfig, model: str) -> None:
    """Checks that a run can begin in its `output_dir`. This is a collective call, in which the main process looks."""
    if args.process_index == 0 and not Path(args.output_dir).exists():  # which stays so
        _refuse_everywhere(args, None)
        return
    with locked(args, model):
        pass


def _refuse_everywhere(args: MTGRPOConfig, sentence: str | None) -> None:
    message = [sentence]
    if args.world_size > 1:
        broadcast_object_list(message)
    if message[0] is not None:
        raise ConfigError(message[0])


_held: set[Path] = set()
"""
Locks of this process. It must not open one again: the system lets go of a file's locks where any opening is closed.
"""


@contextmanager
def locked(args: MTGRPOConfig, model: str | None = None) -> Iterator[None]:
    """Keeps other processes that train out of `output_dir`; may be nested. Collective: the main process locks."""
    lock, refusal, path = None, None, Path(args.output_dir, LOCK).resolve()
    if args.process_index == 0 and path not in _held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
        except OSError as error:
            refusal = f"`output_dir: {args.output_dir}` cannot be made or written to ({error.strerror}): name another."
        else:
            refusal = _in_use(args) if lock is None else None
    if args.process_index == 0 and refusal is None and model is not None:
        refusal = _earlier_run(args, model)
    if lock is not None:
        _held.add(path)
    try:
        _refuse_everywhere(args, refusal)
        yield
    finally:
        if lock is not None:
            _held.remove(path)
            path.unlink(missing_ok=True)
            lock.close()


def _lock(path: Path) -> IO[str] | None:
    """The locked file; `None` where another process has it."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # how a lock of another process is told
            file.close()
            return None
        except OSError:  # the file system has no locks
            return file
        if _is(path, file):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            return file
        file.close()  # the run that had it has ended in between, and removed it


def _is(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _in_use(args: MTGRPOConfig) -> str:
    holder = ""
    with suppress(FileNotFoundError):  # it ends just then
        holder = Path(args.output_dir, LOCK).read_text(encoding="utf-8")
    return (
        f"`output_dir: {args.output_dir}` is in use: {holder or 'another process'} is training there. Wait until it "
        "has ended, or choose another `output_dir`."
    )


def _earlier_run(args: MTGRPOConfig, model: str) -> str | None:
    found = [] if _resumes_here(args) else left_by_runs(args.output_dir)
    if not found:
        return None
    if args.overwrite_output_dir:
        if not Path(model).resolve().is_relative_to(Path(args.output_dir).resolve()):
            return None
        return (
            f"The model {model} is in `output_dir: {args.output_dir}`, which `overwrite_output_dir: true` clears: "
            "choose another `output_dir`."
        )
    names = ", ".join(path.name for path in found[:3]) + (", ..." if len(found) > 3 else "")
    resume = "go on with it (`--resume_from_checkpoint true`), " if any(map(is_whole, found)) else ""
    return (
        f"`output_dir: {args.output_dir}` holds an earlier run ({names}): {resume}remove it and begin anew "
        "(`--overwrite_output_dir true`), or choose another `output_dir`."
    )


def _resumes_here(args: MTGRPOConfig) -> bool:
    checkpoint = args.resume_from_checkpoint
    return checkpoint is not None and Path(checkpoint).resolve().parent == Path(args.output_dir).resolve()


def clear_folder(args: MTGRPOConfig) -> None:
    """Removes records, checkpoints and models of earlier runs, unless one is resumed; other files stay."""
    if _resumes_here(args):
        return
    saved = Path(args.output_dir, TRAINING_ARGS_NAME).exists()
    for path in left_by_runs(args.output_dir):
        if path.name == FOLDER:
            for file in _conversations(path):
                file.unlink()
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif saved or not any(path.match(pattern) for pattern in _MODEL):
            path.unlink()
