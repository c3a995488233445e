"""Classes in the form of TRL's `environment_factory`, and a model by script that plays in them."""

from __future__ import annotations

import json
from collections.abc import Callable

from mt_grpo.tools import tool


def called(name: str, **arguments: object) -> str:
    """A call as the tiny model's chat template writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Ledger:
    """A sum that begins at what the row says; it earns the sum."""

    made = 0

    def __init__(self):
        Ledger.made += 1
        self.begun = 0

    def reset(self, start: int = 0, **row):
        self.begun += 1
        self.total = start
        return f" It begins at {start}."

    def add(self, amount: int) -> int:
        """
        Adds to the sum.

        Args:
            amount: How much.

        Returns:
            The sum.
        """
        self.total += amount
        return self.total

    async def double(self) -> dict:
        """
        Doubles the sum.

        Returns:
            The sum, under its name.
        """
        self.total *= 2
        return {"total": self.total}

    def fail(self, reason: str) -> str:
        """
        Fails.

        Args:
            reason: Why.
        """
        raise ValueError(reason)

    def get_reward(self) -> float:
        return float(self.total)

    def _hidden(self):
        raise AssertionError

    @property
    def evaluated(self):
        raise AssertionError


class Doors:
    """Opens doors, with `async` methods; the reward is the share of doors that are open."""

    def reset(self, **row):
        self.open: set[str] = set()
        return " Open the doors."

    async def unlock(self, door: str) -> str:
        """
        Unlocks a door.

        Args:
            door: Its name.
        """
        self.open.add(door)
        return f"{door} is open"

    async def get_reward(self) -> float:
        return len(self.open) / 2


class Waking(Doors):
    """Takes its time to begin, and then shows text in parts; TRL shows nothing of it."""

    async def reset(self, **row):
        return [{"type": "text", "text": super().reset()}, {"type": "text", "text": " Now."}]


class Stopped(Ledger):
    """Ends with a tool, and is closed in the end."""

    closed: list[int] = []

    @tool(ends_episode=True)
    def finish(self) -> str:
        """Ends the game."""
        return "over"

    def close(self):
        Stopped.closed.append(self.begun)


LEDGER = [
    [called("add", amount=2), called("add", amount=3) + "\n" + called("double"), "Done."],
    [called("fail", reason="too late"), called("add", amount=1), "Done."],
    [called("add", sum=1), called("multiply", by=2), "Done."],
    ["Nothing to do."],
]
"""What the four members of a group do."""

DOORS = [
    [called("unlock", door="red"), "Done."],
    [called("unlock", door="red") + "\n" + called("unlock", door="blue"), "Done."],
    ["I give up."],
    [called("unlock", door="blue"), called("unlock", door="blue"), "Done."],
]


def by_script(turns: list[list[str]]) -> Callable[[str, int], str]:
    """What a `ScriptedEngine` says: each conversation its own turns."""
    return lambda session, turn: turns[int(session.rsplit("-", 1)[-1]) % len(turns)][turn] + "<|im_end|>"
