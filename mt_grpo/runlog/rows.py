"""Conversations as columns of the Parquet files, and as lines of the index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa

from mt_grpo.media import is_medium
from mt_grpo.runlog.files import to_json, whole
from mt_grpo.runlog.schema import ROLLOUTS, rollouts_file, session_id
from mt_grpo.trajectory import UNWRITTEN, Trajectory

SHOWN = 80
"""Characters of a prompt or an answer in the index."""
SHOWN_OF_ERRORS = 300
"""Characters of an error there."""


@dataclass(frozen=True)
class Batch:
    """
    Conversations that are sampled and scored together on one process.

    Args:
        mode (`str`): `"train"` or `"eval"`.
        step (`int`): Optimiser steps that were taken before.
        k (`int`): Tells batches of one step apart.
        group_size (`int`): Conversations of a prompt.
        numbers (`list[int]`): Row of each conversation in the batch of all processes.
        trajectories (`list[Trajectory]`): The conversations.
        rewards (`list[dict]`): The rewards: `name`, `kind` (`"turn"` or `"outcome"`), `weight` and `maximum`.
    """

    mode: str
    step: int
    k: int
    group_size: int
    numbers: list[int]
    trajectories: list[Trajectory]
    rewards: list[dict[str, Any]] = field(default_factory=list)

    @property
    def sessions(self) -> list[str]:
        """Name of each conversation in the run."""
        return [session_id(self.mode, self.step, self.k, number) for number in self.numbers]

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward by name."""
        return {reward["name"]: reward["weight"] for reward in self.rewards}


@dataclass(frozen=True)
class Weighted:
    """The weighted rewards of a conversation, `None` where none applies."""

    total: float | None
    turns: list[float | None]
    by_name: dict[str, float | None]

    @classmethod
    def of(cls, trajectory: Trajectory, weights: dict[str, float]) -> Weighted:
        """The rewards of a conversation; none if it was not scored."""
        turn_rewards = trajectory.rewards.get("turn", {})
        outcomes = trajectory.rewards.get("outcome", {})
        turns = [
            _sum(_times(weights[name], values[index]) for name, values in turn_rewards.items())
            for index in range(len(trajectory.turns))
        ]
        total = _sum([*turns, *(_times(weights[name], value) for name, value in outcomes.items())])
        return cls(total, turns, {name: _sum(values) for name, values in turn_rewards.items()} | outcomes)


def _times(weight: float, value: float | None) -> float | None:
    return None if value is None else weight * value


def _sum(values: Any) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) if present else None


def rollout_table(batch: Batch, rank: int, keep: Callable[[Any], str]) -> pa.Table:
    """The conversations of a batch with the columns of `ROLLOUTS`; `keep` writes an image or sound to a file."""
    weights = batch.weights
    weighted = [Weighted.of(trajectory, weights) for trajectory in batch.trajectories]
    nodes = [trajectory.tree.nodes for trajectory in batch.trajectories]
    trees = [trajectory.tree for trajectory in batch.trajectories]
    size = len(batch.trajectories)
    columns: dict[str, Any] = {
        "session": batch.sessions,
        "mode": [batch.mode] * size,
        "step": [batch.step] * size,
        "k": [batch.k] * size,
        "rank": [rank] * size,
        "group": [number // batch.group_size for number in batch.numbers],
        "member": [number % batch.group_size for number in batch.numbers],
        "stop": [trajectory.stop_reason and trajectory.stop_reason.value for trajectory in batch.trajectories],
        "reward": [each.total for each in weighted],
        "turn_rewards": [each.turns for each in weighted],
        "weights": [to_json(weights)] * size,
        "record": [record(trajectory, keep) for trajectory in batch.trajectories],
        "tokens": lists([[node.tokens for node in each] for each in nodes], np.int32),
        "logprobs": lists([[node.logprobs for node in each if node.turn >= 0] for each in nodes], np.float32),
        "node_parent": [[node.parent for node in each] for each in nodes],
        "node_turn": [[node.turn for node in each] for each in nodes],
        "node_size": [[len(node.tokens) for node in each] for each in nodes],
        "num_turns": [tree.num_turns for tree in trees],
        "tip": [tree.tip for tree in trees],
    }
    return pa.table(columns, schema=ROLLOUTS)


def lists(rows: Sequence[Sequence[Sequence[Any]]], kind: type) -> pa.Array:
    """A column of lists, each given in parts. It is much faster than pyarrow's conversion of Python lists."""
    sizes = [sum(map(len, parts)) for parts in rows]
    values: np.ndarray = np.fromiter(chain.from_iterable(chain.from_iterable(rows)), dtype=kind, count=sum(sizes))
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def record(trajectory: Trajectory, keep: Callable[[Any], str]) -> bytes:
    """A conversation as JSON, without its tokens, its messages once: images and sounds are what `keep` returns."""
    fields = {
        name: getattr(trajectory, name)
        for name in Trajectory.__dataclass_fields__
        if name not in (*UNWRITTEN, "tree", "turns", "stop_reason")
    }
    fields["turns"] = [{**vars(turn), "tool_calls": list(map(vars, turn.tool_calls))} for turn in trajectory.turns]
    fields["stop_reason"] = trajectory.stop_reason and trajectory.stop_reason.value
    # half a character, which an environment may write, as the escape that JSON has for it
    plain = to_json(fields, default=lambda value: keep(value) if is_medium(value) else str(value))
    return plain.encode("utf-8", "backslashreplace")


def rollout_lines(batch: Batch, rank: int) -> list[dict[str, Any]]:
    """The index's lines of a batch."""
    file = rollouts_file(batch.mode, batch.step, batch.k, rank)
    lines = []
    names = zip(batch.trajectories, batch.sessions, strict=True)
    by_session = {trajectory.session: (trajectory, session) for trajectory, session in names}
    for row, (session, number, trajectory) in enumerate(
        zip(batch.sessions, batch.numbers, batch.trajectories, strict=True)
    ):
        weighted = Weighted.of(trajectory, batch.weights)
        turns = trajectory.turns
        lines.append(
            {
                "kind": "rollout",
                "session": session,
                "mode": batch.mode,
                "step": batch.step,
                "k": batch.k,
                "rank": rank,
                "group": number // batch.group_size,
                "member": number % batch.group_size,
                "prompt": question_of(trajectory),
                "stop": trajectory.stop_reason and trajectory.stop_reason.value,
                "error": trajectory.error and _short(trajectory.error, SHOWN_OF_ERRORS),
                "where": trajectory.where,
                "answer": trajectory.answer and _short(str(trajectory.answer)),
                "right": _right(batch, weighted),
                "turns": len(turns),
                "tokens": [turn.num_tokens for turn in turns],
                "context": max((turn.context_length for turn in turns), default=0),
                "sampled": _digest(trajectory),
                "unique": trajectory.tree.num_tokens,
                "forks": max(0, trajectory.tree.num_sequences - 1),
                "reward": _rounded(weighted.total),
                "rewards": {name: _rounded(value) for name, value in weighted.by_name.items()},
                "turn_rewards": list(map(_rounded, weighted.turns)),
                "calls": sum(len(turn.tool_calls) for turn in turns),
                "errors": [turn.num_failures for turn in turns],
                **_failed_calls(trajectory),
                "refused": sum(trajectory.refusals.values()),
                "first_refused": next((_short(why, SHOWN_OF_ERRORS) for why in trajectory.refusals), None),
                **_branch(trajectory, by_session),
                "start": _rounded(trajectory.start, 3),
                "seconds": _rounded(trajectory.seconds, 3),
                "turn_seconds": [_rounded(turn.seconds, 3) for turn in turns],
                "tool_seconds": [
                    _rounded(max((call.seconds for call in turn.tool_calls), default=0.0), 3) for turn in turns
                ],
                "file": file,
                "row": row,
            }
        )
    return lines


def _digest(trajectory: Trajectory) -> int:
    """A checksum of the sampled tokens."""
    digest = 0
    for node in trajectory.tree.nodes:
        if node.turn >= 0:
            digest = crc32(np.array(node.tokens, np.int64).tobytes(), digest)
    return digest


def _branch(trajectory: Trajectory, by_session: dict[str, tuple[Trajectory, str]]) -> dict[str, Any]:
    """Of a branch, the conversation that it is one of, and how many turns it shares with it."""
    if trajectory.branch_of not in by_session:
        return {}
    trunk, session = by_session[trajectory.branch_of]
    same = [own.start == other.start for own, other in zip(trajectory.turns, trunk.turns, strict=False)]
    return {"branch_of": session, "shared_turns": [*same, False].index(False)}


def _failed_calls(trajectory: Trajectory) -> dict[str, Any]:
    """
    Calls that raised in the code of their tool, those that failed in another way, and the first of each. A call that
    no longer had a turn is none of them: what ended the conversation is told.
    """
    tried = [call for turn in trajectory.turns for call in turn.tool_calls if turn.replies or call.executed]
    failed = [call for call in tried if call.error is not None]
    raised = [f"{call.name}: {call.error} ({call.where})" for call in failed if call.where]
    others = [call.error or "" for call in failed if not call.where]
    return {
        "raised": len(raised),
        "first_raised": _short(raised[0], SHOWN_OF_ERRORS) if raised else None,
        "failed": len(others),
        "first_failed": _short(others[0], SHOWN_OF_ERRORS) if others else None,
    }


def _right(batch: Batch, weighted: Weighted) -> bool | None:
    outcomes = [reward for reward in batch.rewards if reward["kind"] == "outcome"]
    exact = [reward for reward in outcomes if "exact_match" in reward["name"]]
    for reward in [*exact, *outcomes][:1]:
        value = weighted.by_name.get(reward["name"])
        return None if value is None else value >= reward["maximum"]
    return None


def question_of(trajectory: Trajectory) -> str:
    """The last message of the user in a prompt, shortened."""
    messages = trajectory.prompt if isinstance(trajectory.prompt, list) else [{"content": trajectory.prompt}]
    asked = [message for message in messages if message.get("role", "user") == "user"] or messages
    content = asked[-1].get("content") if asked else ""
    if isinstance(content, list):  # content in parts
        content = " ".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return _short(str(content or ""))


def _short(text: str, size: int = SHOWN) -> str:
    text = " ".join(text[: 4 * size].split())
    text = text if len(text) <= size else text[: size - 1] + "…"
    return whole(text)


def _rounded(value: float | None, digits: int = 6) -> float | None:
    return None if value is None else round(value, digits)
