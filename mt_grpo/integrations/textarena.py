"""Games of TextArena (0.7) as environments; `pip install mt-grpo[textarena]`."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mt_grpo.envs.source import environment
from mt_grpo.errors import ConfigError, describe_error
from mt_grpo.imports import did_you_mean, need_library
from mt_grpo.integrations.gym import GymEnv, imported
from mt_grpo.options.table import Values

Opponent = Callable[[str], str]
"""The other player: a function from an observation to a move, as TextArena's agents are."""

_lock = threading.Lock()
"""Games use Python's global random generator, so only one may run at a time, with its own state in it."""


def textarena_game(
    game: str, opponent: Opponent | None = None, max_turns: int | None = None, **options: object
) -> GymEnv:
    """
    A game of TextArena by its id. The row's `seed` decides how the game begins, see `GymEnv`.

    Args:
        game (`str`): The id, such as `"GuessTheNumber-v0"`.
        opponent (`Callable`, *optional*): Plays the second side of a game for two; the model begins.
        max_turns (`int`, *optional*): Largest number of turns in a conversation.
        **options: Arguments of the game, in place of those that TextArena registers with the id.

    Raises:
        ConfigError: If TextArena is not installed, or has no such game.
    """
    need_library("textarena", "`textarena_game`", "mt-grpo[textarena]")
    import textarena

    known = textarena.envs.registration.ENV_REGISTRY
    # without wrappers, observations are messages and not the whole history
    name = game if game.endswith("-raw") else f"{game}-raw"
    if name not in known:
        games = [key.removesuffix("-raw") for key in known if key.endswith("-raw")]
        raise ConfigError(f"TextArena has no game {game!r}{did_you_mean(game, games)}.")
    return GymEnv(lambda: _Game(name, opponent, options), max_turns=max_turns)


@environment("textarena")
def _game_of_options(options: Values) -> GymEnv:
    """`textarena_game` with the keys of `env: {type: textarena}`."""
    given = imported(options["env"])
    return textarena_game(**given.pop("options", {}), **given)


class _Game:
    """A game of TextArena in Gym's form; the model is player 0."""

    def __init__(self, name: str, opponent: Opponent | None, options: Mapping[str, object]) -> None:
        import textarena

        self._opponent = opponent
        self._drawing: Any = None
        with self._draws():
            self._env = textarena.make(name, **options)

    def reset(self, seed: int) -> str:
        with self._draws():
            self._env.reset(num_players=1 if self._opponent is None else 2, seed=seed)
        return self._seen(0)

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Plays a move and the opponent's moves that follow."""
        done = self._move(action)
        while not done and self._env.state.current_player_id != 0:
            assert self._opponent is not None  # else there is one player
            try:
                move = self._opponent(self._seen(self._env.state.current_player_id))
            except Exception as error:  # the user's function; the model's move is not to blame
                raise RuntimeError(f"`opponent` raised {describe_error(error)}") from error
            done = self._move(move)
        seen = self._seen(0)
        if not done:
            return seen, 0.0, False, {}
        with self._draws():
            rewards, info = self._env.close()
        return seen, float((rewards or {}).get(0, 0.0)), True, {"game": info.get(0, {})}

    def _move(self, action: str) -> bool:
        with self._draws():
            done, _ = self._env.step(action)
        return done

    def _seen(self, player: int) -> str:
        """The messages for a player since the last call, without its own."""
        told, self._env.state.observations[player] = self._env.state.observations[player], []
        return "\n".join(message for sender, message, _ in told if sender != player)

    @contextlib.contextmanager
    def _draws(self) -> Iterator[None]:
        with _lock:
            others = random.getstate()
            if self._drawing is not None:
                random.setstate(self._drawing)
            try:
                yield
            finally:
                self._drawing = random.getstate()
                random.setstate(others)
