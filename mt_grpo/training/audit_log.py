"""Audits of the rewards of a run, in `audit.jsonl`, and what to say when nothing is learnt."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from mt_grpo.credit import Audit
from mt_grpo.training.jsonl import to_json

STILL = 10
"""Steps in a row without a gradient that are spoken of: fewer may be chance."""

logger = logging.getLogger(__name__)


class AuditLog(TrainerCallback):
    """
    Appends an audit to `audit.jsonl` in the output folder for each log step in which conversations were sampled, the
    mean over its batches, and warns once when the gradient has been 0 for `STILL` steps.
    """

    def __init__(self) -> None:
        self._window: list[dict[str, Any]] = []
        self._recent: deque[dict[str, Any]] = deque(maxlen=STILL)
        self._still = 0

    def observe(self, audit: Audit, names: Sequence[str], causal: Mapping[str, bool]) -> None:
        """
        Takes note of a training batch.

        Args:
            audit (`Audit`): Its audit.
            names (`Sequence[str]`): Names of its rewards.
            causal (`Mapping[str, bool]`): Whether a turn reward stays as it is when later turns are cut off; turn
                rewards that were not examined are absent.
        """
        record = as_record(audit, names, causal)
        self._window.append(record)
        self._recent.append(record)

    def observe_gradient(self, norm: float | None, speaks: bool) -> None:
        """
        Takes note of a step.

        Args:
            norm (`float`, *optional*): The norm of its gradient; `None` where it is not known.
            speaks (`bool`): Whether this process warns.
        """
        self._still = self._still + 1 if norm == 0 else 0
        if self._still == STILL and speaks:
            logger.warning(
                "The gradient has been exactly 0 for %d steps, so nothing is learnt: %s.",
                STILL,
                why_still(list(self._recent)),
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._window, self._still = [], 0
        self._recent.clear()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "loss" in logs:  # else they are of an evaluation
            self._write(args, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._write(args, state)

    def _write(self, args: Any, state: Any) -> None:
        window, self._window = self._window, []
        if window and state.is_world_process_zero:
            line = {"step": state.global_step, **mean_record(window)}
            with (Path(args.output_dir) / "audit.jsonl").open("a", encoding="utf-8") as file:
                file.write(to_json(line) + "\n")


def as_record(audit: Audit, names: Sequence[str], causal: Mapping[str, bool]) -> dict[str, Any]:
    """An audit as JSON has it, with its rewards by name."""
    rewards = {
        name: {**asdict(reward), "causal": causal.get(name)} for name, reward in zip(names, audit.rewards, strict=True)
    }
    return {**asdict(audit), "rewards": rewards}


def mean_record(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """
    The mean of each number over the records that have it, for the rewards of the last one. Groups are summed, and a
    reward that was once not causal is not.
    """
    mean: dict[str, Any] = {}
    for name, last in records[-1].items():
        values = [record[name] for record in records if record.get(name) is not None]
        if isinstance(last, dict):
            mean[name] = mean_record(values)
        elif name == "groups":
            mean[name] = sum(values)
        elif name == "causal":
            mean[name] = all(values) if values else None
        else:
            mean[name] = sum(values) / len(values) if values else None
    return mean


def read_audit(folder: str | Path) -> dict[str, Any] | None:
    """
    The audit of a whole run: the mean over the log steps in its folder's `audit.jsonl`; `None` where there are none.
    Of a step that was taken again, after a resumption, the last one counts.
    """
    path = Path(folder) / "audit.jsonl"
    if not path.exists():
        return None
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    by_step = {line.pop("step"): line for line in lines}
    return mean_record(list(by_step.values())) if by_step else None


def why_still(records: Sequence[dict[str, Any]]) -> str:
    """The likely causes of a gradient of 0, as half a sentence."""
    if not records:
        return "no conversation was sampled"
    mean = mean_record(records)
    rewards = mean["rewards"]
    if all(reward["applies"] is None for reward in rewards.values()):
        return "every conversation failed; `error` of the conversations has the reason"
    if mean["groups_without_signal"] < 1:
        return (
            "some groups have advantages, so their tokens are not trained: they are masked (`rollouts/failed`, "
            "`mask_truncated_completions`) or clipped, or no weight of the model is trained"
        )
    silent = [repr(name) for name, reward in rewards.items() if not reward["applies"]]
    equal = [repr(name) for name, reward in rewards.items() if reward["applies"] and reward["equal_groups"] == 1]
    causes = ["the advantages of all groups were 0 at every turn"]
    causes += [f"{_rewards(silent)} returned `None` for every conversation"] if silent else []
    causes += [f"{_rewards(equal)} gave all members of each group the same"] if equal else []
    if len(silent) + len(equal) < len(rewards):
        causes.append("what other rewards told apart has no weight, or the credit rule does not use it")
    return "; ".join(causes)


def _rewards(names: list[str]) -> str:
    return f"the reward{'s' * (len(names) > 1)} {', '.join(names)}"
