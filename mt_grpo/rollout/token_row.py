"""
A trajectory as the trainer reads it: its tokens as one row. For rewards that ask for it also the right answer, as an
extra leaf of the tree after each context. And whether these tokens are those of a rendering of the whole conversation.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from mt_grpo.errors import ConfigError
from mt_grpo.forward.media import Media
from mt_grpo.imports import did_you_mean
from mt_grpo.rollout.chat_template import TemplateError
from mt_grpo.rollout.escaped_text import ESCAPE, unescape
from mt_grpo.rollout.rendering import ChatRenderer
from mt_grpo.token_tree import NO_ROUTE, TokenTree, common_prefix
from mt_grpo.trajectory import Message, StopReason, Trajectory, Turn


@dataclass
class TokenRow:
    """The tokens of a trajectory for a trainer. All lists except `prompt_ids` have the completion's length."""

    prompt_ids: list[int]  # the first context
    ids: list[int]  # after it
    mask: list[int]
    """
    1 for a sampled token, or what `Turn.mask` says; `env_mask` for the environment's, but those of media; 0 for copies
    of the past.
    """
    turns: list[int]  # a reply belongs to the turn that it answers
    logprobs: list[float]  # as sampled; NaN for the environment's tokens
    parent: list[int]
    """
    Position of the token that each token follows: the one before, except where the history was rewritten. -1 is the
    last token of the prompt, -2 the one before, and so on.
    """
    prompt_routes: bytes = b""
    routes: bytes = b""  # of both parts, see `Routes`; empty where no token has one
    media: Media = field(default_factory=dict)  # of both parts, whose tokens have ids below 0
    teacher: list[float] = field(default_factory=list)
    """The teacher's log-probs of sampled tokens, NaN for others; empty without a teacher."""
    top: list[Any] = field(default_factory=list)


def token_row(trajectory: Trajectory, renderer: ChatRenderer, env_mask: int = 0) -> TokenRow:
    """The tokens of a trajectory as one row: its tree in depth-first order. `env_mask` masks the environment's."""
    tree = trajectory.tree
    order = tree.depth_first()
    first = next((index for index in order if tree.nodes[index].turn == 0), None)
    sampled = any(node.turn >= 0 for node in tree.nodes)
    if not sampled:
        began = trajectory.stop_reason not in (None, StopReason.ENV_ERROR)  # else the prompt may have no rendering
        ids = renderer.prompt_ids(trajectory.prompt) if began else [renderer.end_id]
        # no token of it is trained, so nobody looks at its media
        return TokenRow([token for token in ids if token >= 0], [], [], [], [], [])
    prompt = _first_context(trajectory) if first is None else tree.ancestors(first)[:-1]
    prompt_ids = [token for index in prompt for token in tree.nodes[index].tokens]
    ends = {-1: -len(prompt_ids) - 1}  # column of each node's last token; the prompt's are below 0
    for index in prompt:
        ends[index] = ends[tree.nodes[index].parent] + len(tree.nodes[index].tokens)
    row = TokenRow(prompt_ids, [], [], [], [], [])
    row.media = {number: each.inputs for number, each in trajectory.media.items()}
    replied = _observations(trajectory)
    answered = {-1: 0} | dict.fromkeys(prompt, 0)  # latest turn on the path to each node
    masks = {turn.index: list(turn.mask) for turn in trajectory.turns if turn.mask is not None}
    taught, top = list(trajectory.teacher_logprobs), list(trajectory.teacher_top)
    for index in order:
        if index in ends:
            continue
        node = tree.nodes[index]
        begin, size = len(row.ids), len(node.tokens)
        trained = node.turn >= 0
        answered[index] = max(node.turn, answered[node.parent])
        row.ids += node.tokens
        tail, turn = (size, node.turn) if trained else replied.get(index, (0, 0))
        row.mask += [0] * (size - tail)
        # an id below 0 is none of the vocabulary
        row.mask += [1] * tail if trained else [env_mask * (token >= 0) for token in node.tokens[size - tail :]]
        if trained and node.turn in masks:  # the parts of an action that was split come in order
            row.mask[begin:], masks[node.turn] = masks[node.turn][:size], masks[node.turn][size:]
        row.turns += [answered[index]] * (size - tail) + [turn] * tail
        row.logprobs += node.logprobs if trained else [float("nan")] * size
        if trained and taught:
            row.teacher += taught[node.turn][:size]
            taught[node.turn] = taught[node.turn][size:]
        elif taught:
            row.teacher += [float("nan")] * size
        if trained and top:
            row.top.append((begin, top[node.turn][:size]))
            top[node.turn] = top[node.turn][size:]
        row.parent += [ends[node.parent], *range(begin, begin + size - 1)]
        ends[index] = begin + size - 1
    width = max(len(node.routes) // len(node.tokens) for node in tree.nodes)
    routes = {index: node.routes or NO_ROUTE * width * len(node.tokens) for index, node in enumerate(tree.nodes)}
    row.prompt_routes = b"".join(routes.pop(index) for index in prompt)
    row.routes = b"".join(routes[index] for index in order if index in routes)
    return row


def _first_context(trajectory: Trajectory) -> list[int]:
    """Nodes of the context of a first turn that sampled nothing."""
    # where other contexts leave it, the node is split, and its own rest is the first child
    nodes, length = trajectory.tree.nodes, trajectory.turns[0].context_length
    path = [0]
    while sum(len(nodes[index].tokens) for index in path) < length:
        path.append(next(index for index, node in enumerate(nodes) if node.parent == path[-1]))
    return path


def _observations(trajectory: Trajectory) -> dict[int, tuple[int, int]]:
    """The nodes that hold what the environment wrote between two turns, without copies in rewritten contexts."""
    tree, turns = trajectory.tree, trajectory.turns
    nodes, held = tree.nodes, {}
    contexts = [(nodes[index].turn, nodes[index].parent) for index in tree.depth_first() if nodes[index].turn >= 0]
    if not turns[-1].num_tokens:  # it has no node, but a context
        contexts.append((len(turns) - 1, tree.tip))
    for turn, node in contexts:
        if node >= 0 and nodes[node].turn == turn:  # the lower part of an action
            continue
        while turn > 0:
            left = turns[turn].observation_length
            while left > 0:
                size = len(nodes[node].tokens)
                held[node] = (min(left, size), turn - 1)
                left, node = left - size, nodes[node].parent
            if turns[turn].fork_cause is not None or turns[turn - 1].num_tokens:
                break
            turn -= 1  # it sampled nothing, so its context goes on here
    return held


@dataclass
class AnswerLeaves:
    """What is to be scored for one trajectory."""

    tree: TokenTree = field(default_factory=TokenTree)
    turns: list[int] = field(default_factory=list)

    @classmethod
    def after(
        cls, trajectory: Trajectory, answers: Sequence[tuple[list[int], list[int]] | None], most: int
    ) -> AnswerLeaves:
        """The contexts that a trajectory's turns really had, each followed by its right answer."""
        leaves = cls()
        for turn, (action, ids) in enumerate(zip(trajectory.tree.actions(), answers, strict=True)):
            if not action or ids is None:
                continue
            prefix, answer = ids
            path = trajectory.tree.path_of_turn(turn)
            context = path[: len(path) - len(action)] + prefix
            if len(context) + len(answer) <= most:
                leaves.tree.add_turn(context, answer, [0.0] * len(answer))
                leaves.turns.append(turn)
        return leaves

    @classmethod
    def hinted(
        cls,
        trajectory: Trajectory,
        renderer_of: Callable[[list[dict[str, Any]] | None], ChatRenderer],
        hint: str,
        most: int,
    ) -> AnswerLeaves:
        """
        The contexts that a trajectory's turns really had, each with a hint behind the words of its last message, and
        what the turn sampled there. Turns with more than `most` tokens then, or whose template writes another message,
        are left out.
        """
        leaves = cls()
        for turn, action in zip(trajectory.turns, trajectory.tree.actions(), strict=True):
            path = trajectory.tree.path_of_turn(turn.index)
            context = path[: len(path) - len(action)]
            renderer = renderer_of(trajectory.tools if turn.tools is None else turn.tools or None)
            try:
                old, new = (_last_message(trajectory, turn, renderer, words) for words in ("", hint))
            except TemplateError:  # it writes no such message there
                continue
            same = common_prefix(old, new, 0)
            old, new = old[same:], new[same:]
            if action and old and context[-len(old) :] == old and len(path) - len(old) + len(new) <= most:
                leaves.tree.add_turn(context[: -len(old)] + new, action, [0.0] * len(action))
                leaves.turns.append(turn.index)
        return leaves


def answer_ids(renderer: ChatRenderer, prefix: str, answer: str) -> tuple[list[int], list[int]]:
    """Ids before an answer, and of it, encoded as one text; a token of both is the answer's."""
    before = renderer.encode(prefix)
    whole = renderer.encode(renderer.special_tokens.tidy(prefix + renderer.special_tokens.escape_all(answer)))
    length = common_prefix(before, whole, 0)
    return whole[:length], whole[length:]


def _last_message(trajectory: Trajectory, turn: Turn, renderer: ChatRenderer, hint: str) -> list[int]:
    """Ids of the prompt or the replies that a turn answers, with a hint in the last message."""
    begun = turn.index == 0 or turn.follows == -1
    before = trajectory.turns[turn.index - 1 if turn.follows is None else turn.follows]
    messages = trajectory.prompt if turn.index == 0 else turn.given or before.replies
    if not messages:
        return []
    *others, last = messages
    words = last.get("content") or ""
    if hint and isinstance(words, list):
        last = {**last, "content": [*words, {"type": "text", "text": hint}]}
    elif hint:
        last = {**last, "content": f"{words}\n\n{hint}" if words else hint}
    if begun:
        return renderer.prompt_ids([*others, last])
    return renderer.reply_ids([*others, last], -1, before.message.get("tool_calls") or ())


logger = logging.getLogger(__name__)

MODES = ("strict", "ignore_strippable", "disable")
SHOWN = 60  # characters
_SHOWN_IDS = 8
_OTHER_TOKENS = "the same text in other tokens"
"""The cause of a difference in tokens alone: the model sampled these, and another tokenization was possible."""


@dataclass(frozen=True)
class _Difference:
    """The first place at which the trained ids and the full rendering differ."""

    cause: str
    trained: str
    rendered: str


class SanityCheck:
    """Compares each trajectory with the full rendering of its messages; a difference is counted, and logged once."""

    def __init__(self, renderer: ChatRenderer, mode: str) -> None:
        if mode not in MODES:
            known = ", ".join(MODES)
            raise ConfigError(
                f"`tokenization_sanity_check_mode` is {mode!r}{did_you_mean(mode, MODES)}: choose one of {known}."
            )
        self._renderer = renderer
        self._mode = mode
        self.causes: Counter[str] = Counter()
        """How often each cause occurred."""

    def by(self, renderer: ChatRenderer) -> SanityCheck:
        """This check for conversations of another renderer; causes are counted together."""
        other = copy(self)
        other._renderer = renderer
        return other

    def check(self, trajectory: Trajectory) -> _Difference | None:
        """Compares one trajectory and counts its difference, if there is one."""
        try:
            difference = self.difference(trajectory)
        except Exception as error:  # a template may refuse what a model wrote
            difference = _Difference("the template refuses the conversation", "", f"{type(error).__name__}: {error}")
        if difference is not None:
            if difference.cause not in self.causes and difference.cause != _OTHER_TOKENS:
                logger.warning(
                    "What is trained differs from the conversation rendered as a whole (%s): trained %r, rendered %r. "
                    "The model is trained on exactly what it saw; review the chat template if that is not meant.",
                    difference.cause,
                    difference.trained,
                    difference.rendered,
                )
            self.causes[difference.cause] += 1
        return difference

    def difference(self, trajectory: Trajectory) -> _Difference | None:
        """The first difference of one trajectory, without counting it."""
        if not trajectory.turns:
            return None
        # The latest turn is compared as it is sampled, behind the assistant's header: what a template writes into a
        # finished last turn (an empty thought, say) is nothing the model was ever asked for.
        escaped = self._renderer.escaped_text
        *actions, action = trajectory.tree.actions()
        messages = self._renderer.escaped(trajectory.prompt)
        for turn, sampled in zip(trajectory.turns[:-1], actions, strict=True):
            messages += [self._renderer.past_message(turn.message, sampled), *self._renderer.escaped(turn.replies)]
        ids = trajectory.tree.path()
        rendered = self._renderer.shown_text(messages) + escaped(action)
        known, begin = self._known(trajectory, ids, rendered)
        ids, rest = ids[known:], rendered[begin:]
        trained = escaped(ids)
        if self._mode == "strict" and rest.startswith(trained):
            if self._renderer.encode(rest)[: len(ids)] == ids or self._renderer.encode(trained) == ids:
                return None
            return _Difference(_OTHER_TOKENS, *self._as_ids(ids, rest))
        left, right = trained, rest
        if self._mode == "ignore_strippable":
            left, right = ("".join(text.split()) for text in (trained, rest))
            begin = len("".join(rendered[:begin].split()))
        if right.startswith(left):
            return None
        place = next(i for i, (a, b) in enumerate(zip(left + "\0", right + "\0", strict=False)) if a != b)
        told = ESCAPE in (left[place : place + 1], right[place : place + 1])
        what = "a mark, or text that spells one," if told else "text"
        seen = [unescape(text[max(0, place - 10) : place + SHOWN]) for text in (left, right)]
        if seen[0] == seen[1]:
            seen = self._as_ids(ids, rest)
        return _Difference(f"{what} of the {self._role(messages, rendered, begin + place)} message", *seen)

    def _as_ids(self, ids: list[int], rendered: str) -> list[str]:
        """Both sides from the first id that differs, each id with its text: `ids 345 'Li', 88 'ma'`."""
        sides = ids, self._renderer.encode(rendered)
        place = next((i for i, pair in enumerate(zip(*sides, strict=False)) if pair[0] != pair[1]), len(sides[1]))
        return [
            "ids "
            + ", ".join(f"{token} {self._renderer.decode([token])!r}" for token in side[place : place + _SHOWN_IDS])
            for side in sides
        ]

    def _known(self, trajectory: Trajectory, ids: list[int], rendered: str) -> tuple[int, int]:
        """
        How many ids, and characters of the rendering, need no comparison, because the prompt was encoded from the same
        text: all but its last piece, which is encoded together with what follows it.
        """
        prompt, text = self._renderer.prompt_ids(trajectory.prompt), self._renderer.prompt_text(trajectory.prompt)
        special = self._renderer.special_ids
        last = next((index for index in reversed(range(len(prompt))) if prompt[index] in special), 0)
        piece = self._renderer.escaped_text(prompt[last:])
        if ids[: len(prompt)] == prompt and rendered.startswith(text) and text.endswith(piece):
            return last, len(text) - len(piece)
        return 0, 0

    def _role(self, messages: list[Message], rendered: str, place: int) -> str:
        """Role of the message that contains a position of the rendering."""
        if self._mode == "ignore_strippable":  # back to a position with white space
            seen = 0
            for index, character in enumerate(rendered):
                seen += not character.isspace()
                if seen > place:
                    place = index
                    break
        for count in range(1, len(messages)):
            begun = self._renderer.shown_text(messages[:count], header=False)
            if len(begun) > place and messages[count - 1]["role"] != "system":
                return messages[count - 1]["role"]
        return messages[-1]["role"]


def examine_template(renderer: ChatRenderer) -> str:
    """What a template does not append, does to earlier thinking, or does not show, in short."""
    thinking = "A thought."
    question: list[Message] = [{"role": "user", "content": "Question."}]
    call = {"type": "function", "function": {"name": "tool", "arguments": {}}}
    answer: Message = {"role": "assistant", "content": f"<think>\n{thinking}\n</think>\n\nAnswer."}
    replies: dict[str, tuple[Message, Message]] = {
        "tool results": ({**answer, "tool_calls": [call]}, {"role": "tool", "name": "tool", "content": "Result."}),
        "user replies": (answer, {"role": "user", "content": "Reply."}),
    }
    findings = []
    for name, (turn, reply) in replies.items():
        try:
            appends = _appends(renderer, question, {**turn, "content": "Answer."}, reply)
            keeps = thinking in renderer.prompt_text([*question, turn, reply])
        except TemplateError as error:
            findings.append(f"refuses {name} ({error.__cause__ or error})")
            continue
        findings.append(
            f"after {name} it {'appends' if appends else 'rewrites the assistant turn'} and "
            f"{'keeps' if keeps else 'drops'} earlier thinking"
        )
    if renderer.tools and renderer.calls_shown < 2:
        findings.append(f"it shows {('no call', 'one call')[renderer.calls_shown]} of an assistant message")
    if renderer.tools and not _shows_tools(renderer, question):
        findings.append("it does not show the tools, so describe them in `system_prompt`")
    return f"Chat template: {'; '.join(findings)}."


def _shows_tools(renderer: ChatRenderer, question: list[Message]) -> bool:
    try:
        shown = renderer.prompt_text(question)
    except TemplateError:  # found above
        return True
    return all(tool.get("function", tool)["name"] in shown for tool in renderer.tools or ())


def _appends(renderer: ChatRenderer, question: list[Message], turn: Message, reply: Message) -> bool:
    """Whether each of three contexts goes on from the one before and the turn that follows it."""
    messages, begun = question, renderer.prompt_text(question)
    finished, _, _ = renderer.shown_text([*question, turn], header=False).partition("Answer.")
    written = finished.removeprefix(begun) if finished.startswith(begun) else ""  # by the model, before its words
    for _ in range(3):
        messages = [*messages, turn, reply]
        after = renderer.prompt_text(messages)
        if not after.startswith((f"{begun}Answer.", f"{begun}{written}Answer.")):
            return False
        begun = after
    return True
