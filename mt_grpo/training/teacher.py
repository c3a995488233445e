"""
The teacher of a run: another model, whose log-probs of the tokens that the policy sampled, each in the context in
which it was sampled, are computed once per batch, and the loss that they make: on-policy distillation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isnan

import torch
from accelerate.utils import gather, gather_object
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl import GRPOTrainer
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import create_model_from_path

from mt_grpo.errors import ConfigError, libraries_may_refuse
from mt_grpo.forward.model import score
from mt_grpo.forward.packing import FlatTree, flatten
from mt_grpo.forward.probe import context_length
from mt_grpo.rollout import TokenRow
from mt_grpo.token_tree import TokenTree
from mt_grpo.training.config import changed
from mt_grpo.training.forward_plan import prove_forward
from mt_grpo.training.model import open_policy, resolve_base, resolve_model, source_options, wrapped_layers
from mt_grpo.training.ranks import everywhere
from mt_grpo.training.rollout_batch import TOKENS_OF_ALL, Columns, RolloutBatch, longest_path
from mt_grpo.trajectory import Trajectory

LOGPS = "teacher_per_token_logps"
"""The column of a batch with what a teacher makes of its tokens, `(B, T)`, NaN for those that were not sampled."""

CLIP = 2.0
"""Where the ratio of a token's probability to the one it was sampled with is cut: TRL's `distillation_is_clip`."""

_NAMED = 3
"""Tokens that a sentence about another tokenizer names at most."""


def load_teacher(trainer: GRPOTrainer) -> nn.Module | None:
    """
    The teacher of a run, frozen and spread over processes as TRL spreads its reference model, and loaded with the
    policy's options but those that say where the policy is; `None` without one.

    Raises:
        ConfigError: If it is not there, has other tokens than the policy, or reads too few.
    """
    args, accelerator = trainer.args, trainer.accelerator
    if args.teacher is None:
        return None
    name = args.teacher["model"]
    given = dict(args.model_init_kwargs or {})
    for of_policy in ("revision", "code_revision", "subfolder"):
        given.pop(of_policy, None)
    if accelerator.num_processes > 1:
        given["device_map"] = None
    given.setdefault("trust_remote_code", args.trust_remote_code)
    given["dtype"] = given.get("dtype") or trainer.model.dtype
    args = changed(args, model_init_kwargs=given)
    with libraries_may_refuse(f"The teacher {name!r} cannot be loaded"):
        found = resolve_base(resolve_model(name))
        tokenizer = AutoTokenizer.from_pretrained(found, **source_options(args))
        check_tokens(name, tokenizer, trainer._tokenizer)
        model = open_policy(name, args, None, None)["model"]
        if isinstance(model, str):
            model = create_model_from_path(model, **given)
    most, positions = args.max_completion_length, context_length(model.config)
    if most is not None and most >= positions:
        raise ConfigError(
            f"The teacher {name!r} reads {positions} tokens, and a conversation may have {most} after its prompt "
            "(`max_completion_length`): lower that, or name a teacher with a longer context."
        )
    model.requires_grad_(False).eval()
    if trainer.is_deepspeed_enabled:
        return prepare_deepspeed(model, accelerator)
    if not trainer.is_fsdp_enabled:
        return accelerator.prepare_model(model, evaluation_mode=True)
    plugin = accelerator.state.fsdp_plugin
    of_policy = plugin.transformer_cls_names_to_wrap
    plugin.transformer_cls_names_to_wrap = wrapped_layers(model) or of_policy
    try:
        return prepare_fsdp(model, accelerator)
    finally:
        plugin.transformer_cls_names_to_wrap = of_policy


def check_tokens(name: str, teacher: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> None:
    """Whether every token of the policy is one of its teacher's, with the same id."""
    known: Mapping[str, int] = teacher.get_vocab()
    tokens: Mapping[str, int] = policy.get_vocab()
    differing = sorted((number, token) for token, number in tokens.items() if known.get(token) != number)
    if differing:
        named = [
            f"{token!r} is {number} here and {known.get(token, 'unknown')} there"
            for number, token in differing[:_NAMED]
        ]
        raise ConfigError(
            f"The teacher {name!r} has another tokenizer than the policy, and {len(differing)} of its {len(tokens)} "
            f"tokens differ ({'; '.join(named)}): name a teacher of the policy's family."
        )


def read(trainer: GRPOTrainer, batch: RolloutBatch) -> None:
    """
    Fills in `teacher_logprobs` and `teacher_log_ratios` of a batch's trajectories, once. The log-probs have the
    temperature of sampling, and no truncation. This is a collective call: every process brings the same number of
    rows, and makes the same number of forwards, whatever is in them.
    """
    if trainer.teacher_model is None or batch.taught:
        return
    batch.taught = True
    trees = everywhere(lambda: [_shown(trainer, each) for each in batch.trajectories])
    longest = everywhere(lambda: _longest(trainer, trees))
    prove_forward(trainer, max(gather_object([longest])))
    args, plan = trainer.args, replace(trainer.forward_plan, truncation=None, forward=trainer.args.forward)
    size = args.per_device_train_batch_size if batch.mode == "train" else args.per_device_eval_batch_size
    found: list[list[list[float]]] = []
    with torch.no_grad(), trainer.step_log.activity.of("teacher"), trainer.accelerator.autocast():
        for start in range(0, len(trees), size):
            part = trees[start : start + size]
            flat = [_without_routes(tree) for tree in part]
            # a forward also where there is nothing to score, so that ranks with other trees stay in step
            flat += [] if any(len(each.tokens) for each in flat) else [_without_routes(_one_token())]
            scores = score(trainer.teacher_model, replace(plan, trees=flat))
            found += [[turn.tolist() for turn in tree] for tree in scores.by_turn([tree.num_turns for tree in part])]
    for trajectory, logprobs in zip(batch.trajectories, found, strict=True):
        trajectory.teacher_logprobs = logprobs
        sampled = trajectory.tree.action_logprobs()
        trajectory.teacher_log_ratios = [
            _mean([one - other for one, other in zip(*of_turn, strict=True) if not isnan(other)])
            for of_turn in zip(logprobs, sampled, strict=False)  # of one that failed there are none
        ]


def _shown(trainer: GRPOTrainer, trajectory: Trajectory) -> TokenTree:
    if trajectory.media:
        raise ConfigError(
            f"The conversation {trajectory.session} shows images, videos or sounds, and a teacher reads text only: "
            "leave `teacher` out, or train on text."
        )
    return TokenTree() if trajectory.failed else trajectory.tree


def _longest(trainer: GRPOTrainer, trees: list[TokenTree]) -> int:
    longest = longest_path(trees)
    positions = context_length(trainer.accelerator.unwrap_model(trainer.teacher_model).config)
    if longest > positions:
        raise ConfigError(
            f"A conversation has {longest} tokens, and the teacher {trainer.args.teacher['model']!r} reads "
            f"{positions}: lower `max_completion_length`, or name a teacher with a longer context."
        )
    return longest


def _without_routes(tree: TokenTree) -> FlatTree:
    """A tree for another model than the policy, whose experts are others."""
    return replace(flatten(tree), routes=None)


def _one_token() -> TokenTree:
    tree = TokenTree()
    tree.add_turn([0], [], [])
    return tree


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def token_column(rows: list[TokenRow], like: Tensor) -> Tensor:
    """What the teacher makes of a batch's tokens, as `LOGPS`; `like` is `(B, T)`."""
    column = torch.full(like.shape, torch.nan, device=like.device)
    for number, row in enumerate(rows):
        column[number, : len(row.teacher)] = torch.tensor(row.teacher)
    return column


def distillation_loss(trainer: GRPOTrainer, inputs: Columns, logps: Tensor) -> Tensor:
    """
    The loss of a micro-batch whose gradient is that of the reverse KL divergence of the policy, with the log-probs
    `logps` `(B, T)`, from its teacher on the tokens that were sampled: `(log p - log q) * log p`, without a gradient
    through the first factor, as `distillation_mode: sampled_token` of TRL's `SDPOTrainer`. What other weights or
    kernels sampled is corrected by TRL's ratios. It is divided as the loss of `loss_type`. This is a collective call.
    """
    args, teacher, trained = trainer.args, inputs[LOGPS], inputs["completion_mask"] * inputs["tool_mask"]
    mask = trained * ~teacher.isnan()
    log_ratios = (logps.detach() - teacher.nan_to_num(nan=0.0)) * mask
    sums = gather(torch.stack([log_ratios.sum(), mask.sum()])[None]).sum(dim=0)
    mode = "train" if trainer.model.training else "eval"
    trainer._metrics[mode]["teacher/reverse_kl"].append((sums[0] / sums[1].clamp(min=1)).item())
    loss = log_ratios * logps
    if "old_per_token_logps" in inputs:
        loss = loss * (logps.detach() - inputs["old_per_token_logps"]).clamp(-20, 20).exp().clamp(max=CLIP)
    if "importance_sampling_ratio" in inputs:
        loss = loss * inputs["importance_sampling_ratio"]
    steps = trainer.current_gradient_accumulation_steps if mode == "train" else 1
    if args.loss_type in TOKENS_OF_ALL:
        share = steps / args.steps_per_generation if mode == "train" else 1  # of the batch that was sampled
        return loss.sum() * trainer.accelerator.num_processes / (inputs["num_items_in_batch"].clamp(min=1) * share)
    if args.loss_type == "bnpo":
        return loss.sum() / mask.sum().clamp(min=1) / steps
    by_row = loss.sum(dim=1)
    if args.loss_type == "dr_grpo":
        by_row = by_row / trainer.max_completion_length
    elif args.loss_type != "luspo":
        by_row = by_row / mask.sum(dim=1).clamp(min=1)
    return by_row.mean() / steps
