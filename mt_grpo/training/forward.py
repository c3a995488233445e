"""Computes log-probs for the trainer, under the distribution that tokens are sampled from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
from torch import Tensor, nn
from trl import GRPOTrainer

from mt_grpo.errors import ConfigError, UnsupportedModelError
from mt_grpo.forward.lm_head import Truncation
from mt_grpo.forward.media import Media, feature_lengths
from mt_grpo.forward.model import enable_trees
from mt_grpo.forward.probe import prove, prove_images, prove_rows
from mt_grpo.forward.reference import turn_by_turn_logps
from mt_grpo.forward.routes import has_router_loss
from mt_grpo.forward.sequence_parallel import SequenceGroup
from mt_grpo.media import SOUND, kind_of
from mt_grpo.rollout import SamplingParams
from mt_grpo.rollout.token_row import TokenRow
from mt_grpo.token_tree import TokenTree
from mt_grpo.training.batch import OPTIONAL, TokenColumns, batch_logps, flat_tree, rows_logps
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.rollout_batch import RolloutBatch

logger = logging.getLogger(__name__)


def prepare_forward(trainer: GRPOTrainer) -> dict[str, Any]:
    """Prepares the policy and the reference of a trainer for its `forward`."""
    args = trainer.args
    if args.forward == "turn_by_turn" and trainer.accelerator.num_processes > 1:
        raise ConfigError("`forward: turn_by_turn` runs on one process only; set `forward: tree`.")
    if args.forward == "turn_by_turn" and trainer.aux_loss_enabled:
        raise ConfigError(
            "`forward: turn_by_turn` has no loss that balances experts, because that depends on every token of a "
            "batch; set `router_aux_loss_coef: 0.0`, or `forward: tree`."
        )
    truncation = trained_truncation(args)
    # TRL's own forward knows of temperature only
    distribution = {"temperature": args.temperature, "truncation": None if args.forward == "padded" else truncation}
    if args.forward == "tree":
        if args.tree_attention == "flex" and trainer.accelerator.device.type == "cpu":
            raise ConfigError(
                "`tree_attention: flex` needs a GPU, and this run is on a CPU: leave it out, or set `tree_attention: "
                "segment`."
            )
        try:
            for policy in filter(None, (trainer.model, trainer.ref_model)):
                enable_trees(trainer.accelerator.unwrap_model(policy), args.cast_lm_head_to_fp32)
        except UnsupportedModelError as error:
            _give_up_trees(trainer, error)
    return distribution


def completion_logps(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    columns: TokenColumns,
    args: MTGRPOConfig,
    distribution: dict[str, Any],
    batch_size: int | None = None,
    leaves: Sequence[Sequence[TokenTree]] = (),
    router_losses: list[Tensor] | None = None,
    images: Media | None = None,
    sequence: SequenceGroup | None = None,
    shared: bool = False,
) -> tuple[Tensor, Tensor, list[list[list[float]]]]:
    """Log-probabilities and entropies of the completions of a TRL batch."""
    split = input_ids.size(1) - columns.scored.size(1)
    prompt_ids, ids = input_ids[:, :split], input_ids[:, split:]
    prompt_mask, mask = attention_mask[:, :split], attention_mask[:, split:]
    if args.forward == "turn_by_turn":
        logps, entropies = turn_by_turn_logps(
            model,
            prompt_ids,
            prompt_mask,
            ids,
            columns.scored,
            columns.turn_ids,
            columns.parent,
            images=images,
            **distribution,
        )
        return logps, entropies, []
    if args.forward == "padded":
        tensors = [prompt_ids, prompt_mask, ids, mask, columns.scored]
        tensors += [] if columns.parent is None else [columns.parent]
        pieces = zip(*(tensor.split(batch_size or len(ids)) for tensor in tensors), strict=True)
        logps, entropies = (
            torch.cat(values)
            for values in zip(
                *(
                    rows_logps(model, *piece, router_losses=router_losses, images=images, **distribution)
                    for piece in pieces
                ),
                strict=True,
            )
        )
        return logps, entropies, []
    size = batch_size or len(ids)
    tensors = [prompt_ids, prompt_mask, ids, mask, columns.scored, *(getattr(columns, name) for name in OPTIONAL)]
    results, means = [], []
    for start in range(0, len(ids), size):
        piece = (None if tensor is None else tensor[start : start + size] for tensor in tensors)
        trees = leaves[start : start + size]
        hung = [tree for of_row in trees for tree in of_row]
        *result, found = batch_logps(
            model,
            *piece,
            leaves=hung,
            router_losses=router_losses,
            attention=args.tree_attention,
            images=images,
            sequence=sequence,
            shared=shared,
            **distribution,
        )
        results.append(result)
        rest = iter(found)
        means += [[next(rest) for _ in of_row] for of_row in trees]
    logps, entropies = (torch.cat(values) for values in zip(*results, strict=True))
    return logps, entropies, means


def has_old_forward(trainer: GRPOTrainer) -> bool:
    """
    Whether TRL computes the policy's log-probs of a batch, before rewards are asked: where an optimiser step may come
    between sampling and loss, and where the loss corrects for the engine's log-probs. The first forward that it asks
    for without a loss is then this one; a reference's comes after it.
    """
    args = trainer.args
    aligned = args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations) == 0
    return not aligned or (trainer.use_vllm and trainer.vllm_importance_sampling_correction)


def prepare_router_loss(trainer: GRPOTrainer) -> None:
    """
    Lets TRL's trainer ask a model without experts for no loss that balances them. It asks whatever has the option, as
    Granite 4 without a mixture.
    """
    if not trainer.aux_loss_enabled or has_router_loss(trainer.model.config):
        return
    if trainer.args.router_aux_loss_coef:
        raise ConfigError(
            f"`router_aux_loss_coef: {trainer.args.router_aux_loss_coef}` balances experts, and this model has none: "
            "leave it out."
        )
    trainer.aux_loss_enabled = False


def trl_scores(trainer: GRPOTrainer, columns: TokenColumns, images: Media) -> bool:
    """Whether TRL's own forward computes the log-probs of a batch: it knows of rows, and of few names for experts."""
    config = trainer.model.config.get_text_config()
    counts_experts = not trainer.aux_loss_enabled or getattr(config, "num_experts", None) is not None
    rows = trainer.args.forward == "padded" and columns.parent is None and not trainer.gave_up_trees and not images
    return rows and counts_experts


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


def prove_forward(trainer: GRPOTrainer, length: int) -> None:
    """
    Proves `forward: tree` for the policy as it is wrapped for training, and for a separate reference model, once for
    rows of up to `length` tokens. If a model scores packed trees differently from each turn alone, the run goes on
    with padded rows, which are proven too. Every rank calls it at the same point. In evaluation it does nothing.
    """
    args, mixed_precision = trainer.args, trainer.accelerator.mixed_precision
    if args.forward == "turn_by_turn" or not trainer.model.training:
        return
    models = list(filter(None, (trainer.model_wrapped, trainer.ref_model)))
    with trainer.accelerator.autocast():
        if args.forward == "tree":
            try:
                for model in models:
                    prove(
                        model,
                        length,
                        attention=args.tree_attention,
                        mixed_precision=mixed_precision,
                        sequence=trainer.sequence,
                    )
            except UnsupportedModelError as error:
                _give_up_trees(trainer, error)
        if trainer.gave_up_trees:
            for model in models:
                prove_rows(model, length, mixed_precision=mixed_precision)


SEVERAL = "several"
"""Stands for sounds of several lengths in one batch: some models hear one otherwise beside a longer one."""


def prove_shown(trainer: GRPOTrainer, batch: RolloutBatch, proven: set[Any]) -> None:
    """
    Proves `forward` on a batch's shortest trajectories that show images, videos or sounds, the same ones on every
    rank, as `prove_forward` proves it without. This is a collective call.
    """
    args, mixed_precision = trainer.args, trainer.accelerator.mixed_precision
    mine: dict[Any, TokenRow] = {}
    for row in sorted(batch.token_rows, key=lambda row: len(row.prompt_ids) + len(row.ids), reverse=True):
        if any(row.mask):
            mine |= dict.fromkeys(_shown_by(row), row)  # the shortest at last
    shown = set().union(*gather_object([set(mine)]))
    lengths = sorted(each for each in shown if isinstance(each, tuple))
    new = (shown - set(lengths) | ({SEVERAL} if len(lengths) > 1 else set())) - proven
    proven |= new
    if not new or args.forward == "turn_by_turn":
        return
    wanted = [*(new - {SEVERAL}), *(lengths[:1] + lengths[-1:] if new & {SOUND, SEVERAL} else [])]
    found: list[dict[Any, TokenRow]] = gather_object([{each: mine[each] for each in wanted if each in mine}])
    rows = {id(row): row for each in wanted for row in [next(of_rank[each] for of_rank in found if each in of_rank)]}
    trees = [flat_tree(row) for row in rows.values()]
    images: Media = {number: image for row in rows.values() for number, image in row.images.items()}
    models = list(filter(None, (trainer.model_wrapped, trainer.ref_model)))
    with trainer.accelerator.autocast():
        if args.forward == "tree":
            try:
                for model in models:
                    prove_images(
                        model,
                        trees,
                        images,
                        attention=args.tree_attention,
                        mixed_precision=mixed_precision,
                        rows=False,
                    )
            except UnsupportedModelError as error:
                _give_up_trees(trainer, error)
        if args.forward == "padded":
            for model in models:
                prove_images(model, trees, images, mixed_precision=mixed_precision, rows=True)


def _shown_by(row: TokenRow) -> set[Any]:
    """The kinds of what a row shows, and the lengths of each sound's features."""
    kinds: set[Any] = {kind_of(number) for number in row.images}
    sounds = (image for number, image in row.images.items() if kind_of(number) == SOUND)
    return kinds | {feature_lengths(sound) for sound in sounds}


def _give_up_trees(trainer: GRPOTrainer, error: UnsupportedModelError) -> None:
    if trainer.sequence is not None:
        reason = str(error).partition(", so trees cannot be packed")[0].rstrip(".")
        size = trainer.args.sp_size
        raise ConfigError(
            f"{reason}, and `sp_size: {size}` shares packed trees among processes: leave `sp_size` out."
        ) from error
    trainer.args.forward, trainer.gave_up_trees = "padded", True
    if PartialState().is_main_process:
        reason = str(error).partition(", so trees cannot be packed")[0]
        logger.warning(
            "%s. So trees are not packed in this run: each sequence is a row of its own (`forward: padded`), and "
            "prefixes that sequences share are computed once for each.",
            reason,
        )


def warn_without_routes(batch: RolloutBatch) -> bool:
    """Warns where an engine has not said which experts sampled tokens went to. Returns whether to ask again."""
    if not any(row.logprobs for row in batch.token_rows):
        return True
    if PartialState().is_main_process and not any(row.routes for row in batch.token_rows):
        logger.warning(
            "The engine does not say which experts its tokens went to, so some are trained through others: start the "
            "server with `mt-grpo serve`, which asks vLLM for `--enable-return-routed-experts`, or set "
            "`router_replay: false` to go without."
        )
    return False


def read_truncation(args: MTGRPOConfig) -> Truncation | None:
    """The truncation that a run samples with; `None` if there is none."""
    truncation = Truncation(max(args.top_k or 0, 0), _top_p(args), args.min_p or 0.0)
    return None if truncation == Truncation() else truncation


def _top_p(args: MTGRPOConfig) -> float:
    return 1.0 if args.top_p is None else args.top_p  # as in TRL, `None` keeps all


def sampling_params(args: MTGRPOConfig) -> SamplingParams:
    """The sampling options of a run."""
    return SamplingParams(
        temperature=args.temperature,
        top_p=_top_p(args),
        top_k=args.top_k or 0,
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
    )


def inexact_options(args: MTGRPOConfig) -> list[str]:
    """Options, as `name: value`, that change what is sampled, and that the log-probs of training do not follow."""
    names = ["repetition_penalty"] if args.repetition_penalty != 1 else []
    if args.forward == "padded":  # TRL's own forward, which knows of temperature only
        chosen = vars(read_truncation(args) or Truncation())
        names += [name for name, value in chosen.items() if value != vars(Truncation())[name]]
    return [f"`{name}: {getattr(args, name)}`" for name in names]


def trained_truncation(args: MTGRPOConfig) -> Truncation | None:
    """As `read_truncation`. Warns if training computes the log-probs of another distribution nevertheless."""
    truncation, inexact = read_truncation(args), inexact_options(args)
    if inexact and PartialState().is_main_process:
        logger.warning(
            "%s changes what is sampled, but not the log-probs that are trained, so ratios and gradients are biased: "
            "%s.",
            " with ".join(inexact),
            _mend(inexact),
        )
    return truncation


def check_sequence_ratio(args: MTGRPOConfig) -> None:
    """Refuses ratios of whole trajectories between two different distributions, which vanish over many tokens."""
    inexact = inexact_options(args)
    mode = args.vllm_importance_sampling_mode
    if inexact and args.vllm_importance_sampling_correction and mode.startswith("sequence"):
        raise ConfigError(
            f"{' with '.join(inexact)} changes what is sampled, but not the log-probs that are trained, and "
            f"`vllm_importance_sampling_mode: {mode}` multiplies the difference over all tokens of a trajectory: "
            f"{_mend(inexact)}, or set `vllm_importance_sampling_mode: token_truncate`."
        )


def _mend(inexact: list[str]) -> str:
    if any("repetition_penalty" in option for option in inexact):
        return "leave it out" if len(inexact) == 1 else "leave them out"
    return "set `forward: tree`, or leave it out" if len(inexact) == 1 else "set `forward: tree`, or leave them out"
