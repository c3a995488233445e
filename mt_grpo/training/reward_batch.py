"""Reward models, scores of all processes as the rewards that credit rules take, and groups that have no signal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather
from torch import nn
from transformers import PreTrainedConfig

from mt_grpo.credit import RewardBatch, without_signal
from mt_grpo.credit.normalisation import minus_group_min, to_go
from mt_grpo.errors import ConfigError
from mt_grpo.options.values import names_model
from mt_grpo.rewards import FunctionReward, Scores
from mt_grpo.rollout.branching import Branching
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.model import resolve_model, source_options
from mt_grpo.training.rollout_batch import RolloutBatch
from mt_grpo.trajectory import Trajectory

TOKENS_OF_ALL = ("cispo", "dapo", "vespo")
"""Losses that TRL divides by `num_items_in_batch`, the tokens that are trained in the whole generation batch."""


def gather_rewards(
    trajectories: list[Trajectory],
    scores: Scores,
    weights: torch.Tensor,
    group_size: int,
    branching: Branching | None = None,
    names: Sequence[str] = (),
) -> tuple[RewardBatch, torch.Tensor]:
    """
    Gathers the scores of all processes. This is a collective call: every process brings the same number of
    trajectories, with any number of turns.
    """
    device, weights = weights.device, weights.double()
    num_turns = torch.tensor([len(trajectory.turns) for trajectory in trajectories], device=device)
    longest = max(1, int(gather(num_turns).max()))
    stays = torch.tensor([not trajectory.failed for trajectory in trajectories], device=device)
    exists = (torch.arange(longest, device=device) < num_turns.unsqueeze(1)) & stays.unsqueeze(1)
    results = torch.zeros_like(exists)
    states = torch.zeros_like(exists, dtype=torch.int64)
    for row, trajectory in enumerate(trajectories):
        for turn in trajectory.turns:
            results[row, turn.index] = turn.has_result and not trajectory.failed
        states[row, : len(trajectory.turns)] = torch.tensor(state_ids(trajectory), dtype=torch.int64, device=device)
    split = len(scores.turn)
    double = {"dtype": torch.double, "device": device}
    # at least one column each: NCCL's way of gathering fails on a tensor without elements
    turns = torch.full((len(trajectories), longest, max(1, split)), torch.nan, **double)
    outcomes = torch.full((len(trajectories), max(1, len(scores.outcome))), torch.nan, **double)
    state_scores = torch.full((len(trajectories), longest), torch.nan, device=device)
    for column, rows in enumerate(scores.turn):
        for row, values in enumerate(rows):
            turns[row, : len(values), column] = _tensor(values, device)
    for column, values in enumerate(scores.outcome):
        outcomes[:, column] = _tensor(values, device)
    for rows in scores.state:  # one at most
        for row, values in enumerate(rows):
            state_scores[row, : len(values)] = _tensor(values, device)
    turns, outcomes, exists, results, states, state_scores = (
        gather(tensor) for tensor in (turns, outcomes, exists, results, states, state_scores)
    )
    turns, outcomes = turns[:, :, :split], outcomes[:, : len(scores.outcome)]
    batch = RewardBatch(
        _sum_present(turns * weights[:split], dim=2),
        _sum_present(outcomes * weights[split:], dim=1).float(),
        exists,
        results,
        group_size,
        state_ids=states,
        state_scores=state_scores if scores.state else None,
        turn_streams=turns.permute(2, 0, 1).float(),
        outcome_streams=outcomes.T.float(),
        stream_weights=weights.float(),
        num_branches=1 if branching is None else branching.number,
        branch_at=0 if branching is None else branching.at,
        names=tuple(names),
    )
    sums = torch.full_like(turns[:, 0], torch.nan)
    for column, applies in enumerate((~turns.isnan()).any(dim=1).T):
        earned = to_go(turns[:, :, column].nan_to_num(nan=0.0))[:, 0]
        sums[:, column] = torch.where(applies, earned, torch.nan)
    return batch, torch.cat([sums, outcomes], dim=1).float()


def state_ids(trajectory: Trajectory) -> list[int]:
    """
    For each turn a number of the state in which it begins: what the environment last replied, or the prompt, which the
    members of a group share. It is the same on every process.
    """
    # without the ids of calls, which differ between conversations
    replies = [[(reply["role"], reply.get("content")) for reply in turn.replies] for turn in trajectory.turns[:-1]]
    texts = [json.dumps(reply, sort_keys=True, default=str).encode() for reply in replies]
    hashes = [int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True) for text in texts]
    return [0, *hashes][: len(trajectory.turns)]


def share_of_equal_groups(columns: torch.Tensor, weights: torch.Tensor, group_size: int) -> float:
    """
    TRL's `frac_reward_zero_std`, by the measure that credit rules have for equal sums. TRL compares a float32
    deviation with zero, which rounding may change.
    """
    above = minus_group_min(_sum_present(columns.double() * weights, dim=1).view(-1, group_size, 1)).squeeze(2)
    earns = ~above.isnan().all(dim=1)
    return (above.nan_to_num(nan=0.0) == 0).all(dim=1)[earns].float().mean().item()


def sample_again(
    batch: RolloutBatch,
    limit: int,
    sample: Callable[[RolloutBatch], None],
    score: Callable[[RolloutBatch], Any],
    judge: Callable[[RolloutBatch], None],
) -> None:
    """
    Samples the prompts of groups without signal again, with other seeds, until every group has one. This is a
    collective call: every process makes as many rounds.
    """
    first = PartialState().process_index * len(batch.rows)
    judge(batch)
    for attempt in range(1, limit + 1):
        silent = without_signal(batch.advantages, batch.group_size)
        if not silent.any() or batch.rewards.failed.all():  # what makes all fail is not chance
            return
        asked = silent.repeat_interleave(batch.group_size)[first : first + len(batch.rows)].tolist()
        fills = [not each for each in asked]
        again = RolloutBatch(batch.mode, batch.rows, fills, batch.branching, batch.group_size, attempt=attempt)
        try:
            sample(again)
            again.scores = score(again)
        except BaseException:  # whatever fails, conversations that were finished before are not lost
            batch.discarded += [[], again.counted]  # none of the attempt before was replaced
            raise
        batch.replace(again)
        batch.sampled_again += int(silent.sum())
        judge(batch)


def has_signal(batch: RolloutBatch) -> torch.Tensor:
    """The rows of this process whose group has a signal, shape (B,), bool."""
    size = batch.group_size
    first = PartialState().process_index * len(batch.rows)
    silent = without_signal(batch.advantages, size).repeat_interleave(size)
    return ~silent[first : first + len(batch.rows)]


def leave_out(output: dict[str, Any], kept: torch.Tensor) -> None:
    """
    Takes rows out of the loss of the batch that TRL trains on. `share_out` does the rest once it is dealt out to
    micro-batches. This is a collective call.

    Args:
        output (`dict`): The batch.
        kept (`Tensor`): The rows that stay, shape (B,), bool.
    """
    output["kept"] = kept
    output["tool_mask"] = output["tool_mask"] * kept[:, None]
    trained = (output["completion_mask"] * output["tool_mask"]).sum()
    output["num_items_in_batch"] = gather(trained.reshape(1)).sum()


def share_out(batches: list[dict[str, Any]], loss_type: str) -> None:
    """
    Gives each micro-batch the factor by which its loss grows, so that the loss of all is what it would be without the
    rows that were left out. This is a collective call.

    TRL divides by rows (`grpo`, `sapo`, `luspo`, `dr_grpo`), by micro-batches (`bnpo`) or by the tokens that are
    trained, which are counted right already.
    """
    if loss_type in TOKENS_OF_ALL:
        return
    if loss_type == "bnpo":
        counts = [bool((batch["completion_mask"] * batch["tool_mask"]).any()) for batch in batches]
        count = torch.tensor([sum(counts), len(counts)])
    else:
        kept = torch.cat([batch["kept"] for batch in batches])
        count = torch.stack([kept.sum(), torch.tensor(len(kept), device=kept.device)])
    counted, total = gather(count.to(batches[0]["kept"].device)[None]).sum(dim=0).tolist()
    for batch in batches:
        batch["loss_factor"] = torch.tensor(total / max(counted, 1), device=batch["kept"].device)


def _tensor(values: list[float | None], device: torch.device) -> torch.Tensor:
    given = [torch.nan if value is None else value for value in values]
    return torch.tensor(given, dtype=torch.double, device=device)


def _sum_present(values: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum over the rewards that apply; NaN if none does."""
    total = values.nansum(dim=dim)
    return total.masked_fill(values.isnan().all(dim=dim), torch.nan)


class ModelReward(FunctionReward):
    """
    The logit of a sequence classifier with one label for the whole conversation. It reads texts where prompts are
    text, else the conversation in the reward model's own chat template. TRL's trainer loads the model and its
    tokenizer, and places it on the device; `use` takes them from there.
    """

    collective = True

    def __init__(self, model: str | nn.Module, **where: Any) -> None:
        super().__init__(self._judge)
        self.model = _resolved(model, where) if isinstance(model, str) else model
        self.name = Path(model if isinstance(model, str) else model.config.name_or_path).name or type(model).__name__
        self._tokenizer: Any = None
        self._template_kwargs: dict[str, Any] = {}

    def use(self, model: nn.Module, tokenizer: Any, template_kwargs: dict[str, Any]) -> None:
        """Takes the model as it was loaded and placed, its tokenizer, and variables for the chat template."""
        self.model, self._tokenizer, self._template_kwargs = model, tokenizer, template_kwargs

    def score_nothing(self) -> None:
        """
        A forward of a single token. Where the model's weights are sharded, the other processes wait for it in theirs.
        """
        self._logits({name: torch.ones(1, 1, dtype=torch.int64) for name in ("input_ids", "attention_mask")})

    def _judge(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        whole = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        try:
            inputs = self._encoded(whole)
        except Exception:  # its template refuses what the conversations of other processes may not have
            self.score_nothing()
            raise
        return self._logits(inputs)[:, 0].float().tolist()

    def _encoded(self, whole: list[Any]) -> dict[str, torch.Tensor]:
        texts = [
            each
            if isinstance(each, str)
            else self._tokenizer.apply_chat_template(each, tokenize=False, **self._template_kwargs)
            for each in whole
        ]
        return self._tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )

    def _logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        device = next(self.model.parameters()).device
        with torch.inference_mode():
            return self.model(**{name: tensor.to(device) for name, tensor in inputs.items()}).logits


def _resolved(name: str, where: dict[str, Any]) -> str:
    """
    The model that a name stands for. TRL's trainer gives one without a layer for a number a random one, and says
    nothing.
    """
    model = resolve_model(name, where.get("revision"))
    try:
        config, _ = PreTrainedConfig.get_config_dict(model, **where)
    except OSError:  # an adapter has none
        return model
    kind = (config.get("architectures") or [""])[0]
    if kind.endswith(("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM")):
        raise ConfigError(
            f"The reward model {name!r} is a {kind}, which gives words and no number: name a sequence classifier with "
            "one label."
        )
    labels = len(config.get("id2label", "01"))  # it is left out of the file where there are two
    if kind.endswith("ForSequenceClassification") and labels != 1:
        raise ConfigError(
            f"The reward model {name!r} is a classifier with {labels} labels: name one with one label, whose logit is "
            "the reward."
        )
    return model


def with_models(entries: Sequence[Any], args: MTGRPOConfig) -> list[Any]:
    """Entries of `outcome_reward_funcs`, with those that are models, or name one, as `ModelReward`."""
    where = source_options(args)
    return [
        ModelReward(entry, **where)
        if isinstance(entry, nn.Module) or (isinstance(entry, str) and names_model(entry))
        else entry
        for entry in entries
    ]
