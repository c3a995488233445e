"""The token history of one trajectory as a prefix tree. Imports nothing but the standard library."""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass, field, replace
from typing import Any

NO_ROUTE = b"\xff"
"""Every byte of the route of a token that has none."""


@dataclass
class Node:
    """
    A run of tokens of a `TokenTree` that has no fork inside. All of it is context, or all is the action of one turn.
    """

    parent: int
    tokens: list[int]
    turn: int = -1
    logprobs: list[float] = field(default_factory=list)
    routes: bytes = b""


@dataclass(frozen=True)
class Routes:
    """
    The experts that a mixture sent tokens to, in the form of `mt_grpo.forward.routes`: an equal number of bytes for
    each token. A token whose bytes are all 255 has no route.
    """

    first: int
    width: int
    data: bytes


@dataclass
class Sequence:
    """
    One root-to-leaf path of a `TokenTree`; all lists have the length of `tokens`.

    Args:
        tokens (`list[int]`): Token ids.
        mask (`list[int]`): 1 if a token is trained in this sequence; 0 for context, and for an action that an earlier
            sequence of the same tree trains.
        turns (`list[int]`): Turn to whose action a token belongs; -1 for context.
        logprobs (`list[float]`): Log-probability that an action token was sampled with; 0.0 for context.
    """

    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class TokenTree:
    """
    The token history of one trajectory as a prefix tree.

    A context that extends the path of an earlier timestep adds only its new tokens. Any other context forks the tree
    at the longest common prefix. Every action is a node of its own, so each action token is trained exactly once, with
    the log-probability that it was sampled with. A copy of an action inside a later context is context. The tokens of
    an image have an id of their own below 0, so that other images fork the tree as other words do.

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

    def add_turn(
        self, context: list[int], action: list[int], logprobs: list[float], routes: Routes | None = None
    ) -> None:
        """
        Adds one timestep, with its ids exactly as the engine saw and sampled them: all tokens that the model was
        given, those that it sampled with their log-probabilities, and where the engine sent these tokens. A token
        keeps the route that it had. `ValueError` if `action` and `logprobs` differ in length.
        """
        context = list(context)  # a tuple would have no prefix in common with the lists of nodes
        tip, matched = self._match(context)
        self._append(tip, context[matched:], list(action), list(logprobs))
        self._route(routes)

    def extend(
        self, suffix: list[int], action: list[int], logprobs: list[float], routes: Routes | None = None
    ) -> None:
        """
        Adds a timestep whose context is the latest path plus `suffix`. The lists are kept, not copied, so that all
        members of a group hold the same list for their prompt.
        """
        self._append(self._tip, suffix, action, logprobs)
        self._route(routes)

    def _append(self, tip: int, suffix: list[int], action: list[int], logprobs: list[float]) -> None:
        if len(action) != len(logprobs):
            raise ValueError(f"An action of {len(action)} tokens came with {len(logprobs)} log-probabilities.")
        if suffix:
            tip = self._add(Node(tip, suffix))
        if action:
            tip = self._add(Node(tip, action, self.num_turns, logprobs))
        self._tip = tip
        self.num_turns += 1

    def _route(self, routes: Routes | None) -> None:
        """Gives routes to those tokens of the latest path that have none."""
        if routes is None:
            return
        width, end = routes.width, 0
        none = NO_ROUTE * width
        for node in self._ancestry(self._tip):
            begin, end = end, end + len(node.tokens)
            if end <= routes.first:
                continue
            first = max(begin, routes.first)
            given = none * (first - begin) + routes.data[(first - routes.first) * width : (end - routes.first) * width]
            given += none * (len(node.tokens) - len(given) // width)
            if node.routes:
                pairs = ((node.routes[at : at + width], given[at : at + width]) for at in range(0, len(given), width))
                given = b"".join(new if old == none else old for old, new in pairs)
            node.routes = given if given != NO_ROUTE * len(given) else b""

    @property
    def routed(self) -> int:
        """Number of the first tokens of the latest path that have routes."""
        if not any(self.nodes[root].routes for root in self._children[-1]):
            return 0  # it is asked for at each turn, and most models have none
        count = 0
        for node in self._ancestry(self._tip):
            width = len(node.routes) // len(node.tokens)
            known = len(node.tokens) if width else 0
            while known and node.routes[(known - 1) * width : known * width] == NO_ROUTE * width:
                known -= 1
            count += known
            if known < len(node.tokens):
                break
        return count

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
        cut = len(node.routes) // len(node.tokens) * offset
        self.nodes.append(Node(index, node.tokens[offset:], node.turn, node.logprobs[offset:], node.routes[cut:]))
        self._children[lower] = self._children[index]
        for child in self._children[lower]:
            self.nodes[child].parent = lower
        self._children[index] = [lower]
        node.tokens, node.logprobs, node.routes = node.tokens[:offset], node.logprobs[:offset], node.routes[:cut]
        if self._tip == index:
            self._tip = lower

    def fork(self) -> TokenTree:
        """A tree of the same tokens, to which timesteps are added apart; the lists of tokens are shared."""
        twin = TokenTree()
        twin.nodes = [replace(node) for node in self.nodes]
        twin.num_turns, twin._tip = self.num_turns, self._tip
        twin._children = {index: list(children) for index, children in self._children.items()}
        return twin

    def path(self, index: int | None = None) -> list[int]:
        """Token ids from the root to a node; by default the latest timestep's context and action."""
        return [token for node in self._ancestry(self._tip if index is None else index) for token in node.tokens]

    def tail(self, length: int) -> list[int]:
        """The last `length` tokens of the latest path, or all if it has fewer. It reads no other tokens."""
        tokens: list[int] = []
        index = self._tip
        while index >= 0 and len(tokens) < length:
            tokens = self.nodes[index].tokens[-(length - len(tokens)) :] + tokens
            index = self.nodes[index].parent
        return tokens

    def path_of_turn(self, turn: int) -> list[int]:
        """Token ids from the root to the last one that a turn sampled; empty where it sampled none."""
        own = {index for index, node in enumerate(self.nodes) if node.turn == turn}
        ends = own - {self.nodes[index].parent for index in own}  # an action may be split where others leave it
        return self.path(ends.pop()) if ends else []

    def ancestors(self, index: int) -> list[int]:
        """Indices of the nodes on the path from the root to a node, including the node itself."""
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
    def tip(self) -> int:
        """Index of the node that the latest timestep ends with; -1 where there is none."""
        return self._tip

    @property
    def num_tokens(self) -> int:
        """Number of unique tokens, each of which a forward computes once."""
        return sum(len(node.tokens) for node in self.nodes)

    @property
    def num_sequences(self) -> int:
        """Number of root-to-leaf paths; 1 if every context extends the one before."""
        return sum(not self._children[index] for index in range(len(self.nodes)))

    def actions(self) -> list[list[int]]:
        """The sampled ids of every turn, in the order of the turns."""
        return self._by_turn("tokens")

    def action_logprobs(self) -> list[list[float]]:
        """The log-probs that the ids of `actions` were sampled with."""
        return self._by_turn("logprobs")

    def _by_turn(self, name: str) -> list[list[Any]]:
        found: list[list[Any]] = [[] for _ in range(self.num_turns)]
        for node in map(self.nodes.__getitem__, self.depth_first()):
            if node.turn >= 0:
                found[node.turn] += getattr(node, name)
        return found

    def depth_first(self) -> list[int]:
        """Indices of all nodes, each before its children, children in the order they were added."""
        order, stack = [], self._children[-1][::-1]
        while stack:
            order.append(stack.pop())
            stack += self._children[order[-1]][::-1]
        return order

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable form without loss."""
        nodes = []
        for node in self.nodes:
            values = asdict(node)
            routes = b64encode(values.pop("routes")).decode()
            nodes.append(values | {"routes": routes} if routes else values)
        return {"num_turns": self.num_turns, "tip": self._tip, "nodes": nodes}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TokenTree:
        """The inverse of `to_dict`."""
        tree = cls()
        tree.nodes = [Node(**{**node, "routes": b64decode(node.get("routes", ""))}) for node in data["nodes"]]
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
