"""
Prefetch: sampling batches while earlier ones are trained (`max_staleness`). Which rows they have, when they may begin,
and what of them a checkpoint keeps. Only the trainer's thread calls what is here; conversations run in the background
loop of the process.

Batches are numbered from 0 in the order in which they are trained. With `max_staleness: S`, batch `m` begins when the
weights that batch `m - S` is trained with are out. Its rows are the dataloader's, and its seeds those of other runs.

Staleness: how far such conversations are from the policy, and a smaller step where that is too far. TRL computes the
old log-probs with the weights of the moment, and multiplies the loss by their ratio to the sampled ones, cut at
`vllm_importance_sampling_clip_max`. With one iteration PPO's own clip does nothing, so this cut is the only bound per
token. For the whole batch it is the effective sample size of the ratios of whole conversations, which predicts a
collapse (arXiv 2602.17616).
"""

from __future__ import annotations

import copy
import gc
import inspect
import json
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather
from transformers import PreTrainedModel, TrainerCallback, TrainerState
from trl import GRPOTrainer
from trl.distributed import DistributedBackend

from mt_grpo.concurrency import BackgroundTask, run
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.envs.env import RecordedEnv
from mt_grpo.envs.source import close_environments
from mt_grpo.errors import ConfigError, WeightSyncError
from mt_grpo.rewards import RewardFunc
from mt_grpo.rewards.base import Adapter, FunctionReward
from mt_grpo.rollout import Engine, RolloutRequest
from mt_grpo.rollout.engines.transformers import TransformersEngine
from mt_grpo.runlog.files import to_json
from mt_grpo.tools.loading import StatefulTool
from mt_grpo.training.columns import with_column_media
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.rollout_batch import Columns, RolloutBatch
from mt_grpo.trajectory import Row, Trajectory
from mt_grpo.weights.transport import EXACT, NARROW, compare, probe_ids, trainer_logprobs, with_halved_weights

_BATCHES_BETWEEN_COLLECTIONS = 8
"""Batches between two full garbage collections. One takes a tenth of a second, in which no conversation goes on."""

_LEAST_SHARE = 0.25  # effective share of a batch below which its steps are made smaller

STEP_FACTOR = "step_factor"
"""In a batch: what the learning rate of its steps is multiplied by. So a checkpoint has it."""

Rows = list[Row]

logger = logging.getLogger(__name__)


@dataclass
class _PrefetchedBatch:
    """A batch from when its rows are read until it is trained."""

    moment: tuple[int, int]
    """Optimiser steps that were taken before, and the micro-batch of the step, see `RolloutBatch.requests`."""
    rows: Rows
    requests: list[RolloutRequest] = field(default_factory=list)
    finished: list[Trajectory] = field(default_factory=list)
    kept: list[Trajectory] = field(default_factory=list)  # those of the finished that a checkpoint may keep
    sampling: BackgroundTask[list[Trajectory]] | None = None


class PrefetchQueue:
    """The batches of a run that are sampled while earlier ones are trained."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        args = self._args = trainer.args
        self._distillation = trainer.distillation
        self._runner, self._sampling = trainer.runner, trainer._sampling
        self._rewards = [*trainer.turn_reward_funcs, *trainer.outcome_reward_funcs, *trainer.state_scores]
        self._rank, self._device = trainer.accelerator.process_index, trainer.accelerator.device
        self._branching = args.branching("train")
        self._accumulation = args.gradient_accumulation_steps
        self._every = args.steps_per_generation * args.num_iterations  # micro-batches that are trained on a batch
        self._iterator: Iterator[Rows] | None = None
        self._read: deque[Rows] = deque()
        self._batches: dict[int, _PrefetchedBatch] = {}  # by the run's micro-batch that each begins with, in order
        self._restored: dict[int, Trajectory] = {}  # by the seed, which says what was asked and when
        self._steps_out: list[int] = []  # of the weights that each of the latest batches was trained with

    def __enter__(self) -> PrefetchQueue:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    # Rows

    def read(self, rows: Iterator[Rows], number: int, micro: int, state: TrainerState) -> Iterator[Rows]:
        """Reads the rows of later batches, before an optimiser step of `number` micro-batches."""
        step = state.global_step
        if rows is not self._iterator:  # another epoch, or run
            self._iterator = rows
            self._read.clear()
            self.stop(micro)  # of an epoch that was stopped early, whose rows are not trained
            self._batches = {at: batch for at, batch in self._batches.items() if at < micro}
        latest = (micro + number - 1) // self._every  # the last batch that this step comes for
        most = (latest + self._args.max_staleness) * self._every + 1 - micro
        while len(self._read) < max(most, number) and step + len(self._read) // self._accumulation < state.max_steps:
            try:
                self._read.append(next(rows))
            except StopIteration:
                break
        for offset, batch in enumerate(self._read):
            at = micro + offset
            if at % self._every == 0 and at not in self._batches:
                moment = step + offset // self._accumulation, at % self._accumulation
                self._batches[at] = _PrefetchedBatch(moment, batch)
        return self._hand_out(rows)

    def _hand_out(self, rows: Iterator[Rows]) -> Iterator[Rows]:
        while self._read:
            yield self._read.popleft()
        yield from rows

    # Conversations

    def begin(self, micro: int, step: int) -> bool:
        """Begins what may begin now that a micro-batch's weights are out; says whether its batch is in the queue."""
        self._steps_out = [*self._steps_out, step][-self._args.max_staleness - 2 :]
        self._batches = {at: batch for at, batch in self._batches.items() if at >= micro}  # others are trained
        for at, batch in self._batches.items():
            if batch.sampling is None and at <= micro + self._args.max_staleness * self._every:
                self._begin(batch)
        if (micro // self._every + 1) % _BATCHES_BETWEEN_COLLECTIONS == 0:
            gc.collect()  # with conversations always under way, all garbage is collected here alone
        return micro in self._batches

    def _begin(self, batch: _PrefetchedBatch) -> None:
        rows = [with_column_media(row) for row in batch.rows]
        asked = RolloutBatch("train", rows, [False] * len(rows), self._branching)
        batch.requests = asked.requests(self._rank * len(batch.rows), batch.moment, self._args.seed)
        size = 1 if self._branching is None else self._branching.number
        missing = []
        for start in range(0, len(batch.requests), size):  # conversations of a trunk begin together
            requests = batch.requests[start : start + size]
            found = [self._restored.pop(each.seed, None) for each in requests]
            if None in found:
                missing += requests
                continue
            for request, trajectory in zip(requests, found, strict=True):
                assert trajectory is not None
                trajectory.row = request.row
                batch.finished.append(trajectory)
                batch.kept.append(trajectory)

        def check(trajectory: Trajectory) -> None:
            if _is_judged_without_environment(trajectory, self._rewards):
                batch.kept.append(trajectory)

        async def sample() -> list[Trajectory]:
            if self._device.type == "cuda":  # of the background thread, whatever else runs there
                torch.cuda.set_device(self._device)
            teacher, keep = self._distillation, batch.finished.append
            return await self._runner.run(
                missing,
                self._sampling,
                on_finish=keep if teacher is None else teacher.as_they_end(keep),
                keep_environments=True,
                branching=self._branching,
                on_check=check,
            )

        batch.sampling = BackgroundTask(sample()).start()

    def take(self, batch: RolloutBatch, micro: int) -> list[Trajectory]:
        """Waits for a micro-batch's batch that `begin` has begun; `batch` gets its conversations and `staleness`."""
        prefetched = self._batches[micro]
        assert prefetched.sampling is not None
        batch.trajectories = prefetched.finished
        start = time.perf_counter()
        batch.staleness.ready = len(prefetched.finished) / len(prefetched.requests)
        prefetched.sampling.result()
        batch.staleness.wait_seconds = time.perf_counter() - start
        by_session = {trajectory.session: trajectory for trajectory in prefetched.finished}
        found = [by_session[request.session] for request in prefetched.requests]
        batch.staleness.turns = [
            (sum(turn.weight_version < step for step in self._steps_out), turn.num_tokens)
            for trajectory in found
            for turn in trajectory.turns
            if turn.weight_version is not None
        ]
        return found

    def stop(self, micro: int = 0) -> None:
        """Ends the batches from a micro-batch on, and their environments; what a checkpoint keeps of them stays."""
        ended = [batch for at, batch in self._batches.items() if at >= micro]
        for batch in ended:
            if batch.sampling is not None:
                batch.sampling.cancel()
        left = [each for batch in ended for each in batch.finished]
        if any(trajectory.environment is not None for trajectory in left):
            run(close_environments(left))

    # What a checkpoint keeps

    def state(self, step: int) -> dict[str, Any]:
        """What a run that resumes here needs: the finished conversations of batches that are still to be trained."""
        finished = dict(self._restored)
        for batch in self._batches.values():
            if batch.moment[0] >= step:
                seeds = {request.session: request.seed for request in batch.requests}
                finished |= {seeds[trajectory.session]: trajectory for trajectory in list(batch.kept)}
        written = {seed: _written(trajectory) for seed, trajectory in finished.items()}
        return {"out": self._steps_out, "finished": {seed: text for seed, text in written.items() if text is not None}}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over what `state` has returned to a run before this one."""
        self._steps_out = list(state["out"])
        self._restored = {seed: Trajectory.from_dict(json.loads(text)) for seed, text in state["finished"].items()}


def _written(trajectory: Trajectory) -> str | None:
    """A conversation as JSON; `None` if it does not come back from that as it is, so that it is sampled again."""
    data = trajectory.to_dict() | {"row": {}, "rewards": {}, "answer_logprobs": {}}  # read and judged again
    text = to_json(data)
    try:
        again = Trajectory.from_dict(json.loads(text)).to_dict()
    except (TypeError, ValueError, KeyError):
        return None
    return text if again == data else None


def _is_judged_without_environment(trajectory: Trajectory, rewards: Sequence[RewardFunc]) -> bool:
    """Whether rewards need only a conversation's record: its environment, one of ours, leaves nothing behind."""
    for reward in rewards:
        if isinstance(reward, FunctionReward) and reward.takes_environments:
            if "environments" in inspect.signature(reward.function, follow_wrapped=False).parameters:
                return False
    env = trajectory.environment
    ours = type(env).__module__.startswith("mt_grpo.") and not isinstance(env, (Adapter, RecordedEnv))
    tools = env.tools.values() if isinstance(env, MultiTurnToolEnv) else []
    return ours and not any(isinstance(tool, StatefulTool) for tool in tools)


def effective_sample_size(output: Columns) -> float:
    """
    The share of a batch that counts where conversations weigh by the ratio of the policy's probability to that of the
    weights they were sampled with: `(Σ w)² / (n Σ w²)` over the `n` of all processes with a trained token, NaN without
    one. `output` has the log-probs `(B, T)` of both and masks. This is a collective call.
    """
    trained = output["completion_mask"] * output["tool_mask"]
    log_ratios = (output["old_per_token_logps"] - output["sampling_per_token_logps"]) * trained
    sums = gather(log_ratios.nan_to_num(nan=0.0).double().sum(dim=1))[gather(trained.bool().any(dim=1))]
    if not len(sums):
        return float("nan")
    weights = (sums - sums.max()).exp()
    return (weights.sum() ** 2 / (len(sums) * (weights**2).sum())).item()


class SmallerSteps(TrainerCallback):
    """Multiplies the learning rate of a batch's steps by its effective share, below `_LEAST_SHARE`, and says so."""

    def __init__(self) -> None:
        self._changed: list[tuple[dict[str, Any], float, float]] = []
        self._said = False

    def factor(self, effective: float) -> float:
        """What the learning rate is multiplied by for a batch of this effective share."""
        factor = effective if effective < _LEAST_SHARE else 1.0
        if factor < 1.0 and not self._said and PartialState().is_main_process:
            self._said = True
            logger.warning(
                "Effective sample size is only %.0f %% of the batch: its samples are too off-policy. The learning "
                "rate of its steps is multiplied by that, here and wherever it is below %.0f %% "
                "(`staleness/effective_sample_size`). If that stays so, lower `max_staleness` or `learning_rate`.",
                100 * effective,
                100 * _LEAST_SHARE,
            )
        return factor

    def before(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Before the backward pass of a batch of this factor; DeepSpeed takes its step in it."""
        if factor < 1.0 and not self._changed:
            for group in optimizer.param_groups:
                small = group["lr"] * factor
                self._changed.append((group, group["lr"], small))
                group["lr"] = small

    def on_optimizer_step(self, *args: object, **kwargs: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Gives the optimizer its learning rate back, after a step or where one is broken off."""
        for group, rate, small in self._changed:
            if group["lr"] == small:  # else a schedule has gone on already, as DeepSpeed's does
                group["lr"] = rate
        self._changed = []


class ModelCopy:
    """The weights that an engine here samples with while the trainer changes its own; called as a `WeightSync` is."""

    def __init__(self, engine: Engine, model: PreTrainedModel, accelerator: Accelerator, args: MTGRPOConfig) -> None:
        otherwise = "set `use_vllm: true`, or leave `max_staleness` at 0."
        if not isinstance(engine, TransformersEngine):
            raise ConfigError(
                f"`max_staleness: {args.max_staleness}` samples while the model is trained, and "
                f"{type(engine).__name__} samples from the model that is trained: {otherwise}"
            )
        backend = DistributedBackend(accelerator)
        if backend.is_fsdp or backend.is_zero3:
            raise ConfigError(
                f"`max_staleness: {args.max_staleness}` without a server samples from a copy of the model, and the "
                f"weights of this one are sharded: {otherwise}"
            )
        model = accelerator.unwrap_model(model)
        self._engine, self._model = engine, model
        self._copy = copy.deepcopy(model).requires_grad_(False).eval()
        for module in self._copy.modules():
            # what extends a forward may hold on to the model that it extends, as TRL's does
            vars(module).pop("forward", None)
        if args.cast_lm_head_to_fp32:
            head = self._copy.get_output_embeddings()
            head.register_forward_pre_hook(lambda layer, states: (states[0].to(layer.weight.dtype),))
        self._verify_every, self._num_syncs = args.verify_sync_every, 0
        self._probe = probe_ids(model.config.get_text_config().vocab_size)
        narrow = accelerator.mixed_precision != "no" or next(model.parameters()).dtype != torch.float32
        self._tolerance = NARROW if narrow else EXACT
        engine.use_model(self._copy)
        engine.context = accelerator.autocast
        before = self._answers()
        with with_halved_weights(self._copy):
            if compare(self._answers(), before).difference < 2 * self._tolerance:
                raise ConfigError(
                    f"A copy of this {type(model).__name__} does not answer with weights of its own, so that it "
                    f"cannot sample while the model is trained: {otherwise}"
                )

    @torch.no_grad()
    def sync(self, step: int) -> None:
        """Takes over the trainer's weights as they are after optimiser step `step`."""
        with self._engine.update:
            for mine, theirs in zip(_tensors(self._copy), _tensors(self._model), strict=True):
                mine.copy_(theirs)
            self._engine.weight_version = step
            if self._num_syncs % self._verify_every == 0:
                with self._engine.context():
                    expected = trainer_logprobs(self._model, self._probe)
                difference = compare(self._answers(), expected).difference
                if difference > self._tolerance:
                    raise WeightSyncError(
                        f"The copy of the model that conversations are sampled with differs from the model by "
                        f"{difference:.2e} nats a token, and {self._tolerance:.1e} is allowed: set `use_vllm: true`, "
                        "or leave `max_staleness` at 0."
                    )
            self._num_syncs += 1

    def _answers(self) -> list[float]:
        with self._engine.context():
            return trainer_logprobs(self._copy, self._probe)

    def check(self) -> None:
        """Nobody else writes to it."""

    def close(self) -> None:
        """There is nothing to give back."""


def _tensors(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
