"""What environments hand over, held against what the rest of a run relies on."""

from __future__ import annotations

from typing import Any

from mt_grpo.envs.env import Env, Outcome, StepEnv, finite
from mt_grpo.errors import defined_at
from mt_grpo.tools.results import check_data
from mt_grpo.trajectory import StopReason


def checked_outcome(outcome: Any, env: Env) -> Outcome:
    """
    The outcome of a conversation, its rewards as floats.

    Args:
        outcome: What `run` returned.
        env (`Env`): The environment, for errors.

    Raises:
        TypeError, ValueError: If it is no `Outcome`, or a field of it is not of its type. The message says which.
    """
    method = env.step if isinstance(env, StepEnv) and type(env).run is StepEnv.run else env.run
    name = f"{type(env).__name__}.{method.__name__}{defined_at(method)}"
    if not isinstance(outcome, Outcome):
        raise TypeError(
            f"{type(env).__name__}.run{defined_at(env.run)} returned {type(outcome).__name__}: return an `Outcome`."
        )
    if not isinstance(outcome.stop_reason, (StopReason, type(None))):
        raise _wrong(name, "stop_reason", outcome.stop_reason, "a `StopReason` or `None`")
    if not isinstance(outcome.answer, (str, type(None))):
        raise _wrong(name, "answer", outcome.answer, "text or `None`")
    for field in ("rewards", "info"):
        if not isinstance(getattr(outcome, field), dict):
            raise _wrong(name, field, getattr(outcome, field), "a dictionary")
    for key, value in outcome.rewards.items():
        if not isinstance(key, str):
            raise _wrong(name, "rewards", key, "text as the name of a reward")
        outcome.rewards[key] = finite(value, f"{name}: the reward {key!r}")
    check_data(outcome.info, f"{name}: `info` of the outcome")
    return outcome


def _wrong(name: str, field: str, value: Any, right: str) -> TypeError:
    return TypeError(f"{name}: `{field}` of the outcome is {type(value).__name__}: give {right}.")
