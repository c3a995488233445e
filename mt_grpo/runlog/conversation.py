"""
One conversation, put together from the files of a run. The folder may be damaged, or of another program, so records
and lines of the index are held against their shapes first. Fields that no shape lists may be anything.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
import orjson
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from typing_extensions import TypedDict

from mt_grpo.errors import UserError
from mt_grpo.images import IN_TEXT, in_words
from mt_grpo.runlog import files
from mt_grpo.token_tree import Node, TokenTree
from mt_grpo.trajectory import Trajectory


class Damage(ValueError):
    """A file does not hold a conversation as a run writes it. The message is a clause."""


def conversation(
    row: dict[str, Any],
    rollout: dict[str, Any],
    credit: dict[str, Any] | None,
    updates: list[dict[str, Any]],
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """
    A conversation as the page shows it, in JSON, with `None` for NaN.

    Args:
        row (`dict`): Its row of the index.
        rollout, credit, updates: Its rows of the files; `credit` is `None` where it is not written.
        tokenizer (`Tokenizer`, *optional*): Decodes its tokens.

    Returns:
        `dict`: The fields of `Trajectory` except `tree`, as `Trajectory.to_dict` names them, and

        - `index` (`dict`): the row of the index;
        - `weights` (`dict`): weight of each reward;
        - `turns[i]["advantage"]` (`float`): where credit is written;
        - `turns[i]["parts"]` (`list[dict]`): what it is the sum of, each with `name`, `value` and `scale`, by which
          the value was divided (`None`: by no single number); empty where that is not written;
        - `nodes` (`list[dict]`): the token tree in depth-first order: `parent` (node, -1: none), `turn` (-1: context),
          `begin` and `end` (tokens `begin:end`), `subtree_end` (the first node after its subtree);
        - `tokens` (`dict` of lists, an entry per token of the tree, depth first): `ids`, `texts` (`None` without a
          tokenizer; a token that ends no character has ""), `turn` (-1: context), `parent` (token that it follows, -1:
          none), `subtree_end` (as of nodes), `logprobs` (the engine's), `trainer` (the trainer's, before the first
          update), `entropies`, `advantages` (of the token's turn); the last four are `None` where there is no such
          number, `trainer` and `entropies` for tokens that are not trained;
        - `updates` (`list[dict]`): per update `step`, `ratios` and `clipped`, lists with an entry per token likewise.
    """
    tree = token_tree(rollout)
    record = read_record(rollout, row)
    _check_lists(row, record, tree, credit, updates)
    nodes, order = _layout(tree)
    ids = [token for index in order for token in tree.nodes[index].tokens]
    turn = [node["turn"] for node in nodes for _ in range(node["begin"], node["end"])]
    advantages = None if credit is None else credit["advantages"]
    parts = (credit or {}).get("parts") or []
    for position, each in enumerate(record["turns"]):
        each["advantage"] = None if advantages is None else advantages[position]
        each["parts"] = [_part(part, position) for part in parts]
    tokens: dict[str, Any] = {
        "ids": ids,
        "texts": None if tokenizer is None else token_texts(ids, nodes, tokenizer),
        "turn": turn,
        "parent": _parents(nodes),
        "subtree_end": _subtree_ends(nodes),
        "logprobs": _engine(tree, order),
        "trainer": [None] * len(ids),
        "entropies": [None] * len(ids),
        "advantages": [None if advantages is None or t < 0 else advantages[t] for t in turn],
    }
    begin = prompt_length(nodes)
    shown = []
    for number, update in enumerate(updates):
        at = [begin + column for column in update["columns"]]
        if not all(0 <= place < len(ids) for place in at):
            raise Damage("an update is of tokens that are not there")
        if not number:
            tokens["entropies"] = _spread(update["entropies"], at, len(ids))
            differences = _spread(update["difference"], at, len(ids))
            tokens["trainer"] = [
                None if engine is None or difference is None else engine + difference
                for engine, difference in zip(tokens["logprobs"], differences, strict=True)
            ]
        shown.append(
            {
                "step": update["updated_step"],
                "ratios": _spread(update["ratios"], at, len(ids)),
                "clipped": _spread(update["clipped"], at, len(ids)),
            }
        )
    return {
        "index": row,
        **record,
        "weights": read_weights(rollout),
        "nodes": nodes,
        "tokens": tokens,
        "updates": shown,
    }


def _part(part: dict[str, Any], turn: int) -> dict[str, Any]:
    scales = part["scales"]
    return {
        "name": part["name"],
        "value": _without_nan([part["values"][turn]])[0],
        "scale": None if scales is None or scales[turn] is None else _without_nan([scales[turn]])[0],
    }


def read_record(rollout: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """
    The `record` of a row of a file of conversations.

    Args:
        rollout (`dict`): The row, with `record`.
        row (`dict`): The index's.

    Raises:
        Damage: If it is no record, or of another conversation than the row of the index.
    """
    record = _json("record", rollout["record"])
    turns = record["turns"]
    if [turn["index"] for turn in turns] != list(range(len(turns))) or len(turns) != len(row["turn_rewards"]):
        raise Damage("its turns are others than the index has")
    return record


def read_weights(rollout: dict[str, Any]) -> dict[str, float]:
    """The weight of each reward, of a row of a file of conversations. Raises `Damage` if it has none."""
    weights: dict[str, float] = _json("weights", rollout["weights"])
    return weights


def _json(name: str, text: Any) -> Any:
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise Damage(f"`{name}` is no JSON: {error}") from None
    if (wrong := misfit(name, value)) is not None:
        raise Damage(f"`{name}` is not what a run writes: {wrong}")
    return value


def _check_lists(
    row: dict[str, Any],
    record: dict[str, Any],
    tree: TokenTree,
    credit: dict[str, Any] | None,
    updates: list[dict[str, Any]],
) -> None:
    turns = max([len(record["turns"]), *(node.turn + 1 for node in tree.nodes)])
    if row["advantages"] is not None and len(row["advantages"]) < turns:
        raise Damage("there are fewer advantages than turns")
    if credit is not None:
        check_credit(credit, turns)
    for update in updates:
        lists = [update[name] for name in ("columns", "difference", "entropies", "ratios", "clipped")]
        if any(values is None or None in values or len(values) != len(lists[0]) for values in lists):
            raise Damage("the numbers of an update are not one per token")


def check_credit(credit: dict[str, Any], turns: int) -> None:
    """Raises `Damage` if a row of a file of credit has fewer numbers than a conversation has turns."""
    if credit["advantages"] is None or len(credit["advantages"]) < turns:
        raise Damage("there are fewer advantages than turns")
    for part in credit.get("parts") or []:
        if part is None or part["name"] is None or part["values"] is None or None in part["values"]:
            raise Damage("the parts of its advantages have gaps")
        scales = part["values"] if part["scales"] is None else part["scales"]
        if min(len(part["values"]), len(scales)) < turns:
            raise Damage("there are fewer parts of advantages than turns")


def plain_trajectory(rollout: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """
    `Trajectory.to_dict()` from a row of a file of conversations and the row of the index, whose session it has.
    Raises `Damage`.
    """
    record = read_record(rollout, row)
    record["session"], record["branch_of"] = row["session"], branch_of(record, row)
    whole = {**record, "tree": token_tree(rollout).to_dict()}
    names = [name for name in Trajectory.__dataclass_fields__ if name in whole]
    return {**{name: whole[name] for name in names}, "messages": messages_of(record)}


def branch_of(record: dict[str, Any], row: dict[str, Any]) -> str | None:
    """The session, as the index has it, of the conversation with which one shares its first turns."""
    parent = record.get("branch_of")
    # of the same batch: its number in it is the last part of both names
    return parent and f"{row['session'].rpartition('-')[0]}-{parent.rpartition('-')[2]}"


def messages_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The whole conversation of a `record`."""
    return [*record["prompt"], *(part for turn in record["turns"] for part in (turn["message"], *turn["replies"]))]


def words(message: dict[str, Any]) -> str:
    """The text of a message, of its text parts if its content is in parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(in_words(part) for part in content)


def token_tree(rollout: dict[str, Any]) -> TokenTree:
    """The token tree of a row of a file of conversations. Raises `Damage` if it has no sound one."""
    lists = [rollout[name] for name in ("node_parent", "node_turn", "node_size", "tokens", "logprobs")]
    turns, tip = rollout["num_turns"], rollout["tip"]
    if any(values is None or None in values for values in lists) or turns is None or tip is None:
        raise Damage("its token tree has gaps")
    parents, of_turns, sizes, tokens, logprobs = lists
    sampled = sum(size for size, turn in zip(sizes, of_turns, strict=False) if turn >= 0)
    if not len(parents) == len(of_turns) == len(sizes) or (sum(sizes), sampled) != (len(tokens), len(logprobs)):
        raise Damage("its token tree has other sizes than its tokens")
    if (
        any(not -1 <= parent < len(parents) for parent in parents)
        or any(not -1 <= turn < turns for turn in of_turns)
        or not -1 <= tip < len(parents)
        or min(sizes, default=0) < 0
    ):
        raise Damage("its token tree is none")
    nodes, at, sampled = [], 0, 0
    for parent, turn, size in zip(parents, of_turns, sizes, strict=True):
        values = [] if turn < 0 else logprobs[sampled : sampled + size]
        nodes.append(vars(Node(parent, tokens[at : at + size], turn, values)))
        if turn >= 0 and min(nodes[-1]["tokens"], default=0) < 0:  # an image's, which no turn samples
            raise Damage("its token tree is none")
        at, sampled = at + size, sampled + len(values)
    tree = TokenTree.from_dict({"num_turns": turns, "tip": tip, "nodes": nodes})
    if len(tree.depth_first()) < len(nodes):
        raise Damage("its token tree is a circle")
    return tree


def prompt_length(nodes: list[dict[str, Any]]) -> int:
    """Tokens before the first turn's, of nodes in depth-first order; as `mt_grpo.rollout.token_row` has it."""
    first = next((index for index, node in enumerate(nodes) if node["turn"] == 0), None)
    return 0 if first is None else nodes[first]["begin"]


def _layout(tree: TokenTree) -> tuple[list[dict[str, Any]], list[int]]:
    order = tree.depth_first()
    place = {-1: -1} | {index: number for number, index in enumerate(order)}
    nodes, begin = [], 0
    for index in order:
        node = tree.nodes[index]
        end = begin + len(node.tokens)
        nodes.append({"parent": place[node.parent], "turn": node.turn, "begin": begin, "end": end})
        begin = end
    for number in range(len(nodes) - 1, -1, -1):
        entry = nodes[number]
        entry.setdefault("subtree_end", number + 1)
        if entry["parent"] >= 0:
            parent = nodes[entry["parent"]]
            parent["subtree_end"] = max(parent.get("subtree_end", 0), entry["subtree_end"])
    return nodes, order


def _parents(nodes: list[dict[str, Any]]) -> list[int]:
    parents = []
    for node in nodes:
        before = nodes[node["parent"]]["end"] - 1 if node["parent"] >= 0 else -1
        parents += [before, *range(node["begin"], node["end"] - 1)]
    return parents


def _subtree_ends(nodes: list[dict[str, Any]]) -> list[int]:
    ends = [node["end"] for node in nodes]
    return [ends[node["subtree_end"] - 1] for node in nodes for _ in range(node["begin"], node["end"])]


def _engine(tree: TokenTree, order: list[int]) -> list[float | None]:
    values: list[float] = []
    for index in order:
        node = tree.nodes[index]
        values += node.logprobs if node.turn >= 0 else [float("nan")] * len(node.tokens)
    return _without_nan(values)


def _spread(values: list[float], at: list[int], size: int) -> list[float | None]:
    spread: list[float | None] = [None] * size
    for place, value in zip(at, _without_nan(values), strict=True):
        spread[place] = value
    return spread


def _without_nan(values: list[float]) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]


def token_texts(ids: list[int], nodes: list[dict[str, Any]], tokenizer: Tokenizer) -> list[str]:
    """
    The text of each token, of special tokens too. Joined along a path they are the path's text. A character of several
    tokens stands with the last of them, and the mark of an image with the first.

    Args:
        ids (`list[int]`): Tokens of the tree, depth first.
        nodes (`list[dict]`): Its nodes, as `conversation` returns them.
        tokenizer (`Tokenizer`): Decodes them.
    """
    texts: list[str] = []
    for number, node in enumerate(nodes):
        if number == 0 or node["parent"] != number - 1:  # another branch begins
            stream = DecodeStream(skip_special_tokens=False)
        for place in range(node["begin"], node["end"]):
            token = ids[place]
            if token >= 0:
                texts.append(stream.step(tokenizer, token) or "")
            else:
                texts.append("" if place and ids[place - 1] == token else IN_TEXT)
    return texts


STRICT = ConfigDict(strict=True)

Whole = Annotated[int, Field(ge=0, lt=2**31)]
Number = Annotated[float, Field(gt=-1e15, lt=1e15)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=255)]


@with_config(STRICT)
class _Rollout(TypedDict):
    session: str
    mode: Literal["train", "eval", "discarded"]
    step: Whole
    k: Whole
    rank: Whole
    group: Whole
    member: Whole
    prompt: str
    stop: str | None
    error: str | None
    answer: str | None
    right: bool | None
    turns: Whole
    tokens: list[Whole]
    context: Whole
    unique: Whole
    forks: Whole
    reward: Number | None
    rewards: dict[str, Number | None]
    turn_rewards: list[Number | None]
    calls: Whole
    errors: list[Whole]
    start: Number | None
    seconds: Number
    turn_seconds: list[Number]
    tool_seconds: list[Number]
    file: FileName
    row: Whole
    sampled: NotRequired[Annotated[int, Field(ge=0, lt=2**32)] | None]
    raised: NotRequired[Whole]
    first_raised: NotRequired[str | None]
    where: NotRequired[str | None]
    branch_of: NotRequired[str | None]
    shared_turns: NotRequired[Whole]


@with_config(STRICT)
class _Credit(TypedDict):
    session: str
    advantages: list[Number | None]
    file: FileName
    row: Whole


@with_config(STRICT)
class _Update(TypedDict):
    session: str
    step: Whole
    mismatch: Number | None
    entropy: Number | None
    clipped: Number | None
    file: FileName
    row: Whole


@with_config(STRICT)
class _Step(TypedDict):
    step: Whole
    start: Number
    seconds: Number
    sampling: Number
    rewards: Number
    sync: Number
    training: Number


@with_config(STRICT)
class _File(TypedDict):
    file: str
    size: Annotated[int, Field(ge=0)]
    crc32: Annotated[int, Field(ge=0, lt=2**32)]


@with_config(STRICT)
class _Reward(TypedDict):
    name: str
    kind: Literal["turn", "outcome"]
    weight: Number
    maximum: NotRequired[Number | None]


@with_config(STRICT)
class _Rule(TypedDict):
    name: str


@with_config(STRICT)
class _Run(TypedDict):
    group_size: NotRequired[Whole | None]
    group_size_eval: NotRequired[Whole | None]
    processes: NotRequired[Annotated[int, Field(gt=0, lt=2**31)]]
    rewards: NotRequired[list[_Reward]]
    estimator: NotRequired[str | dict[str, Any] | None]
    rule: NotRequired[_Rule | None]
    rule_says: NotRequired[str | None]
    model: NotRequired[str | None]
    tools: NotRequired[list[str] | None]
    chat_template_kwargs: NotRequired[dict[str, Any] | None]
    command: NotRequired[str | None]
    versions: NotRequired[dict[str, str | None] | None]
    options: NotRequired[dict[str, Any] | None]


@with_config(STRICT)
class _Metrics(TypedDict):
    step: Whole
    grad_norm: NotRequired[float | None]
    train_runtime: NotRequired[Number | None]


@with_config(STRICT)
class _UnderWay(TypedDict):
    session: str
    prompt: str
    turns: Whole
    tokens: Whole
    start: Number | None
    waits_for: Literal["tools", "sampling"]


@with_config(STRICT)
class _State(TypedDict):
    state: Literal["running", "finished", "stopped", "failed"]
    reason: str | None
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    host: str
    process_started: Number
    started: Number
    beat: Number
    step: Whole
    of: Whole
    waits_for: str
    under_way: list[_UnderWay]


@with_config(STRICT)
class _Note(TypedDict):
    star: bool
    note: str


@with_config(STRICT)
class _Message(TypedDict):
    role: str
    content: NotRequired[str | list[Any] | None]
    tool_call_id: NotRequired[str | None]


@with_config(STRICT)
class _Call(TypedDict):
    id: str | None
    name: str
    arguments: dict[str, Any]
    error: str | None
    seconds: Number
    start: Number | None


@with_config(STRICT)
class _Turn(TypedDict):
    index: Whole
    message: _Message
    tool_calls: list[_Call]
    replies: list[_Message]
    error: str | None
    num_tokens: Whole
    context_length: Whole
    observation_length: Whole
    seconds: Number
    start: Number | None
    follows: NotRequired[Annotated[int, Field(ge=-1)] | None]
    given: NotRequired[list[_Message]]
    tools: NotRequired[list[dict[str, Any]] | None]


@with_config(STRICT)
class _Record(TypedDict):
    prompt: list[_Message]
    turns: list[_Turn]
    error: str | None
    row: dict[str, Any]
    rewards: dict[str, dict[str, Any]]
    seconds: Number
    start: Number | None
    tools: NotRequired[list[dict[str, Any]] | None]
    branch_of: NotRequired[str | None]


LINES = {
    "rollout": _Rollout,
    "credit": _Credit,
    "update": _Update,
    "step": _Step,
    "file": _File,
    "run": _Run,
    "metrics": _Metrics,
    "state": _State,
    "notes": dict[str, _Note],
    "record": _Record,
    "weights": dict[str, Number],
}


def read_shaped(folder: Path, file: str, kind: str, mend: str) -> Any:
    """
    What a JSON file of a run holds; `None` where there is none.

    Args:
        folder (`Path`), file (`str`): The run, and the file in it.
        kind (`str`): Its shape, a key of `LINES`.
        mend (`str`): What to do where it is damaged.

    Raises:
        UserError: If it is damaged.
    """
    data = files.read(folder, file)
    if data is None:
        return None
    try:
        value = orjson.loads(data)
        wrong = misfit(kind, value)
    except orjson.JSONDecodeError as error:
        wrong = str(error)
    if wrong is not None:
        raise UserError(f"{folder / file} is damaged ({wrong}): {mend}.")
    return value


def misfit(kind: str, value: Any) -> str | None:
    """
    Why a value does not have a shape, as a clause; `None` if it has.

    Args:
        kind (`str`): The shape, a key of `LINES`.
        value: What was read.
    """
    try:
        _validator(kind)(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        return f"`{place[:80]}`: {first['msg'][:1].lower()}{first['msg'][1:]}" if place else first["msg"]
    return None


@functools.cache
def _validator(kind: str) -> Any:
    return TypeAdapter(LINES[kind]).validator.validate_python
