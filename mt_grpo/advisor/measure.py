"""
The gradient of every turn of a run's conversations, and of every credit rule in every group. It imports torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar
from trl import ModelConfig, get_peft_config
from trl.trainer.utils import create_model_from_path

from mt_grpo.advisor import Chosen, rollout_command
from mt_grpo.advisor.compare import ALL, Comparison, Judgement, judge_rules
from mt_grpo.credit import (
    ADVANTAGE_ESTIMATORS,
    RewardBatch,
    Rule,
    by_reward,
    estimate,
    parse_rule,
    rule_label,
    rule_name,
    uncredited_turn_rewards,
    whole_rule,
)
from mt_grpo.credit.audit import outcome_at_first_turn
from mt_grpo.credit.rule import MissingField, Scale
from mt_grpo.errors import MISREAD, UserError, libraries_may_refuse
from mt_grpo.forward import SIZE, TurnGradients
from mt_grpo.forward.lm_head import Truncation
from mt_grpo.options.table import Values
from mt_grpo.options.values import DEFAULT_RULE
from mt_grpo.rewards import Scores
from mt_grpo.runlog.files import Silence
from mt_grpo.training.checkpoint import adapter_settings
from mt_grpo.training.model import resolve_base, resolve_model
from mt_grpo.training.reward_batch import gather_rewards
from mt_grpo.trajectory import Trajectory

_REFERENCE = "leave_one_out"
_MOST_MISMATCH = 0.2
"""Nats by which the log-probs of the model that sampled may differ from recorded ones, in the mean."""
_ONE_SCALE: Rule = {**DEFAULT_RULE, "scales": "one"}
_NO_LAMBDA: Rule = {**DEFAULT_RULE, "lam": 1.0}
_VARIANTS: tuple[Rule, ...] = ({"name": "gtpo", "gamma": 0.5}, _ONE_SCALE, _NO_LAMBDA)
"""Rules that are compared with other options than their own defaults too."""
_PER_TRAJECTORY = ("grpo", "sapo")
"""Losses in which a trajectory's tokens share its weight; in others each token has the same."""

_TRIALS = 5  # turns whose time tells that of all

_Tell = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """What was found on a run: its rule and its rewards, and how rules compare on them."""

    chosen: Chosen
    own: str | None  # the run's rule, where it is registered here
    batch: RewardBatch = field(repr=False)
    uncredited: float | None  # share of the turn rewards that the run's rule leaves without credit at their turn
    rules: dict[str, Rule]  # by label
    scales: dict[str, Scale]  # of rules whose `scale_rewards` is not the run's
    judgement: Judgement = field(repr=False)
    left_out: dict[str, str]  # rules that were not compared, and why
    turns: int  # gradients that were computed
    seconds: float
    mismatch: float  # mean difference of the model's log-probs from the recorded ones, in nats

    @property
    def comparison(self) -> Comparison:
        """On all rewards together."""
        return self.judgement.items[ALL]


def measure(chosen: Chosen, tell: _Tell) -> Found:
    """Compares rules on the conversations of a run."""
    doing = ["reading the conversations"]
    in_terminal = sys.stderr.isatty()  # which has a bar
    with nullcontext() if in_terminal else Silence(lambda: tell(doing[-1])):
        return _measure(chosen, tell, doing.append)


def _measure(chosen: Chosen, tell: _Tell, note: _Tell) -> Found:
    """`note` is given what is done from here on."""
    options = chosen.options
    trajectories = _read_conversations(chosen)
    recorded = [each for one in trajectories for node in one.tree.nodes for each in node.logprobs]
    if recorded and all(map(isnan, recorded)):
        raise UserError(
            f"An endpoint had the conversations of {chosen.run.folder}, and rules are compared on what the model to "
            f"be trained samples: sample some with {rollout_command(chosen.run, 32)}."
        )
    rewards = chosen.run.about["rewards"]
    batch = _reward_batch(trajectories, rewards, chosen.group_size)
    note("loading the model")
    model = _load_policy(chosen.model, options)
    _check_tokens(trajectories, model, chosen.model)
    truncation = Truncation(max(options["top_k"] or 0, 0), options["top_p"] or 1.0, options["min_p"] or 0.0)
    gradients = TurnGradients(
        model,
        forward="padded" if options["forward"] == "padded" else "tree",
        temperature=options["temperature"],
        truncation=None if truncation == Truncation() else truncation,
    )
    computed = compute(trajectories, gradients, chosen.model, tell, note)
    note("comparing the rules")
    own, rules = _rules_of(options["advantage_estimator"])
    rules, scales = _with_batch_scale(rules, own, options["scale_rewards"])
    judgement, left_out = compare(
        computed.gradients,
        batch,
        rules,
        chosen.groups_per_step,
        weights=_token_weights(trajectories, options),
        turn_coef=options["turn_advantage_coef"],
        scale_rewards=options["scale_rewards"],
        scales=scales,
    )
    uncredited = None
    if own is not None:
        coef = options["turn_advantage_coef"]
        uncredited = uncredited_turn_rewards(rules[own], batch, turn_coef=coef, scale_rewards="none").at_turn
    else:
        name = rule_name(options["advantage_estimator"] or "?")
        left_out[name] = "the run's own rule, which is not registered here"
    return Found(
        chosen,
        own,
        batch,
        uncredited,
        rules,
        scales,
        judgement,
        left_out,
        computed.turns,
        computed.seconds,
        computed.mismatch,
    )


# What was logged


def _read_conversations(chosen: Chosen) -> list[Trajectory]:
    """The conversations, group after group."""
    names = {reward["name"] for reward in chosen.run.about["rewards"]}
    trajectories = []
    for data in chosen.run.trajectories(chosen.rows):
        trajectory = Trajectory.from_dict({key: data[key] for key in data if key in Trajectory.__dataclass_fields__})
        known = {name for values in trajectory.rewards.values() for name in values}
        if not trajectory.failed and not names <= known:
            raise UserError(
                f"The conversation {trajectory.session!r} in {chosen.run.folder} has no rewards, so there is nothing "
                "to compare: take conversations that were scored."
            )
        if any(min(node.tokens, default=0) < 0 for node in trajectory.tree.nodes):
            raise UserError(
                "The conversations show images or sounds, which credit rules are not compared on: name a run of text."
            )
        if trajectory.branch_of is not None:
            raise UserError(f"Conversations of {chosen.run.folder} branch: rules are compared on those that do not.")
        trajectories.append(trajectory)
    return trajectories


def _reward_batch(
    trajectories: Sequence[Trajectory], rewards: Sequence[Mapping[str, Any]], group_size: int
) -> RewardBatch:
    """The recorded rewards of conversations as credit rules take them."""
    kinds = {kind: [reward for reward in rewards if reward["kind"] == kind] for kind in ("turn", "outcome")}

    def of_turns(kind: str, name: str) -> list[list[float | None]]:
        return [each.rewards.get(kind, {}).get(name) or [None] * len(each.turns) for each in trajectories]

    states = list(dict.fromkeys(name for each in trajectories for name in each.rewards.get("state", {})))
    scores = Scores(
        [of_turns("turn", reward["name"]) for reward in kinds["turn"]],
        [
            [each.rewards.get("outcome", {}).get(reward["name"]) for each in trajectories]
            for reward in kinds["outcome"]
        ],
        [of_turns("state", name) for name in states],
    )
    weights = torch.tensor([reward["weight"] for kind in ("turn", "outcome") for reward in kinds[kind]])
    return gather_rewards(list(trajectories), scores, weights, group_size)[0]


def _token_weights(trajectories: Sequence[Trajectory], options: Values) -> Tensor:
    """What the run's loss weighs the tokens of each trajectory by, (B,), but for a factor that all share."""
    weights = torch.ones(len(trajectories), dtype=torch.double)
    for index, trajectory in enumerate(trajectories):
        tokens = sum(turn.num_tokens if turn.mask is None else sum(turn.mask) for turn in trajectory.turns)
        if options["loss_type"] in _PER_TRAJECTORY:
            weights[index] /= max(tokens, 1)
        if options["mask_truncated_completions"] and trajectory.stop_reason and trajectory.stop_reason.is_truncated:
            weights[index] = 0.0
    return weights


# The model


def _load_policy(name: str, options: Values) -> PreTrainedModel:
    """The model that sampled, on the first GPU or in float32; at step 0 with an adapter of the shape of the run's."""
    if not sys.stderr.isatty():
        disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() and not options["use_cpu"] else "cpu"
    dtype = "float32" if device == "cpu" else options["dtype"] or "float32"
    found = resolve_model(name, options["model_revision"])
    base, settings = resolve_base(found), adapter_settings(found)
    with libraries_may_refuse(f"The model {name!r} cannot be loaded", *MISREAD):
        source = {"revision": options["model_revision"], "trust_remote_code": options["trust_remote_code"]}
        model = create_model_from_path(base, dtype=dtype, device_map=None, **source)
        if settings is not None:
            model = PeftModel.from_pretrained(model, found, is_trainable=True)
        elif options["use_peft"]:
            torch.manual_seed(options["seed"])
            lora = {key: options[key] for key in ("lora_r", "lora_alpha", "lora_target_modules", "use_peft")}
            model = get_peft_model(model, get_peft_config(ModelConfig(**lora)))
    return model.to(device)


# Gradients


@dataclass(frozen=True)
class _Computed:
    """Gradients of turns."""

    gradients: Tensor
    turns: int
    seconds: float
    mismatch: float


def compute(
    trajectories: Sequence[Trajectory],
    gradients: TurnGradients,
    model: str,
    tell: _Tell,
    note: _Tell = lambda line: None,
) -> _Computed:
    """Computes the gradient of each turn's log-prob, after it has told how long that takes."""
    begun = time.perf_counter()
    lengths = {}
    for row, trajectory in enumerate(trajectories):
        recorded = [0] * trajectory.tree.num_turns
        for node in trajectory.tree.nodes:
            if node.turn >= 0:
                recorded[node.turn] += len(node.tokens)
        for turn in trajectory.turns if not trajectory.failed else ():
            if turn.index < len(recorded) and recorded[turn.index]:
                lengths[row, turn.index] = turn.context_length + turn.num_tokens
    if not lengths:
        raise UserError("No turn of the conversations has tokens, so there is no gradient to compute.")
    found = torch.zeros(len(trajectories), max(len(each.turns) for each in trajectories), SIZE)
    differences: dict[tuple[int, int], Tensor] = {}

    def work(place: tuple[int, int]) -> float:
        row, turn = place
        trajectory = trajectories[row]
        start = time.perf_counter()
        found[row, turn], logps = gradients.of_turn(trajectory.tree, turn, trajectory.turns[turn].mask)
        if logps.isnan().any() or found[row, turn].isnan().any():  # below, NaN stands for what was not recorded
            raise UserError(
                f"The model {model!r} computes NaN for turn {turn + 1} of the conversation {trajectory.session!r}: "
                "load it in another `dtype`, or choose a checkpoint before it broke (`--step`)."
            )
        nodes = (trajectory.tree.nodes[index] for index in trajectory.tree.depth_first())
        recorded = [logprob for node in nodes if node.turn == turn for logprob in node.logprobs]
        differences[place] = (logps - torch.tensor(recorded)).abs()
        note(f"{len(differences)} of {len(lengths)} turns")
        return time.perf_counter() - start

    order = sorted(lengths, key=lengths.__getitem__)
    trials = [order[len(order) * part // (2 * _TRIALS)] for part in range(1, 2 * _TRIALS, 2)]  # of all lengths
    with libraries_may_refuse(f"The model {model!r} cannot run over the conversations"):
        work(order[-1])  # a first call takes longer
        seconds = [work(place) for place in trials]
    _check_mismatch(_mean(differences), model)
    expected = sum(seconds) / _TRIALS * len(lengths)
    tell(f"{len(lengths)} turns, with a forward and a backward for each: about {max(1, round(expected))} s")
    shown = Console(stderr=True)
    left = [place for place in lengths if place not in differences]
    for place in track(left, "turns", console=shown, transient=True, disable=not sys.stderr.isatty()):
        work(place)
    mismatch = _mean(differences)
    _check_mismatch(mismatch, model)
    return _Computed(found, len(lengths), time.perf_counter() - begun, mismatch)


def _mean(differences: Mapping[Any, Tensor]) -> float:
    """The mean over tokens whose log-prob was recorded; 0 where none was."""
    each = torch.cat(list(differences.values()))
    known = each[~each.isnan()]
    return known.mean().item() if len(known) else 0.0


def _check_tokens(trajectories: Sequence[Trajectory], model: PreTrainedModel, name: str) -> None:
    """Whether a model has all tokens of the conversations."""
    known = model.get_input_embeddings().num_embeddings
    largest = max((max(node.tokens, default=0) for each in trajectories for node in each.tree.nodes), default=0)
    if largest >= known:
        raise UserError(
            f"The model {name!r} is not the one that sampled these conversations: it has {known} tokens, and they "
            f"have the token {largest}. Name the one that did with `--model_name_or_path`."
        )


def _check_mismatch(mismatch: float, model: str) -> None:
    """Whether a model is the one that sampled."""
    if mismatch > _MOST_MISMATCH:
        raise UserError(
            f"The model {model!r} is not the one that sampled these conversations: its log-probs differ from the "
            f"recorded ones by {mismatch:.2f} nats in the mean. Name the one that did with `--model_name_or_path`."
        )


# Rules


def _rules_of(own: Rule | None) -> tuple[str | None, dict[str, Rule]]:
    """All rules to compare, by label: the registered ones with their defaults, `_VARIANTS`, and a run's own."""
    rules: list[Rule] = [*ADVANTAGE_ESTIMATORS, *_VARIANTS]
    rule = None if own is None else parse_rule(own)
    if rule is None or rule_name(rule) not in ADVANTAGE_ESTIMATORS:
        return None, {rule_label(each): each for each in rules}
    return rule_label(rule), {rule_label(each): each for each in [*rules, rule]}


def _with_batch_scale(
    rules: Mapping[str, Rule], own: str | None, scale_rewards: Scale
) -> tuple[dict[str, Rule], dict[str, Scale]]:
    """Rules, with the run's own and the one that keeps proportions by the batch's deviation, if it has another."""
    found, scales = dict(rules), dict[str, Scale]()
    if scale_rewards != "batch":
        for label in dict.fromkeys(label for label in (rule_label(_ONE_SCALE), own) if label is not None):
            whole = whole_rule(rules[label], turn_coef=None, scale_rewards="group")
            if "scale_rewards" in whole and whole.get("scales") != "batch":
                found[f"{label}, batch"], scales[f"{label}, batch"] = rules[label], "batch"
    return found, scales


def compare(
    gradients: Tensor,
    batch: RewardBatch,
    rules: Mapping[str, Rule],
    groups_per_step: float,
    *,
    weights: Tensor | None = None,
    turn_coef: float | None = None,
    scale_rewards: Scale = "none",
    scales: Mapping[str, Scale] | None = None,
) -> tuple[Judgement, dict[str, str]]:
    """Holds the steps of rules against unscaled gradients of `leave_one_out`: of all rewards and of each alone."""

    def per_group(rule: Rule, rewards: RewardBatch, scale: Scale, weights: Tensor | None) -> Tensor:
        takes_scale = "scale_rewards" in whole_rule(rule, turn_coef=None, scale_rewards="group")
        advantages = estimate(rule, rewards, turn_coef=turn_coef, scale_rewards=scale if takes_scale else "group")
        whole = torch.einsum("bk,bkp->bp", advantages.cpu().double(), gradients.double())
        whole = whole if weights is None else whole * weights[:, None]
        return whole.view(-1, batch.group_size, whole.shape[1]).sum(dim=1)

    left_out, estimates = {}, {}
    for label, rule in rules.items():
        if rule_name(rule) == "branch_to_go" and batch.num_branches == 1:
            left_out[label] = "the conversations do not branch"
            continue
        try:
            estimates[label] = per_group(rule, batch, (scales or {}).get(label, scale_rewards), weights)
        except MissingField as error:
            left_out[label] = f"the run logged no `{error.field}`"
    alone = by_reward(batch)
    truths = {
        name: per_group(_REFERENCE, rewards, "none", None)
        for name, rewards in {ALL: batch, **(alone if len(alone) > 1 else {})}.items()
    }
    shares = {label: outcome_at_first_turn(rules[label], batch, turn_coef=turn_coef) for label in estimates}
    kept = {label: share for label, share in shares.items() if share is not None}
    scaled = {label: (scales or {}).get(label, scale_rewards) for label in estimates}
    preferred = [label for label in estimates if rules[label] == DEFAULT_RULE]
    preferred += [label for label in estimates if (rules[label], scaled[label]) == (_ONE_SCALE, "batch")]
    preferred += [label for label in estimates if rules[label] == _NO_LAMBDA]
    return judge_rules(estimates, truths, groups_per_step, kept, tuple(preferred)), left_out
