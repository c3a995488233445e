"""
The rules for what stands out in conversations, the same in the terminal, `summary.json`, `rollout` and the page; and
means with intervals, and how often a question is answered in several attempts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np

from mt_grpo.runlog.index import Table
from mt_grpo.runlog.schema import Row
from mt_grpo.trajectory import StopReason, visible

BAD, WARN = "bad", "warn"

_WARN_SHARE = 0.5  # least share of conversations, groups or calls that stands out

FAILED = (StopReason.ENGINE_ERROR.value, StopReason.ENV_ERROR.value)  # conversations that say nothing of the policy
EQUAL = 1e-9  # rewards that differ by less are the same

_LIMITS = {
    StopReason.LENGTH: "a turn used up `max_turn_length`: raise it",
    StopReason.TOKEN_BUDGET: "`max_completion_length` was used up: raise it, or bound the turns (`max_turn_length`)",
    StopReason.CONTEXT_FULL: "the model's context was full: take fewer steps (`max_env_steps`), compact the history "
    "(`history: compact`), or raise `vllm_max_model_length` where it bounds the context",
    StopReason.TIMEOUT: "`rollout_timeout` was over: raise it, or see which turns and calls are slow",
    StopReason.MAX_STEPS: "the model wanted one more step than `max_env_steps` allows: raise it, or tell the model to "
    "answer sooner",
}
"""Limits that end conversations, each with what to do about it."""


@dataclass(frozen=True)
class Finding:
    """A rule that found something."""

    level: str
    kind: str
    strong: str
    text: str
    query: str

    @property
    def sentence(self) -> str:
        return f"{self.strong} {self.text}"


@dataclass
class Counts:
    """What the rules look at. Counts of several batches are joined with `merge`."""

    conversations: int = 0
    stops: Counter[str | None] = field(default_factory=Counter)
    first_failure: str = ""
    turns: int = 0
    without_turn: int = 0  # conversations in which the policy was not asked for a turn
    too_long: int = 0  # conversations whose prompt left no room for a turn
    first_too_long: str = ""
    refused: int = 0  # conversations with refused requests after which they went on
    first_refused: str = ""
    calls: int = 0
    malformed: int = 0
    raised: int = 0
    first_raised: str = ""
    failed_calls: int = 0  # calls that failed otherwise than by raising in the code of their tool
    first_failed_call: str = ""
    groups: int = 0  # groups of several conversations that did not fail
    same: int = 0  # groups whose members sampled the same tokens
    same_right: int = 0  # and are right
    right: set[bool] = field(default_factory=set)
    """Which of right and wrong occurred, among conversations that a reward judges."""
    earned: set[float] = field(default_factory=set)
    """Rewards that conversations earned: of each batch two, which are enough to know that they differ."""

    def add(self, rows: Sequence[Row]) -> Counts:
        """Counts conversations, given as lines of the index in whole groups. Returns itself."""
        table = Table()
        table.add("rollout", rows)
        return self.add_table(table, np.arange(len(table)))

    def add_table(self, table: Table, places: np.ndarray) -> Counts:
        """As `add`, of the rows of a table at these places."""
        stops, texts = table.codes("stop")
        failed = np.isin(stops[places], [code for code, text in enumerate(texts) if text in FAILED])
        held = places[~failed]
        self.refused += int((_columns(table, held, "refused")[0] > 0).sum())
        self.first_refused = self.first_refused or _first(table, held, "first_refused")
        self.conversations += len(places)
        for code, number in enumerate(np.bincount(stops[places], minlength=len(texts)).tolist()):
            self.stops[texts[code]] += number
        if failed.any() and not self.first_failure:
            row = table[int(places[failed][0])]
            self.first_failure = visible(f"{row['error']} ({row['where']})" if row.get("where") else f"{row['error']}")
        turns, calls, raised, failed_calls = _columns(table, held, "turns", "calls", "raised", "failed")
        errors = table.totals("errors").astype(int)[held]
        self.turns += int(turns.sum())
        full = [code for code, text in enumerate(texts) if text == StopReason.CONTEXT_FULL.value]
        too_long = (turns == 0) & np.isin(stops[held], full)
        self.too_long += int(too_long.sum())
        self.first_too_long = self.first_too_long or _first(table, held[too_long], "error")
        self.without_turn += int((turns == 0).sum() - too_long.sum())
        self.calls += int(calls.sum())
        self.malformed += int(errors[calls == 0].sum())
        self.raised += int(raised.sum())
        self.first_raised = self.first_raised or _first(table, held, "first_raised")
        self.failed_calls += int(failed_calls.sum())
        self.first_failed_call = self.first_failed_call or _first(table, held, "first_failed")
        right, reward = (np.unique(column[~np.isnan(column)]) for column in _columns(table, held, "right", "reward"))
        self.right |= set(map(bool, right.tolist()))
        self.earned |= set(reward[:2].tolist())
        self._add_groups(table, held)
        return self

    def _add_groups(self, table: Table, held: np.ndarray) -> None:
        keys = np.stack([table.codes("mode")[0][held], *_columns(table, held, "step", "k", "group")], axis=1)
        order = np.lexsort(keys.T)
        keys, places = keys[order], held[order]
        sampled, right = _columns(table, places, "sampled", "right")
        first = np.flatnonzero(np.concatenate([[len(keys) > 0], (keys[1:] != keys[:-1]).any(axis=1)]))
        sizes = np.diff([*first, len(keys)])
        equal = np.minimum.reduceat(sampled, first) == np.maximum.reduceat(sampled, first) if len(first) else sizes > 0
        self.groups += int((sizes > 1).sum())
        same = equal & (sizes > 1)
        self.same += int(same.sum())
        self.same_right += int((same & (right[first] == 1)).sum())

    def merge(self, other: Counts) -> None:
        """Adds the counts of other conversations."""
        for name, value in vars(other).items():
            known = getattr(self, name)
            if isinstance(value, str):  # the first that is said
                joined = known or value
            else:
                joined = known | value if isinstance(value, set) else known + value
            setattr(self, name, joined)

    @property
    def failed(self) -> int:
        return sum(self.stops[reason] for reason in FAILED)

    @property
    def held(self) -> int:
        """Conversations that did not fail."""
        return self.conversations - self.failed


def _first(table: Table, places: np.ndarray, name: str) -> str:
    """The first text of the rows at these places that is not empty; empty where there is none."""
    codes, texts = table.codes(name)
    known = codes[places][np.isin(codes[places], [code for code, text in enumerate(texts) if text])]
    return visible(texts[known[0]] or "") if len(known) else ""


def _columns(table: Table, places: np.ndarray, *names: str) -> list[np.ndarray]:
    return [table.numbers(name)[places] for name in names]


def find(counts: Counts, about: Row | None = None) -> list[Finding]:
    """What stands out, worst first."""
    limits = list(_limits(counts))
    # a conversation that is cut off may not have reached a call
    tools = {} if limits or counts.too_long else about or {}
    found = [*_failed(counts), *_of_policy(counts), *limits, *_refused(counts), *_of_tools(counts, tools)]
    return sorted(found, key=lambda finding: (BAD, WARN).index(finding.level))


def find_in_run(rows: Table, about: Row | None = None) -> list[Finding]:
    """What stands out in a run: in its training, and conversations of any mode that failed."""
    modes, texts = rows.codes("mode")
    train = np.flatnonzero(np.isin(modes, [code for code, text in enumerate(texts) if text == "train"]))
    of_training = find(Counts().add_table(rows, train), about)
    of_all = Counts().add_table(rows, np.arange(len(rows)))
    others = (
        replace(finding, query=f"mode=train {finding.query}") for finding in of_training if finding.kind != "failed"
    )
    return [*_failed(of_all), *others, *_silent_rewards(rows, train)]


def _failed(counts: Counts) -> Iterator[Finding]:
    if counts.failed:
        reasons = ", ".join(reason for reason in FAILED if counts.stops[reason])
        strong = f"{counts.failed} of {plural(counts.conversations, 'conversation')} failed ({reasons}),"
        text = f"the first with: {counts.first_failure.rstrip('.')}. Nothing is learnt from them."
        yield Finding(BAD, "failed", strong, text, f"stop={','.join(FAILED)}")


def _silent_rewards(rows: Table, train: np.ndarray) -> Iterator[Finding]:
    for name in rows.reward_names if len(train) else ():
        if np.isnan(rows.reward(name)[train]).all():
            strong = f"The reward {visible(name)!r} applied to no conversation:"
            yield Finding(WARN, "silent reward", strong, "it returned `None` for each.", "mode=train")


def _refused(counts: Counts) -> Iterator[Finding]:
    if counts.refused:
        strong = f"Requests were refused in {counts.refused} of {plural(counts.held, 'conversation')}, which went on:"
        yield Finding(WARN, "refused", strong, f"the first since {counts.first_refused}", "refused>0")


def _of_policy(counts: Counts) -> Iterator[Finding]:
    if counts.too_long and counts.too_long >= _WARN_SHARE * counts.held:
        strong = (
            f"{counts.too_long} of {plural(counts.held, 'conversation')} had no turn, since the prompt is too long:"
        )
        text = (
            f"{counts.first_too_long} Leave such rows out, shorten what an agent or tools show first, or raise "
            "`vllm_max_model_length` where it bounds the context."
        )
        yield Finding(BAD, "too long", strong, text, f"turns=0 stop={StopReason.CONTEXT_FULL.value}")
    elif counts.without_turn and counts.without_turn >= _WARN_SHARE * counts.held:
        text = (
            "the policy was never asked, so there is nothing to train. An agent asks it through `client.openai()` or "
            "`client.base_url`, an environment through `policy.reply`."
        )
        strong = f"{counts.without_turn} of {plural(counts.held, 'conversation')} ended without a turn:"
        yield Finding(BAD, "no turn", strong, text, "turns=0")
    elif counts.same and counts.same >= _WARN_SHARE * counts.groups:
        strong = f"{counts.same} of {plural(counts.groups, 'group')} sampled the same tokens in all members"
        text = "nothing tells them apart, so nothing is learnt."
        if counts.same_right >= _WARN_SHARE * counts.same:
            strong += f", right ones in {counts.same_right}:"
            text += " A question that is answered right each time has no more to teach: add harder ones."
            yield Finding(WARN, "same samples", strong, text, "spread=0")
        else:
            text += " Raise `temperature`, and look at `top_k`, `top_p` and `min_p`."
            yield Finding(BAD, "same samples", f"{strong}:", text, "spread=0")


def _of_tools(counts: Counts, about: Row) -> Iterator[Finding]:
    if counts.raised and counts.raised >= _WARN_SHARE * counts.calls:
        strong = f"{counts.raised} of {plural(counts.calls, 'call')} raised in the code of their tool,"
        yield Finding(WARN, "raised", strong, f"the first: {counts.first_raised}", "errors>0")
    if counts.failed_calls and counts.failed_calls >= _WARN_SHARE * counts.calls:
        strong = f"{counts.failed_calls} of {plural(counts.calls, 'call')} failed,"
        yield Finding(WARN, "failed calls", strong, f"the first with: {counts.first_failed_call}", "errors>0")
    if counts.calls or not counts.turns:
        return
    # a turn that was cut off may have had no room for its call
    malformed = counts.malformed - sum(counts.stops[reason.value] for reason in StopReason if reason.is_truncated)
    if malformed >= _WARN_SHARE * counts.held:
        text = (
            f"{plural(malformed, 'turn')} had neither a call nor an answer. `mt-grpo train --dry_run` prints what "
            "the model is told of calls; those that it knows are its chat template's (`call_protocol: native`)."
        )
        yield Finding(WARN, "no call", "No call of a tool could be read:", text, "errors>0")
    elif about.get("tools"):
        strong = f"None of {plural(counts.held, 'conversation')} called a tool:"
        text = f"ask for {', '.join(about['tools'])} in `system_prompt`, or reward calls."
        yield Finding(WARN, "no call", strong, text, "calls=0")


def _limits(counts: Counts) -> Iterator[Finding]:
    for reason, mend in _LIMITS.items():
        number = counts.stops[reason.value] - (counts.too_long if reason is StopReason.CONTEXT_FULL else 0)
        if number and number >= _WARN_SHARE * counts.held:
            ended = "cut off" if reason.is_truncated else "ended"
            verb = "was" if number == 1 else "were"
            strong = f"{number} of {plural(counts.held, 'conversation')} {verb} {ended} by {reason.value}:"
            yield Finding(WARN, reason.value, strong, f"{mend}.", f"stop={reason.value}")


def why_equal(counts: Counts, about: Row | None = None) -> str:
    """Why members of groups earned the same, as a sentence; questions are blamed only if nothing else is."""
    found = [finding.strong for finding in find(counts, about) if finding.kind not in ("failed", "refused")]
    if found:
        return f"{'; '.join(strong.rstrip(':,') for strong in found)}."
    if counts.right == {True}:
        return "Every conversation is right: the questions are too easy."
    if counts.right == {False}:
        return "No conversation is right: the questions may be too hard, or the reward for an answer too strict."
    if len(counts.earned) == 1:
        [earned] = counts.earned
        return f"Every conversation earned {earned:g}: the rewards tell nothing apart."
    if counts.right == {True, False}:
        return "Some questions are too easy, and others too hard."
    return "The rewards tell questions apart, and no two answers to one: they may be too coarse."


def plural(number: int, what: str) -> str:
    """So many of something."""
    return f"{number} {what}{'s' * (number != 1)}"


CONFIDENCE = 0.95
RESAMPLES = 9999
_MOST_DRAWN = 2**22  # rows that are drawn at a time


@dataclass(frozen=True)
class Estimate:
    """A mean over so many rows and its interval, which fewer than two rows do not have."""

    mean: float | None
    low: float | None
    high: float | None
    rows: int


def bootstrap(values: np.ndarray, seed: int = 0) -> Estimate:
    """The mean of values `(rows,)`, without NaN, and its percentile interval by the bootstrap (Efron 1979)."""
    values = values[~np.isnan(values)]
    size = len(values)
    if size < 2:
        return Estimate(float(values[0]) if size else None, None, None, size)
    rng, means = np.random.default_rng(seed), np.empty(RESAMPLES)
    at_once = max(1, _MOST_DRAWN // size)
    for begin in range(0, RESAMPLES, at_once):
        end = min(begin + at_once, RESAMPLES)
        means[begin:end] = values[rng.integers(0, size, (end - begin, size))].mean(axis=1)
    low, high = np.percentile(means, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return Estimate(float(values.mean()), float(low), float(high), size)


_FEWEST_STEPS, _FEWEST = 20, 5
"""Steps, and steps that count, below which there is no interval: it would be too short for steps that are alike."""


def over_steps(values: np.ndarray) -> Estimate:
    """
    The mean of values of neighbouring steps `(steps,)`, with the interval of Student's t: of `n` with a correlation
    `r` of neighbours `n (1 - r) / (1 + r)` count. `r` is found too small by `(1 + 3 r) / n` (Marriott and Pope 1954).
    """
    count, mean = float(len(values)), float(values.mean())
    rest = values - mean
    if (square := float(rest @ rest)) > 0:
        alike = float(rest[1:] @ rest[:-1]) / square
        alike = min(max(0.0, alike + (1 + 3 * alike) / count), 1.0)
        count *= (1 - alike) / (1 + alike)
    if len(values) < _FEWEST_STEPS or count < _FEWEST:
        return Estimate(mean, None, None, len(values))
    half = _student(count - 1) * float(values.std(ddof=1)) / count**0.5
    return Estimate(mean, mean - half, mean + half, len(values))


def _student(freedom: float) -> float:
    """The quantile of Student's t for `CONFIDENCE` (Cornish and Fisher's expansion)."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return sum(term / freedom**power for power, term in enumerate(terms))


def pass_at(right: np.ndarray, attempts: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """
    pass@k and pass^k of questions with `attempts` of which `right` are right, `(questions,)` each; NaN with fewer
    attempts than `k`. Unbiased: shares of subsets of `k` (Chen et al. 2021, 2107.03374, equation 1; Yao et al. 2024,
    2406.12045).
    """
    right, attempts = right.astype(float), attempts.astype(float)
    none, every = np.ones(len(right)), np.ones(len(right))
    for drawn in range(k):
        left = np.maximum(attempts - drawn, 1)
        none *= np.maximum(attempts - right - drawn, 0) / left
        every *= np.maximum(right - drawn, 0) / left
    known = attempts >= k
    return np.where(known, 1 - none, np.nan), np.where(known, every, np.nan)
