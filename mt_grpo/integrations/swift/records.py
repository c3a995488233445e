"""What a scheduler returns about its responses, held against what was sampled; it becomes a mask of each turn."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

from mt_grpo.token_tree import common_prefix
from mt_grpo.trajectory import Message, Turn


class Sampled:
    """
    A turn of a scheduler with what was sampled in it.

    Args:
        turn (`Turn`): The turn.
        ids (`list[int]`): Its token ids.
        goes_on (`bool`): Whether it goes on with the assistant's message of the turn before.
    """

    def __init__(self, turn: Turn, ids: list[int], goes_on: bool) -> None:
        self.turn, self.ids, self.goes_on = turn, ids, goes_on
        self.claimed = False


_THINKING = re.compile(r"^.*?</think>\s*", re.DOTALL)


def strip_thinking(message: Message) -> Message:
    """An assistant's message without its thoughts; any other as it is."""
    if message["role"] != "assistant":
        return message
    return {**message, "content": _THINKING.sub("", message["content"])}


def read_messages(messages: Sequence[Any]) -> list[Message]:
    """Messages of a record, copied; ms-swift's files put the assistant's words there for earlier messages of its."""
    return [
        {"role": "assistant", "content": message} if isinstance(message, str) else copy.deepcopy(message)
        for message in messages
    ]


class ResponseError(ValueError):
    """Token ids, masks or log-probabilities that a scheduler returned do not fit together, or what was sampled."""


def claim(
    where: str,
    sampled: Sequence[Sampled],
    ids: list[int] | None,
    mask: list[int] | None = None,
    logprobs: list[float] | None = None,
) -> None:
    """
    Finds turns in the ids of a response, and writes into each which of its tokens are trained.

    Tokens of `ids` that were sampled are trained as `mask` says, all where there is none. Tokens that were sampled and
    are not in `ids` are not trained. Tokens in `ids` that were not sampled are context, which a mask may not train.

    Args:
        where (`str`): Which response, for errors.
        sampled (`Sequence[Sampled]`): The turns that it may be made of.
        ids (`list[int]`, *optional*): Its token ids; without them only `logprobs` can be checked.
        mask (`list[int]`, *optional*): 1 where a token is trained.
        logprobs (`list[float]`, *optional*): One for each trained token. What is trained with is always what a token
            was sampled with.

    Raises:
        ResponseError: If lengths differ, or a token is to be trained that was not sampled.
    """
    if mask is not None:
        if ids is None:
            raise ResponseError(f"{where}: `response_loss_mask` came without `response_token_ids`: return both.")
        _check_length(where, "response_loss_mask", len(mask), "`response_token_ids` has", len(ids))
        for position, value in enumerate(mask):
            if value not in (0, 1):
                raise ResponseError(f"{where}: `response_loss_mask` has {value!r} at {position}: set 0 or 1.")
    if logprobs is not None:
        if mask is not None:
            trained, of = sum(mask), "the 1s of `response_loss_mask` are"
        elif ids is not None:
            trained, of = len(ids), "`response_token_ids` has"
        else:
            trained, of = sum(len(one.ids) for one in sampled), "the sampled tokens are"
        _check_length(where, "rollout_logprobs", len(logprobs), of, trained)
    if ids is not None:
        _claim(where, sampled, list(ids), mask)


def _check_length(where: str, name: str, length: int, of: str, expected: int) -> None:
    if length != expected:
        raise ResponseError(f"{where}: `{name}` has {length} entries and {of} {expected}: make them equal.")


def _claim(where: str, sampled: Sequence[Sampled], ids: list[int], mask: list[int] | None) -> None:
    position = 0
    while position < len(ids):
        found, size = _find(sampled, ids, position)
        if found is None:
            if mask is not None and mask[position]:
                raise ResponseError(
                    f"{where}: `response_loss_mask` trains token {position} of the {len(ids)} in "
                    "`response_token_ids`, which was not sampled there: set 0 for what was not sampled."
                )
            position += 1
            continue
        kept = [1] * size if mask is None else [int(value) for value in mask[position : position + size]]
        found.turn.mask = kept + [0] * (len(found.ids) - size)
        found.claimed = True
        position += size


def _find(sampled: Sequence[Sampled], ids: list[int], position: int) -> tuple[Sampled | None, int]:
    """The turn whose ids stand at a position, and how many; at the very beginning also one that was cut off."""
    best, longest = None, 0
    for one in sampled:
        if one.claimed or not one.ids or one.ids[0] != ids[position]:
            continue
        size = common_prefix(one.ids, ids, position)
        if size == len(one.ids):
            return one, size
        if position == 0 and size > longest:
            best, longest = one, size
    return best, longest


def check_infos(where: str, infos: Any) -> dict[str, Any]:
    """`rollout_infos` as they were returned; raises `ResponseError` where they are no mapping."""
    if not isinstance(infos, dict):
        raise ResponseError(f"{where}: `rollout_infos` is {type(infos).__name__}: return a dictionary.")
    return infos


def only_last_rounds(sampled: Sequence[Sampled], last: set[int]) -> None:
    """
    Trains, of all turns, those of the last round only: the turn a record ends with, and what it goes on with.

    Args:
        sampled (`Sequence[Sampled]`): All turns in order.
        last (`set[int]`): Indices of the turns that records end with.
    """
    stays = False
    for one in reversed(sampled):
        stays = stays or one.turn.index in last
        if not stays:
            one.turn.mask = [0] * len(one.ids)
        stays = stays and one.goes_on


def plain(value: Any, depth: int = 8) -> Any:
    """A copy that has a JSON form: what has none as text, what lies deeper than `depth` left out."""
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item, depth - 1) for key, item in value.items()} if depth else "..."
    if isinstance(value, list | tuple | set):
        return [plain(item, depth - 1) for item in value] if depth else "..."
    return str(value)
