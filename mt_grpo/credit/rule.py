"""
A credit rule in use: what it is given, the rewards of a batch of groups, and how these compare within a group, where
NaN is left out: it becomes 0, and is in no mean; its entry in the registry; its options, which are checked against its
signature; and what it may return.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import torch
from annotated_types import Interval
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from mt_grpo.errors import ConfigError, UserError, defined_at, describe_error, find_fault
from mt_grpo.imports import Registry, check_name, did_you_mean, unknown_option

Scale = Literal["group", "batch", "none"]

Scales = Literal["each", "one", "batch"]
"""
Whether outcome and turn rewards are divided by their own deviations, or both by that of what they sum to: in what
`scale_rewards` says, or in the whole batch where that says `group`.
"""


Share = Annotated[float, Interval(ge=0, le=1)]
"""A discount, or the λ of an average of returns."""

EPSILON = 1e-4
"""Added to the standard deviation before dividing, as TRL does."""

ROUNDING = 2.0**-24
"""Two numbers are equal if they differ by less than this share of them: float32 cannot tell them apart."""


def without_rounding(differences: Tensor, size: Tensor) -> Tensor:
    """Differences of numbers of a size; 0 for those of rounding, of which `EPSILON` would make a signal."""
    return torch.where(differences.abs() < ROUNDING * size.nan_to_num(nan=0.0).clamp(min=EPSILON), 0.0, differences)


def minus_group_min(grouped: Tensor) -> Tensor:
    """Values of shape (N, G, K) minus the least of their group at their turn, 0 for equal ones; NaN stays."""
    least = grouped.nan_to_num(nan=torch.inf).amin(dim=1, keepdim=True)
    return without_rounding(grouped - least, torch.maximum(grouped.abs(), least.abs()))


def to_go(rewards: Tensor, gamma: float = 1.0) -> Tensor:
    """Discounted sums of rewards from each turn on, (B, K), float64, equal in any order (Knuth's two-sum)."""
    rewards = rewards.double()
    returns = torch.empty_like(rewards)
    total, lost = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for turn in range(rewards.shape[1] - 1, -1, -1):
        total, lost = gamma * total, gamma * lost
        longer = total + rewards[:, turn]
        added = longer - total
        lost = lost + (total - (longer - added)) + (rewards[:, turn] - added)
        total = longer
        returns[:, turn] = total + lost
    return returns


def centre(values: Tensor, group_size: int) -> Tensor:
    """Values of shape (B, K) minus the mean of their turn in their group."""
    grouped = values.view(len(values) // group_size, group_size, values.shape[1])
    # Shifted by the group's least first, so that equal values come out as exactly 0.
    shifted = minus_group_min(grouped)
    centred = (shifted - shifted.nanmean(dim=1, keepdim=True)).nan_to_num(nan=0.0)
    return without_rounding(centred, shifted).reshape(values.shape)


def largest_deviation(values: Tensor, group_size: int, scale: Scale) -> Tensor:
    """
    The largest standard deviation (ddof 1) over turns plus `EPSILON`, `(B, 1)`; 1 for `"none"`. The largest, since
    another may happen to be 0. For values `(B, 1)` it is what TRL's `GRPOTrainer` divides by.
    """
    if scale == "none":
        return values.new_ones(len(values), 1)
    grouped = values.view(-1, group_size if scale == "group" else len(values), values.shape[1])
    largest = deviation(grouped, dim=1).amax(dim=2) + EPSILON
    return largest.repeat_interleave(grouped.shape[1], dim=0)


def divisor(totals: Tensor, group_size: int, scales: Scales, scale: Scale) -> Tensor | None:
    """What divides outcome and turn rewards alike, (B, 1), by what they sum to, (B, K); `None` if each has its own."""
    if scales == "each":
        return None
    return largest_deviation(totals, group_size, "batch" if scales == "batch" and scale == "group" else scale)


def deviation(values: Tensor, dim: int) -> Tensor:
    """Standard deviation with ddof 1 along `dim`, which is kept; NaN is left out; 0 for fewer than two values."""
    squares = (values - values.nanmean(dim=dim, keepdim=True)).square().nansum(dim=dim, keepdim=True)
    return (squares / ((~values.isnan()).sum(dim=dim, keepdim=True) - 1).clamp(min=1)).sqrt()


class MissingField(ConfigError):
    """A rule needs a field of `RewardBatch` that is not filled in."""

    def __init__(self, rule: str, field: str) -> None:
        super().__init__(f"The advantage estimator {rule!r} needs the `{field}` of a `RewardBatch`: fill them in.")
        self.field = field


@dataclass(frozen=True)
class RewardBatch:
    """
    The rewards of a batch of groups.

    Args:
        turn_rewards (`Tensor`): Shape (B, K); NaN if the turn does not exist, or no turn reward applies to it.
        outcome_rewards (`Tensor`): Shape (B,); NaN if no outcome reward applies.
        turn_mask (`Tensor`): Shape (B, K), bool: whether the turn exists.
        result_mask (`Tensor`): Shape (B, K), bool: whether a tool result follows the turn.
        group_size (`int`): Rows i*G .. i*G+G-1 answer the same prompt.
        state_ids (`Tensor`, *optional*): Shape (B, K), int64: equal in the turns of a group that begin in the same
            state.
        state_scores (`Tensor`, *optional*): Shape (B, K): the `StateScore` of the state after each turn; NaN if there
            is none.
        turn_streams (`Tensor`, *optional*): Shape (S, B, K): each turn reward by itself, not weighted.
        outcome_streams (`Tensor`, *optional*): Shape (R, B): each outcome reward by itself, not weighted.
        stream_weights (`Tensor`, *optional*): Shape (S + R,): the weights of both.
        num_branches (`int`, *optional*, defaults to `1`): So many rows in a row continue the same trunk.
        branch_at (`int`, *optional*, defaults to `0`): Turns that these rows share.
        names (`tuple[str, ...]`, *optional*): Of the S turn rewards, then of the R outcome rewards.

    There are two kinds of NaN. An *absent* reward is one that does not apply to a trajectory which ran: the policy
    decided that. Rules that are unbiased count it as 0. A *failed* trajectory, which the engine or the environment
    ended, has no turns and no rewards: `failed` names it, and every rule leaves it out of its means.
    """

    turn_rewards: Tensor
    outcome_rewards: Tensor
    turn_mask: Tensor
    result_mask: Tensor
    group_size: int
    state_ids: Tensor | None = None
    state_scores: Tensor | None = None
    turn_streams: Tensor | None = None
    outcome_streams: Tensor | None = None
    stream_weights: Tensor | None = None
    num_branches: int = 1
    branch_at: int = 0
    names: tuple[str, ...] = ()

    @property
    def failed(self) -> Tensor:
        """The trajectories that the engine or the environment ended, shape (B,), bool."""
        return ~self.turn_mask.any(dim=1)

    def of_outcomes(self, rewards: Tensor | None = None) -> Tensor:
        """Outcome rewards, shape (B,), float64: 0 for an absent one, NaN for a failed trajectory."""
        rewards = self.outcome_rewards if rewards is None else rewards
        return rewards.double().nan_to_num(nan=0.0).masked_fill(self.failed, torch.nan)

    def of_turns(self, rewards: Tensor | None = None) -> Tensor:
        """Turn rewards, shape (B, K), float64: 0 for an absent one or no turn, NaN for a failed trajectory."""
        rewards = self.turn_rewards if rewards is None else rewards
        return rewards.double().nan_to_num(nan=0.0).masked_fill(self.failed[:, None], torch.nan)

    def needed(self, rule: str, field: str) -> Tensor:
        """A field that one rule cannot do without; `MissingField` if the batch lacks it."""
        value: Tensor | None = getattr(self, field)
        if value is None:
            raise MissingField(rule, field)
        return value

    def part_names(self, kind: Literal["turn", "outcome"]) -> list[str]:
        """Of each reward of a kind, the name of what it earns: `turn reward NAME`; a single outcome is `outcome`."""
        streams = self.turn_streams if kind == "turn" else self.outcome_streams
        count = 0 if streams is None else len(streams)
        if kind == "outcome" and count < 2:
            return ["outcome"]
        names = self.names[:count] if kind == "turn" else self.names[-count:]
        whole = "turn reward" if kind == "turn" else "outcome"
        return [f"{whole} {name}" for name in names or range(1, count + 1)]

    def against_group(
        self, values: Tensor, baseline: str, scale_rewards: Scale = "group", scale: Tensor | None = None
    ) -> Tensor:
        """Values (B, K) minus their turn's mean in the group, divided by `scale` (B, 1) or the largest deviation."""
        if scale is None:
            scale = largest_deviation(values, self.group_size, scale_rewards)
        return self.term(centre(values, self.group_size) / scale, values, scale, baseline)

    def against_others(
        self, values: Tensor, baseline: str, scale_rewards: Scale = "group", scale: Tensor | None = None
    ) -> Tensor:
        """Values of trajectories, (B, 1), minus the mean of the other members, divided by their deviation or scale."""
        others = (~self.failed).view(-1, self.group_size).sum(dim=1).repeat_interleave(self.group_size)[:, None] - 1
        if scale is None:
            scale = largest_deviation(values, self.group_size, scale_rewards)
        centred = centre(values, self.group_size) / scale * (others + 1) / others.clamp(min=1)
        return self.term(centred, values, scale, baseline)

    def term(
        self,
        value: Tensor,
        earned: Tensor,
        scale: Tensor,
        baseline: str,
        others: Mapping[str, Tensor] | None = None,
        scale_told: bool = True,
    ) -> Tensor:
        """
        A summand of the advantage: `value`, as the rule computed it, which `explain` takes apart. It is what
        trajectories `earned`, linear in the rewards, less a `baseline` of this name and with `others` by name, all
        divided by `scale`. `scale_told` says whether a turn of the advantage has one such scale.
        """
        return value

    def advantages(self, total: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A sum of terms as advantages, (B, K), 0 where a turn does not exist; in the dtype of the rewards."""
        return ((0.0 + total) * self.turn_mask).to(dtype or self.turn_rewards.dtype)


@dataclass(frozen=True)
class Credit:
    """
    The advantages of a batch, and the parts that they are the sum of.

        A_ik = (r_ik − mean) / σ        parts: r_ik / σ and −mean / σ; the scale of both is σ

    Args:
        advantages (`Tensor`): Shape (B, K).
        parts (`dict[str, Tensor]`, *optional*): By name, what each adds to the advantage, divided by its scale; shape
            (B, K), or one that broadcasts to it. A rule that does not say them has none.
        scales (`dict[str, Tensor]`, *optional*): By the name of a part, what it was divided by, of such a shape; NaN
            where the part does not occur. A part that no single number divides has none.
    """

    advantages: Tensor
    parts: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    scales: dict[str, Tensor] = dataclasses.field(default_factory=dict)


Rule = str | Mapping[str, Any]
"""`"mt_grpo"`, or `{"name": "mt_grpo", "turn_coef": 0.5}`."""


def rule_label(rule: Rule) -> str:
    """A rule as it is shown in a heading: `gtpo (gamma 0.9)`."""
    name, own = _split(rule)
    options = ", ".join(f"{option} {value}" for option, value in own.items())
    return f"{name} ({options})" if options else name


def bind_rule(rule: Rule, *, turn_coef: float | None, scale_rewards: str) -> tuple[AdvantageEstimator, dict[str, Any]]:
    """
    The function of a rule, as `parse_rule` returns it, and the options to call it with: its own options, and those of
    the run that it takes. With a `turn_coef` of `None` the rule's own default applies.
    """
    name, options = _split(rule)
    function = get_estimator(name)
    _, *parameters = inspect.signature(function).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    own = {parameter.name: parameter for parameter in parameters if parameter.kind not in _VARIADIC}
    of_run = {"scale_rewards": scale_rewards} | ({} if turn_coef is None else {"turn_coef": turn_coef})
    for field, option, is_set in (
        ("turn_advantage_coef", "turn_coef", turn_coef is not None),
        ("scale_rewards", "scale_rewards", scale_rewards != "group"),
    ):
        if is_set and option not in own and not takes_any:
            raise ConfigError(
                f"`{field}` is {of_run[option]!r}, and the advantage estimator {name!r} takes no `{option}`: leave it "
                "out."
            )
    if "scale_rewards" in options:
        raise ConfigError(
            f"`scale_rewards` is an option of the run, not of the advantage estimator {name!r} alone: set it beside "
            "`advantage_estimator`, not in it."
        )
    if "turn_coef" in options and turn_coef is not None:
        raise ConfigError(
            f"`turn_coef: {options['turn_coef']}` of the advantage estimator {name!r} and `turn_advantage_coef: "
            f"{turn_coef}` contradict each other: leave one out."
        )
    settable = [option for option in own if option != "scale_rewards"]
    for option in options:
        if option not in own and not takes_any:
            raise ConfigError(unknown_option(f"The advantage estimator {name!r}", option, settable))
    _check_types(name, function, options)
    of_run = {option: value for option, value in of_run.items() if option in own or takes_any}
    for option, parameter in own.items():
        if parameter.default is parameter.empty and option not in options and option not in of_run:
            raise ConfigError(
                f"The advantage estimator {name!r} needs its option {option!r}: write `advantage_estimator: {{name: "
                f"{name}, {option}: ...}}`."
            )
    return function, {**of_run, **options}


def whole_rule(rule: Rule, *, turn_coef: float | None, scale_rewards: str) -> dict[str, Any]:
    """The `name` of a rule and every option that it is called with, defaults too; as `bind_rule`, with its errors."""
    function, given = bind_rule(rule, turn_coef=turn_coef, scale_rewards=scale_rewards)
    _, *parameters = inspect.signature(function).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.kind not in _VARIADIC}
    return {"name": _split(rule)[0], **defaults, **given}


def rule_says(rule: Rule) -> str | None:
    """The first paragraph of a rule's docstring on one line; `None` where it has none."""
    text = inspect.getdoc(get_estimator(_split(rule)[0]))
    return None if not text else " ".join(text.split("\n\n")[0].split())


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _split(rule: Rule) -> tuple[str, dict[str, Any]]:
    """The name of a rule, and its own options."""
    if isinstance(rule, str):
        return rule, {}
    return rule["name"], {option: value for option, value in rule.items() if option != "name"}


def _check_types(name: str, function: AdvantageEstimator, options: dict[str, Any]) -> None:
    if not options:
        return
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
        hints = {option: parameters[option].annotation for option in options if option in parameters}
        types = {
            # in a list, since a dataclass or `TypedDict` by itself has a configuration of its own
            option: TypeAdapter(list[hint], config=ConfigDict(arbitrary_types_allowed=True))  # type: ignore[valid-type]
            for option, hint in hints.items()
            if hint is not inspect.Parameter.empty
        }
    except Exception as error:  # whatever the user's annotations raise
        raise ConfigError(
            f"The options of the advantage estimator {name!r} cannot be checked, since one of its annotations is no "
            f"type, or names something that is not imported ({' '.join(describe_error(error).split())[:160]}): mend "
            "the annotation, or import it."
        ) from error
    for option, value in options.items():
        fault = None if option not in types else _fault(value, types[option])
        if isinstance(value, float) and math.isnan(value):
            fault = "give a number"
        if fault is not None:
            hint = hints.get(option)
            near = did_you_mean(value, get_args(hint)) if get_origin(hint) is Literal else ""
            raise ConfigError(
                f"The option {option!r} of the advantage estimator {name!r} is {value!r}{near}: {fault}."
            )


def _fault(value: Any, lists: TypeAdapter[list[Any]]) -> str | None:
    """What is wrong with a value, as YAML or JSON gives it, by the type of lists of such; `None` where it fits."""
    try:
        lists.validate_python([value], strict=True)
    except ValidationError as error:
        wrong = dict.fromkeys(each["msg"] for each in error.errors())
        return " or ".join(f"{words[0].lower()}{words[1:]}" for words in wrong)
    return None


AdvantageEstimator = Callable[..., Tensor | Credit]
"""
`(batch: RewardBatch, *, turn_coef: float = 1.0, scale_rewards: Scale = "group") -> Tensor` of shape (B, K), or
`Credit`, which has its parts too. A rule may have further options of its own. It may leave out `turn_coef` or
`scale_rewards` if it does not use them.
"""


class in_parts:  # noqa: N801, a decorator
    """Lets a rule return `Credit`; called as a function it gives its advantages. `estimate_parts` finds the parts."""

    def __init__(self, function: Callable[..., Credit]) -> None:
        self.credit = function
        functools.update_wrapper(self, function)

    def __call__(self, batch: RewardBatch, **options: object) -> Tensor:
        advantages: Tensor = self.credit(batch, **options).advantages
        return advantages


ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry("advantage estimator", "mt_grpo.credit.rules")
"""The estimators that a recipe can name in `advantage_estimator`."""

_WHOLE: set[str] = set()
"""The estimators that give all turns of a trajectory the same advantage."""

_SUMMING: set[str] = set()
"""The estimators that use no turn reward but in the sum over a trajectory's turns."""


def advantage_estimator(
    name: str, *, splits_turns: bool = True, sums_turns: bool = False
) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """
    Registers an estimator under its name in recipes. `splits_turns` says whether turns of one trajectory can get
    different advantages; such a rule is refused with a loss that weighs whole sequences. `sums_turns` says whether
    turn rewards matter only in their sum over the trajectory, so that a turn reward may depend on later turns.
    `RegistrationError` if the name is no word, or another file has registered it.
    """
    check_name(name, "advantage estimator")

    def register(function: AdvantageEstimator) -> AdvantageEstimator:
        ADVANTAGE_ESTIMATORS.add(name, function, function.__module__)
        (_WHOLE.discard if splits_turns else _WHOLE.add)(name)
        (_SUMMING.add if sums_turns else _SUMMING.discard)(name)
        return function

    return register


def splits_turns(name: str) -> bool:
    """Whether the estimator of that name can give turns of one trajectory different advantages."""
    return name not in _WHOLE


def sums_turns(name: str) -> bool:
    """Whether the estimator of that name uses turn rewards only in their sum over a trajectory."""
    return name in _SUMMING


def get_estimator(name: str) -> AdvantageEstimator:
    """Looks an estimator up; raises `ConfigError` with the known names and the nearest if there is none."""
    if name not in ADVANTAGE_ESTIMATORS:
        known = ", ".join(ADVANTAGE_ESTIMATORS)
        raise ConfigError(
            f"The advantage estimator {name!r} is not one of {known}{did_you_mean(name, ADVANTAGE_ESTIMATORS)}."
        )
    return ADVANTAGE_ESTIMATORS[name]


class CreditError(UserError, ValueError):
    """A credit rule returned something unusable. The message is one sentence that names the rule."""


def estimate(
    rule: Rule, batch: RewardBatch, *, turn_coef: float | None = None, scale_rewards: Scale = "group"
) -> Tensor:
    """
    The advantages of a rule, shape (B, K), float32; 0 where a turn does not exist. The rule is its name, or a mapping
    of its `name` and its own options.

    Raises:
        ConfigError: If there is no such rule, or it does not take its options.
        CreditError: If it raises, or returns no tensor, a tensor of another shape, a number that is not finite at a
            turn that exists, or parts whose sum is not the advantage.
    """
    return call_rule(rule, batch, turn_coef=turn_coef, scale_rewards=scale_rewards).advantages


def call_rule(
    rule: Rule, batch: RewardBatch, *, turn_coef: float | None = None, scale_rewards: Scale = "group"
) -> Credit:
    """The advantages of `estimate`, and the parts that a rule of a user's own returns with them."""
    name, _ = _split(rule)
    function, options = bind_rule(rule, turn_coef=turn_coef, scale_rewards=scale_rewards)
    if isinstance(function, in_parts):
        function = function.credit
    try:
        returned = function(batch, **options)
    except UserError:
        raise
    except Exception as error:  # whatever the user's rule raises
        if not defined_at(function):  # a rule of ours: a bug
            raise
        where = find_fault(error).where
        raise CreditError(f"The advantage estimator {name!r} raised {describe_error(error)}, in {where}.") from error
    credit = returned if isinstance(returned, Credit) else Credit(returned)
    advantages = _checked(name, batch, credit.advantages)
    for what, named in (("parts", credit.parts), ("scales", credit.scales)):
        if not isinstance(named, dict) or not all(isinstance(part, str) for part in named):
            raise CreditError(
                f"The advantage estimator {name!r} returned {what} without names: return a tensor by name."
            )
    parts = {
        part: _widened(name, f"part {part!r}", batch, values).masked_fill(~batch.turn_mask, 0.0)
        for part, values in credit.parts.items()
    }
    if parts:
        _check_sum(name, batch, advantages, parts)
    scales = {part: _widened(name, f"scale of {part!r}", batch, scale) for part, scale in credit.scales.items()}
    return Credit(advantages, parts, scales)


def _checked(name: str, batch: RewardBatch, advantages: object) -> Tensor:
    wanted = tuple(batch.turn_mask.shape)
    if not isinstance(advantages, Tensor) or advantages.shape != wanted:
        raise CreditError(
            f"The advantage estimator {name!r} returned {_described(advantages)}: return a tensor with an advantage "
            f"for each trajectory and turn, of the shape {wanted} of `turn_mask`."
        )
    advantages = advantages.to(batch.turn_mask.device, torch.float32)
    wrong = ~advantages.isfinite() & batch.turn_mask
    if wrong.any():
        row, turn = wrong.nonzero()[0].tolist()
        raise CreditError(
            f"The advantage estimator {name!r} gave {advantages[row, turn]} to turn {turn + 1} of trajectory {row}, "
            f"whose turn reward is {batch.turn_rewards[row, turn]} and whose outcome reward is "
            f"{batch.outcome_rewards[row]}, in groups of {batch.group_size}: return a finite number for every turn "
            "that exists, also where a reward is NaN because it does not apply or a group has no deviation."
        )
    checked: Tensor = advantages.masked_fill(~batch.turn_mask, 0.0)
    return checked


def _widened(name: str, what: str, batch: RewardBatch, values: Any) -> Tensor:
    """A part or a scale in the shape of the advantages, float64."""
    wanted = tuple(batch.turn_mask.shape)
    try:
        widened: Tensor = values.to(batch.turn_mask.device, torch.double).expand(wanted)
    except (AttributeError, RuntimeError):  # no tensor, or one that does not broadcast
        raise CreditError(
            f"The advantage estimator {name!r} returned {_described(values)} for the {what}: return a tensor of the "
            f"shape {wanted} of its advantages."
        ) from None
    return widened


def _described(values: object) -> str:
    return f"a tensor of shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"


def _check_sum(name: str, batch: RewardBatch, advantages: Tensor, parts: Mapping[str, Tensor]) -> None:
    stacked = torch.stack(list(parts.values()))
    total, size = stacked.sum(dim=0), stacked.abs().sum(dim=0)
    wrong = ~((total - advantages).abs() <= 1e-6 * (1 + size))  # also where it is NaN
    if wrong.any():
        row, turn = wrong.nonzero()[0].tolist()
        listed = ", ".join(f"{part} {values[row, turn]:.6g}" for part, values in parts.items())
        raise CreditError(
            f"The advantage estimator {name!r} gave {advantages[row, turn]:.6g} to turn {turn + 1} of trajectory "
            f"{row}, and parts whose sum is {total[row, turn]:.6g} ({listed}): return what the advantage is the sum "
            "of, each part divided by its scale, or return the advantages alone."
        )
