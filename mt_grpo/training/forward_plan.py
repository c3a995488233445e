"""
The trainer's forwards: how a batch becomes a `ForwardPlan`, with the distribution that tokens were sampled from, and
its scores the tensors that TRL's loss takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, gather, gather_object
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from trl import GRPOTrainer

from mt_grpo.errors import ConfigError, UnsupportedModelError, WeightSyncError, refuse_first
from mt_grpo.forward.lm_head import Truncation
from mt_grpo.forward.media import Media, MediumInputs
from mt_grpo.forward.model import ForwardPlan, check_sequence_parallel, enable_trees, score
from mt_grpo.forward.packing import FlatTree, SequenceGroup
from mt_grpo.forward.probe import prove, prove_media
from mt_grpo.forward.routes import has_router_loss, route_shape
from mt_grpo.media import SOUND, kind_of
from mt_grpo.options.rules import check_sharing
from mt_grpo.rollout import SamplingParams, TokenRow
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.rollout_batch import IMAGES, TOP, Columns, RolloutBatch, batch_trees, exchange, row_tree

logger = logging.getLogger(__name__)

_SEVERAL = "several"
"""Stands for sounds of several lengths in one batch: some models hear one otherwise beside a longer one."""


class Forwards:
    """The forwards of a trainer: the `plan` that all have in common, the plans of a batch, and the proofs of them."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        args = trainer.args
        self._trainer = trainer
        self._proven: set[object] = set()  # see `prove_shown`
        self._shown_alike = False
        self._asks_for_routes = route_shape(trainer.model.config) is not None
        if trainer.aux_loss_enabled and not has_router_loss(trainer.model.config):  # as of some of Granite 4
            coef = args.router_aux_loss_coef
            refuse_first(
                (coef, f"`router_aux_loss_coef: {coef}` balances experts, and this model has none: leave it out.")
            )
            trainer.aux_loss_enabled = False
        group = _sequence_group(trainer)
        by_turn = args.forward == "turn_by_turn"
        refuse_first(
            (
                by_turn and trainer.accelerator.num_processes > 1,
                "`forward: turn_by_turn` runs on one process only; set `forward: tree`.",
            ),
            (
                by_turn and trainer.aux_loss_enabled,
                "`forward: turn_by_turn` has no loss that balances experts, because that depends on every token of a "
                "batch; set `router_aux_loss_coef: 0.0`, or `forward: tree`.",
            ),
            (
                args.forward == "tree" and args.tree_attention == "flex" and trainer.accelerator.device.type == "cpu",
                "`tree_attention: flex` needs a GPU, and this run is on a CPU: leave it out, or set `tree_attention: "
                "segment`.",
            ),
        )
        truncation = trained_truncation(args)
        self.plan = ForwardPlan(
            attention=args.tree_attention,
            temperature=args.temperature,
            truncation=None if args.forward == "padded" else truncation,  # TRL's own forward knows of temperature only
            group=group,
        )
        self.gave_up_trees = False
        if args.forward == "tree":
            try:
                for model in filter(None, (trainer.model, trainer.ref_model, trainer.teacher_model)):
                    enable_trees(trainer.accelerator.unwrap_model(model), args.cast_lm_head_to_fp32)
            except UnsupportedModelError as error:
                self._give_up_trees(error)

    def plan_of_rollouts(self, batch: RolloutBatch) -> ForwardPlan:
        """For log-probs of a batch that are taken before its loss, without a gradient."""
        shown = {number: image for row in batch.token_rows for number, image in row.media.items()}
        return replace(
            self.plan,
            trees=[row_tree(row) for row in batch.token_rows],
            leaves=batch.leaf_trees,
            media={**self._trainer.blank, **shown},
            forward=self._trainer.args.forward,
        )

    def plan_of_loss(self, inputs: Columns) -> ForwardPlan:
        """For the loss of a micro-batch, which all processes of a sequence group compute together in training."""
        shown = {number: MediumInputs(*image) for row in inputs.get(IMAGES) or () for number, image in row.items()}
        return replace(
            self.plan,
            trees=batch_trees(inputs),
            media={**self._trainer.blank, **shown},
            forward=self._trainer.args.forward,
            candidates=_candidates(inputs) if TOP in inputs else (),
            shared=self._trainer.model.training,
        )

    @property
    def has_old_forward(self) -> bool:
        """Whether TRL computes a batch's log-probs before its rewards, in its first forward without a loss."""
        args = self._trainer.args
        aligned = args.gradient_accumulation_steps % (args.steps_per_generation * self._trainer.num_iterations) == 0
        return not aligned or (self._trainer.use_vllm and self._trainer.vllm_importance_sampling_correction)

    def trl_scores(self, plan: ForwardPlan) -> bool:
        """Whether TRL's own forward computes log-probs: it knows of rows, and of few names for experts."""
        config = self._trainer.model.config.get_text_config()
        counts_experts = not self._trainer.aux_loss_enabled or getattr(config, "num_experts", None) is not None
        rows = plan.forward == "padded" and not self.gave_up_trees and not plan.media and not plan.candidates
        return (
            rows and counts_experts and all(isinstance(tree, FlatTree) and tree.parent is None for tree in plan.trees)
        )

    # Proofs, before a batch is trained

    def prove(self, length: int) -> None:
        """Proves `forward: tree` in training for rows of up to `length` tokens, or pads from now on. Collective."""
        if self._trainer.model.training and (self._trainer.args.forward == "tree" or self.gave_up_trees):
            plan = ForwardPlan(attention=self._trainer.args.tree_attention, group=self.plan.group)
            self._hold(plan, lambda model, plan, precision: prove(model, length, plan, precision))

    def _hold(self, plan: ForwardPlan, proof: Callable[[nn.Module, ForwardPlan, str], None]) -> None:
        """Holds a proof over trees, or in padded rows where they are given up, now or before."""
        trainer, forward = self._trainer, self._trainer.args.forward
        try:
            with trainer.accelerator.autocast():
                for model in filter(None, (trainer.model_wrapped, trainer.ref_model, trainer.teacher_model)):
                    proof(model, replace(plan, forward=forward), trainer.accelerator.mixed_precision)
        except UnsupportedModelError as error:
            if forward == "padded":
                raise
            self._give_up_trees(error)
            self._hold(plan, proof)

    def prove_shown(self, rows: Sequence[TokenRow]) -> None:
        """Proves `forward` on a batch's shortest trajectories with media, the same ones on every rank. Collective."""
        mine: dict[object, TokenRow] = {}
        for row in sorted(rows, key=lambda row: len(row.prompt_ids) + len(row.ids), reverse=True):
            if any(row.mask):
                kinds: set[object] = {kind_of(number) for number in row.media}
                sounds = {image.lengths for number, image in row.media.items() if kind_of(number) == SOUND}
                mine |= dict.fromkeys(kinds | sounds, row)  # the shortest at last
        shown = set().union(*gather_object([set(mine)]))
        lengths = sorted(each for each in shown if isinstance(each, tuple))
        new = (shown - set(lengths) | ({_SEVERAL} if len(lengths) > 1 else set())) - self._proven
        self._proven |= new
        if not new or self._trainer.args.forward == "turn_by_turn":
            return
        wanted = [*(new - {_SEVERAL}), *(lengths[:1] + lengths[-1:] if new & {SOUND, _SEVERAL} else [])]
        found: list[dict[object, TokenRow]] = gather_object([{each: mine[each] for each in wanted if each in mine}])
        chosen = {
            id(row): row for each in wanted for row in [next(of_rank[each] for of_rank in found if each in of_rank)]
        }
        media: Media = {number: image for row in chosen.values() for number, image in row.media.items()}
        trees = [row_tree(row) for row in chosen.values()]
        self._hold(ForwardPlan(trees, media=media, attention=self._trainer.args.tree_attention), prove_media)

    def hold_shown(self, batch: RolloutBatch, output: Columns, tolerance: float) -> None:
        """
        Refuses servers that show images or play sounds in another way than the trainer, which their proof of text does
        not tell: by the first conversations with some, sampled with the weights of the moment. Collective.
        """
        if self._shown_alike or "importance_sampling_ratio" not in output or _inexact_options(self._trainer.args):
            return
        now = {self._trainer.state.global_step}
        rows = [
            bool(row.media) and all({turn.weight_version, turn.last_weight_version} == now for turn in one.turns)
            for row, one in zip(batch.token_rows, batch.trajectories, strict=True)
        ]
        apart = (output["old_per_token_logps"] - output["sampling_per_token_logps"]).abs().float()
        trained = (output["completion_mask"] * output["tool_mask"]).bool() & ~apart.isnan()
        apart = apart[trained & torch.tensor(rows, device=trained.device)[:, None]]
        total, count = gather(torch.stack([apart.sum(), apart.new_tensor(len(apart))])[None]).sum(dim=0).tolist()
        self._shown_alike = count > 0
        if total > tolerance * count:
            raise WeightSyncError(
                "The servers sample from other images or sounds than the trainer computes with: log-probs of "
                f"conversations that have some are {total / count:.2e} nats a token apart, and {tolerance:.1e} is "
                "allowed. Let the servers have the trainer's model, its configuration and its versions, or leave "
                "`use_vllm` out."
            )

    def _give_up_trees(self, error: UnsupportedModelError) -> None:
        reason, size = str(error).partition(", so trees cannot be packed")[0].rstrip("."), self._trainer.args.sp_size
        if self.plan.group is not None:
            raise ConfigError(
                f"{reason}, and `sp_size: {size}` shares packed trees among processes: leave `sp_size` out."
            ) from error
        self._trainer.args.forward, self.gave_up_trees = "padded", True
        if PartialState().is_main_process:
            logger.warning(
                "%s. So trees are not packed in this run: each sequence is a row of its own (`forward: padded`), and "
                "prefixes that sequences share are computed once for each.",
                reason,
            )

    def warn_without_routes(self, batch: RolloutBatch) -> None:
        """Warns, once, where an engine has not said which experts sampled tokens went to."""
        if not self._asks_for_routes or not any(row.logprobs for row in batch.token_rows):
            return
        self._asks_for_routes = False
        if PartialState().is_main_process and not any(row.routes for row in batch.token_rows):
            logger.warning(
                "The engine does not say which experts its tokens went to, so some are trained through others: start "
                "the server with `mt-grpo serve`, which asks vLLM for `--enable-return-routed-experts`, or set "
                "`router_replay: false` to go without."
            )


def _candidates(columns: Columns) -> list[np.ndarray]:
    """For each row of a batch the teacher's likeliest tokens, `(tokens, k)`, in the place of each of its tokens."""
    found = []
    for prompt, completion, top in zip(columns["prompt_mask"], columns["completion_mask"], columns[TOP], strict=True):
        ids = top[: int(completion.sum()), 0].nan_to_num(nan=0.0).long().cpu().numpy()
        found.append(np.concatenate([np.zeros((int(prompt.sum()), ids.shape[1]), dtype=np.int64), ids]))
    return found


def _sequence_group(trainer: GRPOTrainer) -> SequenceGroup | None:
    """The processes that share rows with this one: accelerate's own are for rows cut before sampling. Collective."""
    size, accelerator = trainer.args.sp_size, trainer.accelerator
    config = accelerator.parallelism_config
    if config is not None and max(config.sp_size, config.cp_size, config.tp_size) > 1:
        raise ConfigError(
            "accelerate is configured to split sequences or layers (`parallelism_config`), which training has no use "
            "for: leave it out, and set `sp_size` in the recipe."
        )
    if size == 1 or accelerator.num_processes == 1:
        return None
    check_sharing(size, accelerator.num_processes)
    spread = accelerator.distributed_type
    if spread == DistributedType.DEEPSPEED or (spread == DistributedType.FSDP and not accelerator.is_fsdp2):
        name = "DeepSpeed" if spread == DistributedType.DEEPSPEED else "FSDP 1"
        raise ConfigError(
            f"`sp_size: {size}` takes a backward for each micro-batch of its group before a step, which {name} does "
            "not: shard with FSDP2 (`--accelerate_config fsdp2`), or leave `sp_size` out."
        )
    if trainer.aux_loss_enabled:
        raise ConfigError(
            f"`sp_size: {size}` has no loss that balances experts, since that depends on every token of a row: set "
            "`router_aux_loss_coef: 0.0`, or leave `sp_size` out."
        )
    for model in filter(None, (trainer.model, trainer.ref_model, trainer.teacher_model)):
        try:
            check_sequence_parallel(accelerator.unwrap_model(model), size)
        except UnsupportedModelError as error:
            raise ConfigError(str(error)) from error
    return SequenceGroup.of_neighbours(size, accelerator.device)


class _BatchScores(NamedTuple):
    """Log-probs and entropies `(B, T)`, 0 where none is trained; the mean log-probs of each row's leaves' turns."""

    logps: Tensor
    entropies: Tensor
    router_loss: Tensor | None
    leaf_means: list[list[list[float]]]


def score_batch(
    model: nn.Module, plan: ForwardPlan, attention_mask: Tensor, width: int, batch_size: int | None = None
) -> _BatchScores:
    """Scores a plan of a batch's rows, `batch_size` at a time; every rank makes as many forwards."""
    prompts = attention_mask[:, :-width].sum(dim=1).cpu().numpy()
    size = batch_size or len(plan.trees)
    places, found, losses, means = [], [], [], []
    for number, part in enumerate(plan.split(size)):
        scores = score(model, part)
        of_rows = np.flatnonzero(scores.tree < len(part.trees))
        row = scores.tree[of_rows] + number * size
        places.append(np.stack([row, scores.column[of_rows] - prompts[row]]))
        chosen = torch.from_numpy(of_rows).to(scores.logps.device)
        found.append((scores.logps[chosen], scores.entropies[chosen]))
        losses += [] if scores.router_loss is None else [scores.router_loss]
        turns = [tree.num_turns for of_row in part.leaves for tree in of_row]
        of_leaves = iter(scores.turn_means(turns, len(part.trees)))
        means += [[next(of_leaves) for _ in of_row] for of_row in part.leaves]
    logps, entropies = map(torch.cat, zip(*found, strict=True))
    place = tuple(torch.from_numpy(np.concatenate(places, axis=1)).to(logps.device))
    logps, entropies = (
        values.new_zeros(len(plan.trees), width, *values.shape[1:]).index_put(place, values)
        for values in (logps, entropies)
    )
    return _BatchScores(logps, entropies, torch.stack(losses).mean() if losses else None, means)


def loss_of_group(
    trainer: GRPOTrainer, model: nn.Module, inputs: Columns, loss_of: Callable[[dict[str, Any]], Tensor]
) -> Tensor:
    """The loss of this process's micro-batch; the processes of a group compute all of theirs together, in turn."""
    group: SequenceGroup = trainer.forwards.plan.group
    parts = exchange([inputs] * group.size, inputs["completion_ids"].device, group.group)
    for part in parts:
        part.pop("row_ids", None)  # the process that has a row takes note of it
    parts[group.rank] = inputs
    losses = []
    for number, part in enumerate(parts, start=1):
        # DDP sums gradients once, FSDP2 after each backward, so that whole gradients are not kept
        with model.no_sync() if number < group.size and isinstance(model, DistributedDataParallel) else nullcontext():
            loss = loss_of(part)
            losses.append(loss.detach())
            if number < group.size:
                trainer.accelerator.backward(loss)  # TRL's loss is divided by the steps of accumulation already
    return loss + (losses[group.rank] - loss.detach())


def keep_outputs_exact(accelerator: Accelerator) -> None:
    """
    Keeps FSDP2 from rounding the model's outputs, and gradients between ranks, to the precision that it computes in.
    Log-probs in bfloat16 have three digits, so a ratio of two would be off by a percent, and a sum of gradients would
    lose the small ones. accelerate has no key for either.
    """
    if accelerator.is_fsdp2 and accelerator.state.fsdp_plugin.mixed_precision_policy is not None:
        plugin = accelerator.state.fsdp_plugin
        plugin.mixed_precision_policy = replace(
            plugin.mixed_precision_policy, output_dtype=None, reduce_dtype=torch.float32
        )


# The distribution that tokens are sampled from


def _read_truncation(args: MTGRPOConfig) -> Truncation | None:
    """The truncation that a run samples with; `None` if there is none."""
    sampling = sampling_params(args)
    truncation = Truncation(max(sampling.top_k, 0), sampling.top_p, sampling.min_p)
    return None if truncation == Truncation() else truncation


def sampling_params(args: MTGRPOConfig) -> SamplingParams:
    """The sampling options of a run."""
    return SamplingParams(
        temperature=args.temperature,
        top_p=1.0 if args.top_p is None else args.top_p,  # as in TRL, `None` keeps all
        top_k=args.top_k or 0,
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
    )


def _inexact_options(args: MTGRPOConfig) -> list[str]:
    """Options, as `name: value`, that change what is sampled, and that the log-probs of training do not follow."""
    names = ["repetition_penalty"] if args.repetition_penalty != 1 else []
    if args.forward == "padded":  # TRL's own forward, which knows of temperature only
        chosen = vars(_read_truncation(args) or Truncation())
        names += [name for name, value in chosen.items() if value != vars(Truncation())[name]]
    return [f"`{name}: {getattr(args, name)}`" for name in names]


def trained_truncation(args: MTGRPOConfig) -> Truncation | None:
    """As `_read_truncation`. Warns if training computes the log-probs of another distribution nevertheless."""
    truncation, inexact = _read_truncation(args), _inexact_options(args)
    if inexact and PartialState().is_main_process:
        logger.warning(
            "%s changes what is sampled, but not the log-probs that are trained, so ratios and gradients are biased: "
            "%s.",
            " with ".join(inexact),
            _mend(inexact),
        )
    return truncation


def _mend(inexact: list[str]) -> str:
    leave = "leave it out" if len(inexact) == 1 else "leave them out"
    penalised = any("repetition_penalty" in option for option in inexact)
    return leave if penalised else f"set `forward: tree`, or {leave}"


def check_importance_sampling(args: MTGRPOConfig) -> None:
    """Refuses ratios of whole trajectories between two distributions, and what TRL's own client refuses."""
    if not args.vllm_importance_sampling_correction:
        return
    inexact, mode = _inexact_options(args), str(args.vllm_importance_sampling_mode)
    by_token = ("token_truncate", "token_mask")
    refuse_first(
        (
            inexact and mode.startswith("sequence"),
            f"{' with '.join(inexact)} changes what is sampled, but not the log-probs that are trained, and "
            f"`vllm_importance_sampling_mode: {mode}` multiplies the difference over all tokens of a trajectory: "
            f"{_mend(inexact)}, or set `vllm_importance_sampling_mode: token_truncate`.",
        ),
        (
            args.loss_type == "vespo" and mode not in by_token,
            f"`loss_type: vespo` needs `vllm_importance_sampling_mode` to be one of {', '.join(by_token)}, not "
            f"{mode!r}.",
        ),
    )
