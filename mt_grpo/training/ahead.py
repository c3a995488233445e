"""
Batches that are sampled ahead, while earlier ones are trained (`max_staleness`): which rows they have, when they may
begin, and what of them a checkpoint keeps. Only the trainer's thread calls what is here; conversations run in the
background loop of the process.

Batches are numbered from 0 in the order in which they are trained. With `max_staleness: S`, batch `m` begins when the
weights that batch `m - S` is trained with are out. Its rows are the dataloader's, and its seeds those of other runs.
"""

from __future__ import annotations

import gc
import inspect
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainerState
from trl import GRPOTrainer

from mt_grpo.concurrency import BackgroundTask, run
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.envs.env import RecordedEnv
from mt_grpo.envs.source import close_environments
from mt_grpo.rewards import RewardFunc
from mt_grpo.rewards.base import Adapter, FunctionReward
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams
from mt_grpo.rollout.branching import Branching
from mt_grpo.runlog.files import to_json
from mt_grpo.tools.stateful import StatefulTool
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.media import with_column_media
from mt_grpo.training.rollout_batch import RolloutBatch, branching
from mt_grpo.trajectory import Trajectory

COLLECTED = 8
"""Batches between two full garbage collections. One takes a tenth of a second, in which no conversation goes on."""

Rows = list[dict[str, Any]]
Moment = tuple[int, int]
"""Optimiser steps that were taken before, and the micro-batch of the step, see `RolloutBatch.requests`."""


@dataclass
class Planned:
    """A batch from when its rows are read until it is trained."""

    moment: Moment
    rows: Rows
    requests: list[RolloutRequest] = field(default_factory=list)
    finished: list[Trajectory] = field(default_factory=list)
    kept: list[Trajectory] = field(default_factory=list)
    begun: BackgroundTask[list[Trajectory]] | None = None


def batches_ahead(trainer: GRPOTrainer) -> BatchesAhead | None:
    """Those of a run that begins; `None` where nothing is sampled ahead."""
    args = trainer.args
    if not args.max_staleness or trainer.replay is not None:
        return None
    rewards = [*trainer.turn_reward_funcs, *trainer.outcome_reward_funcs, *trainer.state_scores]
    process, sampling = trainer.accelerator, trainer._sampling
    return BatchesAhead(
        trainer.runner, sampling, args, rewards, branching(args, "train"), process.process_index, process.device
    )


class BatchesAhead:
    """The batches of a run that are sampled while earlier ones are trained."""

    def __init__(
        self,
        runner: RolloutRunner,
        sampling: SamplingParams,
        args: MTGRPOConfig,
        rewards: Sequence[RewardFunc],
        branching: Branching | None,
        rank: int,
        device: torch.device,
    ) -> None:
        self._runner, self._sampling, self._args, self._rewards = runner, sampling, args, rewards
        self._branching, self._rank, self._device = branching, rank, device
        self._accumulation = args.gradient_accumulation_steps
        self._every = args.steps_per_generation * args.num_iterations  # micro-batches that are trained on a batch
        self._iterator: Iterator[Rows] | None = None
        self._read: deque[Rows] = deque()
        self._planned: dict[int, Planned] = {}  # by the micro-batch of the run that it begins with, in their order
        self._restored: dict[int, Trajectory] = {}  # by the seed, which says what was asked and when
        self._out: list[int] = []  # the optimiser step of the weights that each of the latest batches was trained with

    def __enter__(self) -> BatchesAhead:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    # Rows

    def read(self, rows: Iterator[Rows], number: int, micro: int, state: TrainerState) -> Iterator[Rows]:
        """Reads rows ahead, for an optimiser step that is about to be taken."""
        step = state.global_step
        if rows is not self._iterator:  # another epoch, or run
            self._iterator = rows
            self._read.clear()
            self.stop(micro)  # of an epoch that was stopped early
        latest = (micro + number - 1) // self._every  # the last batch that this step comes for
        most = (latest + self._args.max_staleness) * self._every + 1 - micro
        while len(self._read) < max(most, number) and step + len(self._read) // self._accumulation < state.max_steps:
            try:
                self._read.append(next(rows))
            except StopIteration:
                break
        for offset, batch in enumerate(self._read):
            at = micro + offset
            if at % self._every == 0 and at not in self._planned:
                moment = step + offset // self._accumulation, at % self._accumulation
                self._planned[at] = Planned(moment, batch)
        return self._hand_out(rows)

    def _hand_out(self, rows: Iterator[Rows]) -> Iterator[Rows]:
        while self._read:
            yield self._read.popleft()
        yield from rows

    # Conversations

    def begin(self, micro: int, step: int) -> bool:
        """Begins what may begin when the weights are out with which the batch of a micro-batch is trained."""
        self._out = [*self._out, step][-self._args.max_staleness - 2 :]
        self._planned = {at: planned for at, planned in self._planned.items() if at >= micro}  # others are trained
        for at, planned in self._planned.items():
            if planned.begun is None and at <= micro + self._args.max_staleness * self._every:
                self._begin(planned)
        if micro // self._every % COLLECTED == COLLECTED - 1:
            gc.collect()  # with conversations always under way, all garbage is collected here alone
        return micro in self._planned

    def _begin(self, planned: Planned) -> None:
        rows = [with_column_media(row) for row in planned.rows]
        batch = RolloutBatch("train", rows, [False] * len(rows), self._branching)
        planned.requests = batch.requests(self._rank * len(planned.rows), planned.moment, self._args.seed)
        size = 1 if self._branching is None else self._branching.number
        missing = []
        for start in range(0, len(planned.requests), size):  # conversations of a trunk begin together
            requests = planned.requests[start : start + size]
            found = [self._restored.pop(each.seed, None) for each in requests]
            if None in found:
                missing += requests
                continue
            for request, trajectory in zip(requests, found, strict=True):
                assert trajectory is not None
                trajectory.row = request.row
                planned.finished.append(trajectory)
                planned.kept.append(trajectory)

        def check(trajectory: Trajectory) -> None:
            if is_judged_without_environment(trajectory, self._rewards):
                planned.kept.append(trajectory)

        async def sample() -> list[Trajectory]:
            if self._device.type == "cuda":  # of the background thread, whatever else runs there
                torch.cuda.set_device(self._device)
            return await self._runner.run(
                missing,
                self._sampling,
                on_finish=planned.finished.append,
                keep_environments=True,
                branching=self._branching,
                on_check=check,
            )

        planned.begun = BackgroundTask(sample()).start()

    def take(self, batch: RolloutBatch, micro: int) -> list[Trajectory]:
        """
        Waits for the batch that a micro-batch begins with, one that `begin` has begun. `batch` gets its conversations
        as they end, and its `lag`.
        """
        planned = self._planned[micro]
        assert planned.begun is not None
        batch.trajectories = planned.finished
        start = time.perf_counter()
        batch.lag.ready = len(planned.finished) / len(planned.requests)
        planned.begun.result()
        batch.lag.wait_seconds = time.perf_counter() - start
        by_session = {trajectory.session: trajectory for trajectory in planned.finished}
        found = [by_session[request.session] for request in planned.requests]
        batch.lag.turns = [
            (sum(turn.weight_version < step for step in self._out), turn.num_tokens)
            for trajectory in found
            for turn in trajectory.turns
            if turn.weight_version is not None
        ]
        return found

    def stop(self, micro: int = 0) -> None:
        """
        Ends the batches from a micro-batch on: their conversations that are under way, and the environments of those
        that are finished. What a checkpoint keeps of them stays.
        """
        ended = [planned for at, planned in self._planned.items() if at >= micro]
        for planned in ended:
            if planned.begun is not None:
                planned.begun.cancel()
        left = [each for planned in ended for each in planned.finished]
        if any(trajectory.environment is not None for trajectory in left):
            run(close_environments(left))

    # What a checkpoint keeps

    def state(self, step: int) -> dict[str, Any]:
        """
        What a run that goes on from here needs: the finished conversations of batches that are still to be trained.
        """
        finished = dict(self._restored)
        for planned in self._planned.values():
            if planned.moment[0] >= step:
                seeds = {request.session: request.seed for request in planned.requests}
                finished |= {seeds[trajectory.session]: trajectory for trajectory in list(planned.kept)}
        written = {seed: _written(trajectory) for seed, trajectory in finished.items()}
        return {"out": self._out, "finished": {seed: text for seed, text in written.items() if text is not None}}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over what `state` has returned to a run before this one."""
        self._out = list(state["out"])
        self._restored = {seed: Trajectory.from_dict(json.loads(text)) for seed, text in state["finished"].items()}


def _written(trajectory: Trajectory) -> str | None:
    """A conversation as JSON; `None` where that says less than it, so that it has to be sampled again."""
    data = trajectory.to_dict() | {"row": {}, "rewards": {}, "answer_logprobs": {}}  # read and judged again
    text = to_json(data)
    try:
        again = Trajectory.from_dict(json.loads(text)).to_dict()
    except (TypeError, ValueError, KeyError):
        return None
    return text if again == data else None


def is_judged_without_environment(trajectory: Trajectory, rewards: Sequence[RewardFunc]) -> bool:
    """
    Whether rewards need nothing of a conversation but what a record of it has: the environment that it was held with
    is one of ours, which leaves nothing behind that they could look at.
    """
    env = trajectory.environment
    if any(map(_asks_for_environments, rewards)):
        return False
    ours = type(env).__module__.startswith("mt_grpo.")
    tools = env.tools.values() if isinstance(env, MultiTurnToolEnv) else []
    stateful = any(isinstance(tool, StatefulTool) for tool in tools)
    return ours and not stateful and not isinstance(env, (Adapter, RecordedEnv))


def _asks_for_environments(reward: RewardFunc) -> bool:
    if not isinstance(reward, FunctionReward) or not reward.takes_environments:
        return False
    return "environments" in inspect.signature(reward.function, follow_wrapped=False).parameters
