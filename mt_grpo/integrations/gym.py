"""Classes in Gym's form as environments: `reset`, and `step(action)` with an observation, a reward and an end."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, SupportsFloat

from mt_grpo.concurrency import call
from mt_grpo.envs import Outcome, Policy, Step, StepEnv
from mt_grpo.envs.env import outcome_at_end
from mt_grpo.envs.source import environment, takes
from mt_grpo.errors import describe_error, find_fault, refuse_first
from mt_grpo.imports import import_object
from mt_grpo.media import has_media, media_to_digests, read_parts, returned_parts
from mt_grpo.options.table import Values
from mt_grpo.options.values import TYPES
from mt_grpo.tools.function import render
from mt_grpo.trajectory import Message, Row, StopReason, Turn

logger = logging.getLogger(__name__)

_INVALID = (ValueError, TypeError, LookupError, AssertionError)
"""Exceptions of `step` that mean an invalid action; any other one ends the conversation."""
_REFUSED = 16
"""Actions in a row, from the first on, after which a run says that all were refused: the game may be broken."""


class _Refusals:
    """Actions that the games of an environment refused before they took any; of all its conversations."""

    def __init__(self) -> None:
        self.number: int | None = 0

    def __deepcopy__(self, memo: object) -> _Refusals:
        return self

    def note(self, error: Exception, what: str) -> None:
        if self.number is None:
            return
        self.number += 1
        if self.number == _REFUSED:
            where = find_fault(error).where
            logger.warning(
                "The first %d actions were all refused, the last with %s%s. If they were right, mend `%s`; else tell "
                "the model in the prompt what an action is, or read it with `parse` or `tag`.",
                _REFUSED,
                describe_error(error),
                f" ({where})" if where else "",
                what,
            )


class GymEnv(StepEnv):
    """
    One game in Gym's form per conversation. `reset(seed=...)` returns an observation, or an observation and a
    dictionary; `step(action)` returns `(observation, reward, done)`, `(observation, reward, done, info)` or
    `(observation, reward, terminated, truncated, info)`. Its methods may be `async`; plain ones run in a thread.

    The observation follows the prompt of the row. The reward of a step is the turn's (`step_reward`); their sum is the
    conversation's reward `return` (`env_reward`). A game's `close` is called at the end, if there is one.

    Args:
        make (`Callable`): A class or a function that makes a game, called without arguments, or with the row if it
            requires an argument.
        parse (`Callable`, *optional*): Turns text into an action, such as `int`; by default the text is the action. If
            it or `step` raises `ValueError`, `TypeError`, `LookupError` or `AssertionError`, the model reads the error
            and may try again.
        tag (`str`, *optional*): The action is the text between `<tag>` and `</tag>`; by default the whole turn.
        max_turns (`int`, *optional*): Largest number of turns in a conversation.
        step_timeout (`float`, *optional*, defaults to `60.0`): Seconds that `make`, `reset` and `step` may take.

    Raises:
        ConfigError: If `make` cannot be called, or is a class without `reset` and `step`.
    """

    step_timeout = None  # `call_timeout` is the limit of each call of the game instead
    user_environment: Any = None  # the game of this conversation; reward functions get it in their `environments`

    def __init__(
        self,
        make: Callable[..., object],
        parse: Callable[[str], object] = str,
        tag: str | None = None,
        max_turns: int | None = None,
        step_timeout: float | None = 60.0,
    ) -> None:
        refuse_first(
            (not callable(make), f"`GymEnv` was given {make!r}, which cannot be called: give a class or a function."),
            (
                max_turns is not None and max_turns < 1,
                f"`max_turns` is {max_turns}: give 1 or more, or `None` for no limit.",
            ),
        )
        if isinstance(make, type):
            _check_game(make)
        self.make, self.parse, self.tag, self.max_turns, self.call_timeout = make, parse, tag, max_turns, step_timeout
        self.reset_timeout = step_timeout
        self.stop = () if tag is None else (f"</{tag}>",)
        self.total = 0.0
        self._refusals = _Refusals()

    async def run(self, policy: Policy, row: Row) -> Outcome:
        """The loop of `StepEnv`. The reward is the sum of the steps' rewards, also if a limit ended the game."""
        outcome = await outcome_at_end(super().run(policy, row))
        outcome.rewards = {"return": self.total}
        return outcome

    async def reset(self, row: Row) -> list[Message]:
        """The prompt of the row, followed by the game's first observation."""
        args = () if takes(self.make, ()) else (row,)
        game = await call(self.make, *args, what="make", timeout=self.call_timeout, late=self._close_game)
        self.user_environment = game
        _check_game(type(game))
        parameters = inspect.signature(game.reset).parameters
        any_name = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
        keywords = {"seed": _seed_of(row)} if any_name or "seed" in parameters else {}
        seen = await call(partial(game.reset, **keywords), what=self._what("reset"), timeout=self.reset_timeout)
        if isinstance(seen, tuple) and len(seen) == 2 and isinstance(seen[1], dict):
            seen = seen[0]
        prompt = row.get("prompt") or ""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        *before, last = messages
        said, shown = last["content"], _show(seen)
        if isinstance(said, str) and isinstance(shown, str):
            return [*before, {**last, "content": "\n\n".join(filter(None, [said, shown]))}]
        shown = f"\n\n{shown}" if shown and isinstance(shown, str) else shown
        return [*before, {**last, "content": [*_parts(said), *_parts(shown)]}]  # with images or sounds

    async def step(self, turn: Turn) -> Step:
        """Plays the action of a turn. The model reads the error of an invalid action."""
        over = self.max_turns is not None and turn.index + 1 >= self.max_turns
        try:
            action = self.parse(self._action(turn.text))
            played = await call(self.user_environment.step, action, what=self._what("step"), timeout=self.call_timeout)
        except _INVALID as error:
            self._refusals.note(error, self._what("step"))
            return Step(f"Error: {describe_error(error)}", done=StopReason.MAX_STEPS if over else False)
        self._refusals.number = None
        seen, reward, terminated, truncated, info = _read(played, self._what("step"))
        self.total += reward
        reason = StopReason.ENV_DONE if terminated else StopReason.MAX_STEPS
        done = reason if terminated or truncated or over else False
        shown: Any = _show(seen) or ([] if done else "(nothing to see)")
        shown = [{"role": "user", "content": shown}] if shown and isinstance(shown, list) else shown
        return Step(shown, reward, done, info=info if done else {})

    async def close(self) -> None:
        game, self.user_environment = self.user_environment, None
        await self._close_game(game)

    async def _close_game(self, game: Any) -> None:
        if inspect.isroutine(getattr(type(game), "close", None)):
            await call(game.close, what=f"{type(game).__name__}.close", timeout=self.call_timeout)

    def _what(self, method: str) -> str:
        return f"{type(self.user_environment).__name__}.{method}"

    def _action(self, text: str) -> str:
        if self.tag is None:
            return text.strip()
        _, opened, rest = text.rpartition(f"<{self.tag}>")
        action, closed, _ = rest.partition(f"</{self.tag}>")
        if not (opened and closed):
            raise ValueError(f"write your action between <{self.tag}> and </{self.tag}>.")
        return action.strip()


@environment("gym")
def _gym_of_options(options: Values) -> GymEnv:
    """`GymEnv` with the keys of `env: {type: gym}`."""
    return GymEnv(**imported(options["env"]))


def imported(env: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `env: {type: ...}`, the objects in the place of their paths."""
    given, simple = dict(env), {"int": int, "float": float, "str": str}
    for name in TYPES[given.pop("type")].paths:
        if isinstance(path := given.get(name), str):
            given[name] = simple.get(path) or import_object(path, what=f"`{name}`")
    return given


def _show(observation: object) -> str | list[Any]:
    """An observation as text: empty for `None`; what is no text as JSON; parts of a message where it shows media."""
    if has_media(observation):
        return read_parts(returned_parts(observation))
    return "" if observation is None else render(observation)


def _parts(content: str | list[Any]) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}] * bool(content)


def _seed_of(row: Row) -> int:
    """The row's `seed`, or else a hash of its columns, so that all conversations of a group get the same game."""
    if row.get("seed") is not None:
        return int(row["seed"])
    text = json.dumps(media_to_digests(row), sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


def _read(played: object, what: str) -> tuple[object, float, bool, bool, dict[str, Any]]:
    """The result of `step` as observation, reward, terminated, truncated and info."""
    fault = (
        f"{type(played).__name__}: return (observation, reward, done), with info behind it or not, or "
        "(observation, reward, terminated, truncated, info)"
    )
    if isinstance(played, tuple) and len(played) in (3, 4, 5):
        seen, reward, terminated, *rest = played
        truncated = rest.pop(0) if len(played) == 5 else False
        reward, info = 0.0 if reward is None else reward, (rest[0] if rest else None) or {}
        if not isinstance(reward, SupportsFloat) or not math.isfinite(reward):  # text of a number is none
            fault = f"the reward {reward!r:.80}: return a finite number"
        elif not isinstance(info, Mapping):
            fault = f"the info {info!r:.80}: return a dictionary"
        else:
            return seen, float(reward), bool(terminated), bool(truncated), dict(info)
    raise RuntimeError(f"{what} returned {fault}.")


def _check_game(game: type) -> None:
    refuse_first(
        *(
            (
                not inspect.isroutine(getattr(game, method, None)),
                f"`GymEnv` was given {game.__name__}, which has no `{method}`: a game has `reset` and `step(action)`.",
            )
            for method in ("reset", "step")
        )
    )
