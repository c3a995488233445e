"""
A credit rule in use: its entry in the registry, how a recipe names it with its options, which are checked against its
signature, and what it may return.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from mt_grpo.credit.batch import RewardBatch, Scale
from mt_grpo.errors import ConfigError, UserError, defined_at, describe_error, find_fault
from mt_grpo.imports import Registry, check_name, did_you_mean, unknown_option
from mt_grpo.options.values import rule_name


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
    options = ", ".join(f"{name} {value}" for name, value in _options(rule).items())
    return f"{rule_name(rule)} ({options})" if options else rule_name(rule)


def bind_rule(rule: Rule, *, turn_coef: float | None, scale_rewards: str) -> tuple[AdvantageEstimator, dict[str, Any]]:
    """
    The function of a rule, as `parse_rule` returns it, and the options to call it with: its own options, and those of
    the run that it takes. With a `turn_coef` of `None` the rule's own default applies.
    """
    name, options = rule_name(rule), _options(rule)
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
    return {"name": rule_name(rule), **defaults, **given}


def rule_says(rule: Rule) -> str | None:
    """The first paragraph of a rule's docstring on one line; `None` where it has none."""
    text = inspect.getdoc(get_estimator(rule_name(rule)))
    return None if not text else " ".join(text.split("\n\n")[0].split())


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _options(rule: Rule) -> dict[str, Any]:
    return {} if isinstance(rule, str) else {option: value for option, value in rule.items() if option != "name"}


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
    name = rule_name(rule)
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
