"""Makes a failure of one process end all processes, so that none waits for it in a collective."""

from __future__ import annotations

import asyncio
import re
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather_object
from torch.distributed import DistError

from mt_grpo.concurrency import run
from mt_grpo.errors import ConfigError, UserError
from mt_grpo.rewards import RewardError
from mt_grpo.rollout import EngineError, RolloutError
from mt_grpo.rollout.engines.transformers import on_device
from mt_grpo.runlog import RunLogError
from mt_grpo.servers.http import ServerGoneError, ServerSetupError
from mt_grpo.weights.updates import WeightSyncError

T = TypeVar("T")

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
    """
    Turns what a backend of torch raises into a sentence: when processes cannot form a group, and when one is gone.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, UserError) or not (isinstance(error, DistError) or "gloo" in str(error).lower()):
            raise
        # without the place in the backend's code
        why = re.sub(r"\[/[^]]*\] *", "", str(error)).split(". ")[0].splitlines()[0][:160]
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


def run_here(work: Coroutine[Any, Any, T], device: torch.device) -> T:
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
