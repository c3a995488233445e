"""What a comparison of credit rules says: a table and advice for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mt_grpo.advisor import rollout_command
from mt_grpo.advisor.compare import ALL, TURN, Direction, Interval
from mt_grpo.advisor.measure import Found
from mt_grpo.credit.rule import rule_label, sums_turns
from mt_grpo.options.values import rule_name
from mt_grpo.training.step_log.records import read_audits
from mt_grpo.trajectory import visible

_WIDTH = 110  # columns of the table, whatever the terminal has

_LITTLE = 0.3  # of a rule that gives the first turn less of an outcome than this share, a run warns too
_LATE = 0.5  # where conversations have less than this share of the turns of the longest one, later turns hardly show

_NOT_TOLD: dict[str, float | None] = {"value": None, "low": None, "high": None}


def show(found: Found) -> None:
    """Prints the table, what is not in it, and the advice."""
    console = Console(soft_wrap=True, width=max(_WIDTH, Console().width))
    say = partial(console.print, highlight=False, markup=False)
    chosen, comparison, judged = found.chosen, found.comparison, found.judgement
    groups = len(chosen.rows) // chosen.group_size
    say(
        f"{groups} groups of {chosen.group_size} conversations, {chosen.mode}, step {chosen.step}; {found.turns} "
        f"turns in {found.seconds:.0f} s. Log-probs differ from the recorded ones by "
        f"{found.mismatch:.4f} nats in the mean."
    )
    table = Table(box=None, padding=(0, 2, 0, 0), width=_WIDTH)
    table.add_column("rule")
    for column in ("cosine", "signal-to-noise", f"a step of {chosen.groups_per_step:.3g} groups", "serves worst"):
        table.add_column(column, justify="right", no_wrap=True)
    for label in _ordered(found):
        direction = comparison.directions[label]
        name = f"{label} (this run's)" if label == found.own else label
        parts = ("no gradient", "", "")
        if direction is not None:
            parts = tuple(map(_interval, (direction.cosine, direction.signal_to_noise, direction.step)))
        worst = ""  # what it does worst, and how far its steps go there in what those of the best rule do
        if judged.known:
            item = judged.worst(label)
            worst = f"{visible(item)} {judged.shares[label][item][0].item():.2f}"
        table.add_row(Text(visible(name)), *parts, Text(worst))
    console.print(table)
    if named := _names_of_rewards(found):
        listed = "; ".join(f"{item} is `{visible(name)}`" for item, name in named.items())
        say(f"{listed[0].upper()}{listed[1:]}.")
    for label, why in found.left_out.items():
        say(f"Not measurable here: {visible(label)}: {visible(why)}.")
    for line in _advice(found):
        say(line)


def _ordered(found: Found) -> list[str]:
    """The rules: those that serve the reward best that they serve worst first, those without a gradient last."""

    def key(label: str) -> tuple[bool, float, float]:
        score = found.judgement.scores[label][0].item() if found.judgement.known else 0.0
        return found.comparison.directions[label] is None, -score, -found.comparison.ascents[label][0].item()

    return sorted(found.comparison.directions, key=key)


def _names_of_rewards(found: Found) -> dict[str, str]:
    """The run's names of the rewards that are told apart by numbers, of those that have a gradient."""
    named = {}
    for kind, what in (("turn", "turn reward"), ("outcome", "outcome")):
        names = [reward["name"] for reward in found.chosen.run.about["rewards"] if reward["kind"] == kind]
        named |= {f"{what} {number}": name for number, name in enumerate(names, 1)}
    return {item: name for item, name in named.items() if item in found.judgement.items}


def _interval(interval: Interval) -> str:
    if not interval.told:
        return "not told"
    value, low, high = (
        "?" if each is None else f"{each:.2f}" for each in (interval.value, interval.low, interval.high)
    )
    return f"{value} [{low}, {high}]"


def _advice(found: Found) -> list[str]:
    """What to make of a comparison, in sentences; the last one names the rule to take."""
    chosen, comparison, own = found.chosen, found.comparison, found.own
    lines = []
    late = _depending_on_later_turns(found)
    if late:
        summing = [rule for rule in comparison.directions if sums_turns(rule_name(found.rules[rule]))]
        lines.append(
            f"Turn rewards of this run depend on later turns: {_names(late)}. Rules that credit single turns are "
            f"biased with them, those that take their sum ({_names(summing)}) are not for that reason."
        )
    if found.uncredited is not None and found.uncredited >= 0.005:
        turns = found.batch.turn_mask.sum(dim=1)[~found.batch.failed].double().mean().item()
        lines.append(
            f"At {turns:.1f} turns per conversation `{own}` leaves {found.uncredited:.0%} of the turn rewards without "
            "credit at the turn that earned them."
        )
    judged = found.judgement
    groups = len(chosen.rows) // chosen.group_size
    more = f"sample more ({rollout_command(chosen.run, 64)}, then `mt-grpo credit FOLDER`)"
    opposed = _names(judged.opposed)
    if opposed and ALL in judged.told:
        lines.append(f"Against the rest of the rewards goes {opposed}: that a rule does not follow it is no fault.")
    if not judged.known:
        if judged.rare:
            carriers = min(judged.items[name].carriers for name in judged.rare)
            lines.append(
                f"Not enough evidence: about {carriers:.0f} of {groups} groups carry the gradient of "
                f"{_names(judged.rare)}, and others may want another rule: {more}."
            )
        elif opposed:
            lines.append(
                f"Not enough evidence: {opposed} goes against the rest of the rewards, and {groups} groups do not "
                f"tell what all of them together want: {more}."
            )
        else:
            lines.append(
                f"Not enough evidence: {groups} groups do not tell the direction of the gradient, so they tell no "
                f"rule from another: {more}."
            )
        return lines
    best = judged.best
    points = f"of what it does worst, {_reached(found, best)}"
    if best == judged.farthest:
        points += ", the best here"
    else:
        points += f". `{judged.farthest}` goes farther"
        if round(judged.kept.get(judged.farthest, 1.0), 2) < round(judged.kept.get(best, 1.0), 2):
            points += ", and gives early turns less of an outcome"
    if own is None:
        lines.append(f"Take {_call(found, best)}: {points}.")
    elif own == best:
        lines.append(f"Keep `{own}`: {points}.")
    elif judged.behind(own, best) and (not judged.near(own) or judged.kept.get(own, 1.0) < _LITTLE):
        lines.append(
            f"Take {_call(found, best)} instead of `{own}`: {points}; `{own}` does worst {_reached(found, own)}."
        )
    elif judged.kept.get(own, 1.0) < _LITTLE <= judged.kept.get(best, 1.0):
        lines.append(
            f"Take {_call(found, best)} instead of `{own}`, which is not shown to be behind, and gives the first turn "
            f"{judged.kept[own]:.2%} of what it gives the turn that gets most for an outcome: {points}."
        )
    elif judged.behind(own, best):
        lines.append(
            f"Keep `{own}`: of what it does worst, {_reached(found, own)}; `{best}` goes less than a fifth farther."
        )
    else:
        lines.append(f"Keep `{own}`: no rule is shown to be better; more groups would tell whether `{best}` is.")
    equal = [rule for rule in comparison.directions if rule not in (best, own) and not judged.behind(rule, best)]
    if equal and own != best:
        lines[-1] += f" Not shown behind it: {_names(equal)}."
    silent = [name for name in judged.silent if ALL not in judged.told or not name.startswith(TURN)]
    if silent:
        lines.append(
            f"Not enough evidence on {_names(silent)}: the groups do not tell its gradient, so it has no part in this."
        )
    lines += _unseen(found)
    return lines


def _call(found: Found, label: str) -> str:
    """A rule as it is to be taken."""
    scale = found.scales.get(label)
    return f"`{label}`" if scale is None else f"`{rule_label(found.rules[label])}` with `scale_rewards: {scale}`"


def _names(items: Sequence[str]) -> str:
    return ", ".join(f"`{visible(name)}`" for name in items)


def _unseen(found: Found) -> list[str]:
    """What the first policy hardly shows, and may decide later, as one sentence; none where there is nothing."""
    judged, batch = found.judgement, found.batch
    turns = batch.turn_mask.sum(dim=1)[~batch.failed].double()
    shown = set(judged.items) - set(judged.silent)
    outcome_alone = not judged.with_all and bool(batch.outcome_rewards.nan_to_num(nan=0.0).any())
    parts = []
    if judged.kept and not outcome_alone and not any(name.startswith("outcome") for name in shown):
        parts.append("what the outcome wants of each turn")
    if turns.mean() < _LATE * turns.max():
        parts.append(f"turns after the {turns.mean():.0f} that conversations have in the mean")
    if not parts:
        return []
    return [
        f"These conversations hardly show {' and '.join(parts)}: that may decide later, so compare again at a "
        "checkpoint (`--step N`)."
    ]


def _reached(found: Found, label: str) -> str:
    """What a rule does worst, in words."""
    item = found.judgement.worst(label)
    share = found.judgement.share(label, item)
    what = "all rewards together" if item == ALL else f"`{visible(item)}`"
    return f"{what}, its steps go {_interval(share)} as far as those of the best rule there"


def _depending_on_later_turns(found: Found) -> list[str]:
    """Turn rewards that the run saw change when later turns were cut off."""
    rewards = [pair for audit in read_audits(found.chosen.run.folder) for pair in audit["rewards"].items()]
    return list(dict.fromkeys(name for name, reward in rewards if reward.get("causal") is False))


def as_json(found: Found) -> dict[str, Any]:
    """All of it for programs; numbers that the groups do not tell are `null`."""
    chosen, comparison, judged = found.chosen, found.comparison, found.judgement

    def numbers(direction: Direction | None) -> dict[str, dict[str, float | None]]:
        intervals = {} if direction is None else vars(direction)
        return {name: asdict(each) if each.told else _NOT_TOLD for name, each in intervals.items()}

    return {
        "run": str(chosen.run.folder),
        "model": chosen.model,
        "mode": chosen.mode,
        "step": chosen.step,
        "groups": len(chosen.rows) // chosen.group_size,
        "group_size": chosen.group_size,
        "groups_per_step": chosen.groups_per_step,
        "turns": found.turns,
        "seconds": round(found.seconds, 1),
        "mismatch": found.mismatch,
        "own": found.own,
        "uncredited_at_turn": found.uncredited,
        "known": judged.known,
        "best": judged.best if judged.known else None,
        "told": list(judged.told),
        "not_told": judged.silent,
        "opposed": judged.opposed,
        "rules": {
            label: {
                "rule": found.rules[label],
                "scale_rewards": found.scales.get(label, chosen.options["scale_rewards"]),
                **numbers(each),
                "rewards": {
                    item: {
                        **numbers(compared.directions[label]).get("step", _NOT_TOLD),
                        "share": asdict(judged.share(label, item)) if item in judged.told else _NOT_TOLD,
                    }
                    for item, compared in judged.items.items()
                },
                "worst": judged.worst(label) if judged.known else None,
                "outcome_at_first_turn": judged.kept.get(label),
                "behind_best": judged.known and judged.behind(label, judged.best),
            }
            for label, each in comparison.directions.items()
        },
        "not_measurable": found.left_out,
        "depends_on_later_turns": _depending_on_later_turns(found),
        "advice": _advice(found),
    }
