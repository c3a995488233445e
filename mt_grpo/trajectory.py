"""The one thing every room passes on: messages, turns and the token tree. Imports nothing but the standard library."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

Message = dict[str, Any]


class StopReason(str, Enum):
    """Why a conversation ended."""

    ANSWERED = "answered"
    """The model gave its final answer."""
    MAX_STEPS = "max_steps"
    """The model wanted one more step than the environment allows."""
    LENGTH = "length"
    """A turn reached its own token budget before it was finished."""
    TOKEN_BUDGET = "token_budget"
    """The trajectory's token budget (`max_completion_length`) is used up."""
    CONTEXT_FULL = "context_full"
    """The next context leaves no room in the model's context window."""
    TIMEOUT = "timeout"
    """The conversation took longer than `rollout_timeout` seconds."""
    ENGINE_ERROR = "engine_error"
    """The engine failed for good; what was sampled before is kept."""
    ENV_ERROR = "env_error"
    """The environment itself (not a tool) raised."""


@dataclass
class ToolCall:
    """
    One call of a tool inside a turn.

    Args:
        name (`str`): Name the model called.
        arguments (`dict`): Arguments as parsed; empty where the call was malformed.
        result (`str`): Text answered to the model: the tool's result or an error it can read.
        error (`str`, *optional*): What went wrong; `None` for a call that succeeded.
        executed (`bool`): Whether the tool ran (a malformed call, an unknown tool and bad arguments never do).
        seconds (`float`): Wall time of the tool.
        id (`str`, *optional*): Identifier the model gave the call.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    result: str = ""
    error: str | None = None
    executed: bool = False
    seconds: float = 0.0
    id: str | None = None


@dataclass
class Turn:
    """
    One timestep: the model acted, the environment replied.

    Args:
        index (`int`): Position among the trajectory's turns, from 0; the turn index of its tokens in the tree.
        message (`dict`): The assistant message, for people and rewards. Its text is never encoded again.
        tool_calls (`list[ToolCall]`): Calls in the order the model made them.
        replies (`list[dict]`): Messages of the environment that follow.
        finish_reason (`str`): `"stop"` or `"length"`, as the engine said.
        error (`str`, *optional*): Why the turn could not be parsed, where it could not.
        num_tokens (`int`): Tokens sampled.
        context_length (`int`): Tokens the model was given.
        rewritten (`str`, *optional*): Why the context does not extend the one before, where it does not.
        seconds (`float`): Time the engine took.
        weight_version (`int`, *optional*): Optimiser step of the weights it was sampled with.
        observation_length (`int`): Tokens at the end of the context that the environment wrote since the turn before.
    """

    index: int
    message: Message
    tool_calls: list[ToolCall] = field(default_factory=list)
    replies: list[Message] = field(default_factory=list)
    finish_reason: str = "stop"
    error: str | None = None
    num_tokens: int = 0
    context_length: int = 0
    rewritten: str | None = None
    seconds: float = 0.0
    weight_version: int | None = None
    observation_length: int = 0

    @property
    def text(self) -> str:
        """What the model wrote."""
        return self.message.get("content") or ""

    @property
    def has_result(self) -> bool:
        """Whether the reply of a tool that ran follows this turn: the boundary at which credit is split."""
        return bool(self.replies) and any(call.executed for call in self.tool_calls)

    @property
    def num_attempts(self) -> int:
        """Tool calls attempted: the parsed ones, or one for a turn that could not be parsed."""
        return len(self.tool_calls) or int(self.error is not None)

    @property
    def num_failures(self) -> int:
        """Attempts that did not succeed."""
        return sum(call.error is not None for call in self.tool_calls) or int(self.error is not None)


@dataclass
class Node:
    """
    A run of tokens of a `TokenTree` without a fork inside, wholly context or wholly the action of one turn.

    Args:
        parent (`int`): Index of the node it continues; -1 for a root.
        tokens (`list[int]`): Token ids it adds.
        turn (`int`): Turn whose action it is; -1 for context.
        logprobs (`list[float]`): Log-probabilities the action was sampled with; empty for context.
    """

    parent: int
    tokens: list[int]
    turn: int = -1
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Sequence:
    """
    One root-to-leaf path of a `TokenTree`; all lists have the length of `tokens`.

    Args:
        tokens (`list[int]`): Token ids.
        mask (`list[int]`): 1 where a token is trained in this sequence; 0 for context, and for an action that an
            earlier sequence of the same tree already trains.
        turns (`list[int]`): Turn whose action a token is; -1 for context.
        logprobs (`list[float]`): Log-probability an action token was sampled with; 0.0 for context.
    """

    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class TokenTree:
    """
    The token history of one trajectory as a prefix tree.

    A context that extends the path of an earlier timestep grows the tree by the added tokens only; one that does not
    forks it at the longest common prefix. Every action is one node of its own, so each action token is trained exactly
    once, with the log-probability it was sampled with; a copy of it inside a later context is context.

        tree = TokenTree()
        tree.add_turn(context=[1, 2], action=[3], logprobs=[-0.1])        # one sequence: 1 2 [3]
        tree.add_turn(context=[1, 2, 3, 4], action=[5], logprobs=[-0.2])  # extends it: 1 2 [3] 4 [5]
        tree.add_turn(context=[1, 2, 4], action=[6], logprobs=[-0.3])     # forks after 2: 1 2 4 [6]
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.num_turns = 0
        self._children: dict[int, list[int]] = {-1: []}
        self._tip = -1

    def add_turn(self, context: list[int], action: list[int], logprobs: list[float]) -> None:
        """
        Adds one timestep, its ids exactly as the engine saw and sampled them.

        Args:
            context (`list[int]`): Every token the model was given.
            action (`list[int]`): Tokens it sampled.
            logprobs (`list[float]`): Their log-probabilities.

        Raises:
            ValueError: If `action` and `logprobs` differ in length.
        """
        tip, matched = self._match(context)
        self._append(tip, context[matched:], list(action), list(logprobs))

    def extend(self, suffix: list[int], action: list[int], logprobs: list[float]) -> None:
        """
        Adds a timestep whose context is the latest path plus `suffix`. The lists are kept, not copied: that a group's
        prompt is long costs its members nothing here.
        """
        self._append(self._tip, suffix, action, logprobs)

    def _append(self, tip: int, suffix: list[int], action: list[int], logprobs: list[float]) -> None:
        if len(action) != len(logprobs):
            raise ValueError(f"An action of {len(action)} tokens came with {len(logprobs)} log-probabilities.")
        if suffix:
            tip = self._add(Node(tip, suffix))
        if action:
            tip = self._add(Node(tip, action, self.num_turns, logprobs))
        self._tip = tip
        self.num_turns += 1

    def _add(self, node: Node) -> int:
        index = len(self.nodes)
        self.nodes.append(node)
        self._children[index] = []
        self._children[node.parent].append(index)
        return index

    def _match(self, context: list[int]) -> tuple[int, int]:
        """Finds the longest common prefix of `context` and any path: (node it ends with, tokens matched)."""
        tip, matched, offset = -1, 0, 0
        stack = [(child, 0) for child in self._children[-1]]
        while stack:
            node, start = stack.pop()
            tokens = self.nodes[node].tokens
            length = common_prefix(tokens, context, start)
            if start + length > matched:
                tip, matched, offset = node, start + length, length
            if length == len(tokens):
                stack += [(child, start + length) for child in self._children[node]]
        if tip >= 0 and offset < len(self.nodes[tip].tokens):
            self._split(tip, offset)
        return tip, matched

    def _split(self, index: int, offset: int) -> None:
        """Cuts a node in two at `offset` tokens, so that another branch can leave the upper half."""
        node = self.nodes[index]
        lower = len(self.nodes)
        self.nodes.append(Node(index, node.tokens[offset:], node.turn, node.logprobs[offset:]))
        self._children[lower] = self._children[index]
        for child in self._children[lower]:
            self.nodes[child].parent = lower
        self._children[index] = [lower]
        node.tokens, node.logprobs = node.tokens[:offset], node.logprobs[:offset]
        if self._tip == index:
            self._tip = lower

    def path(self, index: int | None = None) -> list[int]:
        """Token ids from the root to a node; by default the latest timestep's context and action."""
        return [token for node in self._ancestry(self._tip if index is None else index) for token in node.tokens]

    def tail(self, length: int) -> list[int]:
        """The last `length` tokens of the latest path, all where it has fewer; costs those only."""
        tokens, index = [], self._tip
        while index >= 0 and len(tokens) < length:
            tokens = self.nodes[index].tokens[-(length - len(tokens)) :] + tokens
            index = self.nodes[index].parent
        return tokens

    def ancestors(self, index: int) -> list[int]:
        """Indices of the nodes on the path from the root to a node, itself included."""
        path = []
        while index >= 0:
            path.append(index)
            index = self.nodes[index].parent
        return path[::-1]

    def _ancestry(self, index: int) -> list[Node]:
        return [self.nodes[ancestor] for ancestor in self.ancestors(index)]

    def sequences(self) -> list[Sequence]:
        """The root-to-leaf sequences, ordered by their latest turn; each action token has mask 1 in exactly one."""
        leaves = [index for index in range(len(self.nodes)) if not self._children[index]]
        paths = sorted((self._ancestry(leaf) for leaf in leaves), key=lambda path: max(node.turn for node in path))
        seen: set[int] = set()
        return [self._sequence(path, seen) for path in paths]

    @staticmethod
    def _sequence(path: list[Node], seen: set[int]) -> Sequence:
        sequence = Sequence()
        for node in path:
            size = len(node.tokens)
            trained = node.turn >= 0 and id(node) not in seen
            seen.add(id(node))
            sequence.tokens += node.tokens
            sequence.mask += [int(trained)] * size
            sequence.turns += [node.turn] * size
            sequence.logprobs += node.logprobs or [0.0] * size
        return sequence

    @property
    def num_tokens(self) -> int:
        """Unique tokens: what has to be computed once."""
        return sum(len(node.tokens) for node in self.nodes)

    @property
    def num_sequences(self) -> int:
        """Root-to-leaf paths: 1 where the extension property holds."""
        return sum(not self._children[index] for index in range(len(self.nodes)))

    def actions(self) -> list[list[int]]:
        """The sampled ids of every turn, in order of the turns."""
        actions: list[list[int]] = [[] for _ in range(self.num_turns)]
        for index in self.depth_first():
            if self.nodes[index].turn >= 0:
                actions[self.nodes[index].turn] += self.nodes[index].tokens
        return actions

    def depth_first(self) -> list[int]:
        """Indices of all nodes, each before its children, children in the order they were added."""
        order, stack = [], self._children[-1][::-1]
        while stack:
            order.append(stack.pop())
            stack += self._children[order[-1]][::-1]
        return order

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable form without loss."""
        return {"num_turns": self.num_turns, "tip": self._tip, "nodes": [asdict(node) for node in self.nodes]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TokenTree:
        """The inverse of `to_dict`."""
        tree = cls()
        tree.nodes = [Node(**node) for node in data["nodes"]]
        tree.num_turns, tree._tip = data["num_turns"], data["tip"]
        tree._children |= {index: [] for index in range(len(tree.nodes))}
        for index, node in enumerate(tree.nodes):
            tree._children[node.parent].append(index)
        return tree

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenTree) and self.to_dict() == other.to_dict()


def common_prefix(tokens: list[int], other: list[int], start: int) -> int:
    """Length of the longest common prefix of `tokens` and `other[start:]`."""
    low, high = 0, min(len(tokens), len(other) - start)
    if tokens[:high] == other[start : start + high]:
        return high
    while low < high:  # the slices are compared in C; the first difference is found by bisection
        middle = (low + high + 1) // 2
        if tokens[low:middle] == other[start + low : start + middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass
class Trajectory:
    """
    One conversation, finished or as far as it came.

    Args:
        prompt (`list[dict]`): Messages the conversation began with, system message included.
        turns (`list[Turn]`): What the model did and what it was answered.
        tree (`TokenTree`): The same as tokens, exactly as sampled.
        answer (`str`, *optional*): The final answer, where the model gave one.
        stop_reason (`StopReason`, *optional*): Why it ended; `None` while it runs.
        error (`str`, *optional*): The failure behind the stop reason.
        session (`str`): Identifier of the conversation, unique within a run.
        row (`dict`): The dataset row it answers.
        rewards (`dict`): Filled in by the trainer: outcome rewards by name, turn rewards by name as one list a turn.
        tokenization (`str`, *optional*): How the trained ids differ from the conversation rendered as a whole, where
            that was checked and they do.
        seconds (`float`): Wall time of the whole conversation.
    """

    prompt: list[Message]
    turns: list[Turn] = field(default_factory=list)
    tree: TokenTree = field(default_factory=TokenTree)
    answer: str | None = None
    stop_reason: StopReason | None = None
    error: str | None = None
    session: str = ""
    row: dict[str, Any] = field(default_factory=dict)
    rewards: dict[str, Any] = field(default_factory=dict)
    tokenization: str | None = None
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the engine or the environment ended it, which says nothing about the policy."""
        return self.stop_reason in (StopReason.ENGINE_ERROR, StopReason.ENV_ERROR)

    @property
    def completion(self) -> list[Message]:
        """The messages after the prompt, as TRL hands them to a reward function."""
        return [message for turn in self.turns for message in (turn.message, *turn.replies)]

    @property
    def messages(self) -> list[Message]:
        """The whole conversation."""
        return self.prompt + self.completion

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable form without loss, as far as `row` is JSON, and `messages`, the whole conversation."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["messages"] = self.messages
        data["turns"] = [asdict(turn) for turn in self.turns]
        data["tree"] = self.tree.to_dict()
        data["stop_reason"] = self.stop_reason.value if self.stop_reason else None
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trajectory:
        """The inverse of `to_dict`."""
        data = {name: value for name, value in data.items() if name != "messages"}  # they are in the turns
        data["turns"] = [
            Turn(**{**turn, "tool_calls": [ToolCall(**call) for call in turn["tool_calls"]]}) for turn in data["turns"]
        ]
        data["tree"] = TokenTree.from_dict(data["tree"])
        data["stop_reason"] = StopReason(data["stop_reason"]) if data["stop_reason"] else None
        return cls(**data)
