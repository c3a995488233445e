"""The policy in one conversation: messages in, a turn out, and every token kept as it was sampled."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from mt_grpo.concurrency import ConcurrencyLimit, in_thread
from mt_grpo.envs.env import ConversationEnded, check_messages
from mt_grpo.envs.protocols import CallProtocol, NativeProtocol
from mt_grpo.errors import EngineError
from mt_grpo.media import (
    ConversationMedia,
    Part,
    decode,
    decoded,
    is_decoded,
    is_read,
    kind_of_part,
    media_of,
    media_parts,
    read_messages,
)
from mt_grpo.rollout.engines import Engine, LocalEngine, MediaEngine, Sample, SamplingParams
from mt_grpo.rollout.escaped_text import MediaEncoder
from mt_grpo.rollout.rendering import ChatRenderer, Context, History, Transcript
from mt_grpo.token_tree import common_prefix
from mt_grpo.trajectory import Message, Row, StopReason, ToolSchema, Trajectory, Turn

T = TypeVar("T")
LONG = 2_000
"""Characters from which a text is encoded in a thread; about half a millisecond of work."""
RENDERERS_KEPT = 64
"""Renderers that are kept though no conversation uses them. An agent may send other tools with every request."""
_HEADER_TOKENS = 32
"""Upper bound of the tokens of an assistant's header, which a response parser reads to know where a turn begins."""
_REWRITTEN = "messages"  # the cause of a fork where the caller's messages do not go on from those before
_PAST_END = "end_of_turn"
"""The cause of a fork where a turn that is past ends in another token than it was sampled with."""
_SHOWN = 24  # tokens that are shown from where a context differs from the one that was recorded
_REFUSALS_KEPT = 16  # different sentences of refusals that a record holds; further ones are counted together
_OTHERS = "other reasons"
_NATIVE = NativeProtocol()


@dataclass(frozen=True)
class RolloutLimits:
    """
    What bounds a conversation; `None` is no bound.

    Args:
        max_completion_tokens (`int`, *optional*): Tokens after the prompt, environment's included, in one trajectory.
        max_turn_tokens (`int`, *optional*): Tokens sampled in one turn.
        rollout_timeout (`float`, *optional*): Seconds one conversation may take.
        max_concurrent (`int`, *optional*): Conversations under way at once.
        idle_timeout (`float`, *optional*): Seconds that an environment may take to be made, and one with a loop of its
            own between two turns. A `StepEnv` has limits of its own.
    """

    max_completion_tokens: int | None = None
    max_turn_tokens: int | None = None
    rollout_timeout: float | None = None
    max_concurrent: int | None = None
    idle_timeout: float | None = None


@dataclass(frozen=True)
class Again:
    """The first turns of a recorded conversation of a row, which are taken as they were, and not sampled."""

    row: Row
    recorded: Trajectory
    turns: int

    def take(self, index: int, context: list[int], tokenizer: Any) -> Sample:
        """What a turn sampled; `EngineError` if the context before it is not the recorded one."""
        tree, turn = self.recorded.tree, self.recorded.turns[index]
        ids, logprobs = tree.actions()[index], tree.action_logprobs()[index]
        before = tree.path_of_turn(index)[: -len(ids)]
        if ids and before != context:
            same = common_prefix(before, context, 0)
            here, there = (decoded(each[same : same + _SHOWN], tokenizer) for each in (context, before))
            raise EngineError(
                f"The conversation {self.recorded.session} cannot be taken again: before turn {index + 1} it goes on "
                f"with {here!r} where {there!r} is recorded."
            )
        return Sample(ids, logprobs, turn.finish_reason, turn.weight_version, turn.last_weight_version)


@dataclass
class RolloutRequest:
    """
    One conversation to run.

    Args:
        prompt (`str` or `list[dict]`): The user's words, or messages.
        session (`str`): Identifier, unique within a run of the runner; its order is the engine's batch order.
        row (`dict`): The dataset row, kept with the trajectory.
        seed (`int`): Seed of the conversation's random stream.
        again (`Again`, *optional*): Turns of another conversation that it begins with.
    """

    prompt: str | list[Message]
    session: str
    row: Row = field(default_factory=dict)
    seed: int = 0
    again: Again | None = None


class Sampler:
    """Shared by the conversations of a run: engine, limits, and one renderer per set of tools."""

    def __init__(
        self,
        engine: Engine,
        limits: RolloutLimits,
        template_kwargs: dict[str, Any],
        history: str,
        compact_every: int | None,
        media: MediaEncoder | None = None,
    ) -> None:
        self.engine, self.limits, self.media = engine, limits, media
        self.history, self.compact_every = history, compact_every
        self._template_kwargs = template_kwargs
        self._renderers: WeakValueDictionary[tuple[str, tuple[str, ...]], ChatRenderer] = WeakValueDictionary()
        self._latest: dict[tuple[str, tuple[str, ...]], ChatRenderer] = {}  # the most recently asked for last
        self._choosing = Lock()  # a teacher's hints are written while other conversations go on
        self._encoding, self._decoding = ConcurrencyLimit(1), ConcurrencyLimit(1)

    def renderer(self, tools: list[ToolSchema] | None, tags: tuple[str, ...] = ()) -> ChatRenderer:
        """The renderer of conversations with these tools and tags."""
        key = json.dumps(tools, sort_keys=True), tags
        with self._choosing:
            renderer = self._renderers.get(key)  # as long as a conversation uses it, it is the same
            if renderer is None:
                renderer = ChatRenderer(self.engine.tokenizer, tools, self._template_kwargs, tags, self.media)
                self._renderers[key] = renderer
            self._latest.pop(key, None)
            self._latest[key] = renderer
            if len(self._latest) > RENDERERS_KEPT:
                del self._latest[next(iter(self._latest))]
        return renderer

    async def aside(self, size: int, work: Callable[[], T]) -> T:
        """
        Does what reads `size` characters: long work in a thread, one text at a time, so that members of a group encode
        their prompt once; at once for an engine in this process, which samples requests that come together as a batch.
        """
        if size < LONG or isinstance(self.engine, LocalEngine):
            return work()
        async with self._encoding:
            return await in_thread(work, "mt-grpo-encode")

    def takes(self, part: Part) -> bool:
        """Whether the model is shown what a part shows, or plays."""
        return self.media is not None and self.media.takes(part)

    async def decode(self, work: Callable[[], T]) -> T:
        """Runs `work`, which decodes media, in a thread, one at a time: each may be large."""
        if isinstance(self.engine, LocalEngine):
            return work()
        async with self._decoding:
            return await in_thread(work, "mt-grpo-decode")

    def budget(self, context_length: int, used: int, max_tokens: int | None = None) -> tuple[int, StopReason]:
        """Most tokens that a turn may sample, and the stop reason if it samples them all."""
        bounds = [(self.engine.context_length - context_length, StopReason.CONTEXT_FULL)]
        if self.limits.max_completion_tokens is not None:
            bounds.append((self.limits.max_completion_tokens - used, StopReason.TOKEN_BUDGET))
        for most in (self.limits.max_turn_tokens, max_tokens):
            if most is not None:
                bounds.append((most, StopReason.LENGTH))
        return min(bounds, key=lambda bound: bound[0])


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any parts, the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class ConversationPolicy:
    """The policy of one conversation; see `Policy`. Turns that are asked for at once are sampled one after another."""

    def __init__(self, sampler: Sampler, trajectory: Trajectory, sampling: SamplingParams, seed: int) -> None:
        self._sampler, self._trajectory, self.sampling, self._seed = sampler, trajectory, sampling, seed
        self._lock, self._opening = asyncio.Lock(), asyncio.Lock()
        self._last = time.perf_counter()
        self._transcript, self._shown = Transcript(), ConversationMedia()
        self._asked: tuple[Any, Any] | None = None
        self._history: History | None = None
        self._context: list[int] = []  # the latest, and its action
        self._action: list[int] = []
        self._prompt_length = 0  # until the first turn is asked for
        self._most = 0  # tokens that a context may have
        self._cause = sampler.history  # of the next fork
        self._renderers: list[ChatRenderer] = []  # of each turn
        self._past: tuple[int | None, list[Message]] = None, []  # `follows` and `given` of the next turn
        self.renderer: ChatRenderer
        self.ended: StopReason | None = None  # no further turn is taken
        self.session = trajectory.session
        self.exhausted: StopReason | None = None
        self.tokenizer, self.context_length = sampler.engine.tokenizer, sampler.engine.context_length
        self.sampled: tuple[list[int], list[float]] = ([], [])
        self.no_room: str | None = None
        self.stands: str | None = None  # where users' code of another thread stood when its time was over
        self.rewrote = False
        self.failure: Exception | None = None
        self.before_turn: Callable[[Sequence[Message]], Awaitable[None]] | None = None
        self.again: Again | None = None

    def fork(self, trajectory: Trajectory, seed: int) -> ConversationPolicy:
        """A policy for a branch that begins here; it writes into `trajectory`, a copy of this conversation's."""
        twin = copy.copy(self)
        twin._trajectory, twin._seed, twin.session, twin.before_turn = trajectory, seed, trajectory.session, None
        twin._lock, twin._opening = asyncio.Lock(), asyncio.Lock()
        twin._transcript, twin._shown = self._transcript.fork(), self._shown.fork()
        twin._history = None if self._history is None else self._history.fork()
        twin._context, twin._renderers = list(self._context), list(self._renderers)
        return twin

    async def reply(
        self,
        messages: Sequence[Message],
        tools: list[ToolSchema] | None = None,
        *,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        continue_last: bool = False,
        protocol: CallProtocol | None = None,
    ) -> Turn:
        """Samples the next turn; see `Policy.reply`."""
        async with self._lock:
            if self.ended is not None:
                raise ConversationEnded(self.ended)
            if self.before_turn is not None:
                await self.before_turn(messages)
            messages = await self.opened(messages)
            # what an engine cannot take would end the whole batch
            if isinstance(stop, str) or not all(isinstance(each, str) and each for each in stop):
                raise ValueError(
                    f"`stop` is {stop!r}, and has to be texts that end a turn: give a tuple, as `('</guess>',)`, or "
                    "leave it out."
                )
            if max_tokens is not None:
                if not isinstance(max_tokens, Integral):
                    raise TypeError(f"`max_tokens` is {max_tokens!r}: give a whole number, or leave it out.")
                max_tokens = int(max_tokens)  # of numpy's, which not every engine can send
            if protocol is None and tools:
                protocol = _NATIVE
            self._choose_renderer(tools, protocol.tags if protocol is not None else ())
            if continue_last:
                return await self._continue(list(messages), tuple(stop), max_tokens, protocol)
            check_messages(messages[-1:])
            if not messages:
                raise ValueError("There are no messages, so there is nothing to reply to: give at least one.")
            if messages[-1]["role"] == "assistant":
                raise ValueError(
                    "The last message is the assistant's, so there is nothing to reply to: add a message, or set "
                    "`continue_last`."
                )
            messages = messages if isinstance(messages, list) else list(messages)
            history = self._history
            known = 0 if history is None else self._transcript.known_length(messages)
            try:
                check_messages(messages[known:])
                context = await (
                    self._extended(history, messages, known) if history and known else self._begun(messages[:])
                )
                turn = await self._take(context, tuple(stop), max_tokens, protocol)
            except BaseException:
                self._history = None  # what was appended was not sampled after: who asks again begins anew
                raise
            self._transcript.add(messages, known, turn)
            return turn

    async def opened(self, messages: Sequence[Message], of_row: bool = False) -> Sequence[Message]:
        """Messages whose images and sounds are opened, and decoded where the model is shown them."""
        async with self._opening:  # requests of one conversation may come at once
            opened = await self._opened(messages, of_row)
        if self.ended is not None:
            raise ConversationEnded(self.ended)
        return opened

    async def _opened(self, messages: Sequence[Message], of_row: bool) -> Sequence[Message]:
        takes = self._sampler.takes
        seen = self._transcript.seen_length(messages)  # those were opened at their turn

        def work(seen: int) -> Sequence[Message]:
            added = messages[seen:]
            read = read_messages(added, of_row, self._shown.files)
            parts = list(media_parts(read))
            if parts:
                self._shown.add(media_of(parts))
            for medium in media_of(filter(takes, parts)):
                decode(medium)
            return messages if read is added else [*messages[:seen], *read]

        found = media_parts(messages[seen:])
        quick = all(is_read(part) and (not takes(part) or all(map(is_decoded, media_of([part])))) for part in found)
        if quick:
            return work(seen)
        return await self._sampler.decode(lambda: work(self._transcript.seen_length(messages, looks=True)))

    async def count(
        self,
        messages: list[Message],
        tools: list[ToolSchema] | None = None,
        *,
        protocol: CallProtocol | None = None,
        **_: Any,
    ) -> int:
        """Tokens of the context after which `reply` would sample. Nothing is sampled, and nothing is changed."""
        async with self._lock:
            if self.ended is not None:
                raise ConversationEnded(self.ended)
            check_messages(messages)
            renderer = self._sampler.renderer(tools, protocol.tags if protocol is not None else ())
            index, known, path = self._known_path(messages, renderer)
            if not path:
                return len(await self._aside(messages, partial(renderer.prompt_ids, messages)))
            calls = messages[known - 1].get("tool_calls") or ()
            replies = messages[known:]
            suffix = await self._aside(replies, partial(renderer.reply_ids, replies, path[-1], calls=calls))
            return len(path) + len(suffix)

    def refuse(self, why: str) -> None:
        """Records the reason why a request of the agent was refused."""
        refusals = self._trajectory.refusals
        if why in refusals or len(refusals) < _REFUSALS_KEPT:
            refusals[why] = refusals.get(why, 0) + 1
        else:
            refusals[_OTHERS] = refusals.get(_OTHERS, 0) + 1

    def idle(self) -> float:
        """Seconds since the latest turn, or since the conversation began; 0 while a turn is asked for."""
        return 0.0 if self._lock.locked() else time.perf_counter() - self._last

    def _choose_renderer(self, tools: list[ToolSchema] | None, tags: tuple[str, ...]) -> None:
        if self._asked is not None and self._asked[0] is tools and self._asked[1] is tags:
            return
        renderer = self._sampler.renderer(tools, tags)
        if self._asked is not None and renderer is not self.renderer:
            self._history = None  # the template shows other tools, from the first token on
        self._asked, self.renderer = (tools, tags), renderer

    # The context of a turn

    async def _aside(self, messages: Sequence[Message], work: Callable[[], T]) -> T:
        """Does work that renders and encodes messages; `ConversationEnded` if the conversation ended meanwhile."""
        done = await self._sampler.aside(sum(map(_size, messages)), work)
        if self.ended is not None:
            raise ConversationEnded(self.ended)
        return done

    async def _extended(self, history: History, messages: Sequence[Message], known: int) -> Context:
        """The context where messages go on from the latest turn: the first `known` end with that turn's message."""
        self._trajectory.turns[-1].replies = list(messages[known:])
        self._past = None, []
        told = messages[known:] if self._sampler.history == "keep" else messages
        extend = partial(history.extend, self._trajectory, self._action, self._most)
        extension = await self._aside(told, extend)
        if extension is None:
            reason = self._sampler.budget(self._most, self._most - self._prompt_length)[1]
            raise self._full(reason, f"more than {self._most}", f"more than {self._most - self._prompt_length}")
        if extension.whole is not None and self._sampler.history == "keep":
            self._cause = _PAST_END
        return extension

    def _known_path(self, messages: list[Message], renderer: ChatRenderer) -> tuple[int, int, list[int]]:
        """The turn that ends the longest known beginning of `messages`, its length and its ids."""
        index, known = self._transcript.longest(messages) if self._prompt_length else (-1, 0)
        if not known or self._sampler.history != "keep" or self._renderers[index] is not renderer:
            return index, known, []
        if any(reply["role"] == "assistant" for reply in messages[known:]):
            return index, known, []
        return index, known, self._trajectory.tree.path_of_turn(index)  # empty where the turn is

    async def _begun(self, messages: list[Message]) -> Context:
        """The context where messages do not go on from the latest turn: the first turn, or a rewritten past."""
        history = self._history = History(self.renderer, self._sampler.history, self._sampler.compact_every)
        first = not self._prompt_length
        index, known, path = self._known_path(messages, self.renderer)
        replies = messages[known:]
        self._past = (None, []) if first else (index, replies)
        if path:
            calls = messages[known - 1].get("tool_calls") or ()
            suffix = await self._aside(replies, partial(self.renderer.reply_ids, replies, path[-1], calls=calls))
            return self._rewritten(suffix, path + suffix)
        context = await self._aside(messages, partial(history.begin, messages, self._sampler.engine.context_length))
        if context is None:
            self._history = None
            raise self._full(StopReason.CONTEXT_FULL, f"more than {self.context_length}")
        if not first:
            return self._rewritten([], context)
        self._trajectory.prompt, self._prompt_length = messages, len(context)
        self._most = self._sampler.engine.context_length
        if self._sampler.limits.max_completion_tokens is not None:
            self._most = min(self._most, len(context) + self._sampler.limits.max_completion_tokens)
        return Context(context)

    def _full(self, reason: StopReason, length: str, used: str = "") -> ConversationEnded:
        """The end of a conversation whose context would have `length` tokens, of which `used` are not the prompt's."""
        # agents know a full context by OpenAI's or Anthropic's own words for it; what they do not know they try again
        if reason is StopReason.CONTEXT_FULL:
            most, has = f"{self.context_length} tokens", f"the messages have {length}, which leaves no room for a turn"
        else:
            given = self._sampler.limits.max_completion_tokens
            most = (
                f"{self._most} tokens: `max_completion_length` gives the whole conversation {given} after its prompt"
            )
            has = f"with these messages it has {used}"
        self.no_room = f"This model's maximum context length is {most}, and {has}: the prompt is too long."
        return ConversationEnded(reason, self.no_room)

    def _rewritten(self, added: list[int], whole: list[int]) -> Context:
        self.rewrote, self._cause = True, _REWRITTEN
        return Context(added, whole)

    async def _continue(
        self, messages: list[Message], stop: tuple[str, ...], max_tokens: int | None, protocol: CallProtocol | None
    ) -> Turn:
        """Continues the last assistant message, without the tokens that ended it."""
        check_messages(messages)
        *before, last = messages
        if not before or last["role"] != "assistant":
            raise ValueError("`continue_last` needs an assistant's message behind others: it is what is continued.")
        words = last.get("content") or ""
        written = self._transcript.begun_text(before)
        if written is not None and words.startswith(written):
            added, path = words[len(written) :], self._trajectory.tree.path()
            if path[-1] in (*self.renderer.end_ids, self.renderer.tokenizer.eos_token_id):
                path = path[:-1]
            self._past = None, []
            if added:
                self._trajectory.turns[-1].replies = [{**last, "content": added}]
            suffix = await self._encoded({**last, "content": added})
            context = self._rewritten(suffix, path + suffix)
        else:
            begun = await self._begun(before)
            self._past = self._past[0], [*self._past[1], last]
            context = self._rewritten([], (begun.whole or begun.added) + await self._encoded(last))
        turn = await self._take(context, stop, max_tokens, protocol)
        self._transcript.add(before, 0, turn, {**turn.message, "content": words + turn.text})
        if self._sampler.history != "keep":
            self._history = None  # it does not know of the part that was added
        return turn

    async def _encoded(self, message: Message) -> list[int]:
        renderer = self.renderer
        return await self._aside(
            [message], lambda: renderer.encode(renderer.special_tokens.escape(message)["content"] or "")
        )

    # Taking a turn

    async def _take(
        self, context: Context, stop: tuple[str, ...], max_tokens: int | None, protocol: CallProtocol | None
    ) -> Turn:
        trajectory = self._trajectory
        index = len(trajectory.turns)
        if context.whole is None:
            added = len(context.added)
            self._context += context.added
        else:
            added = common_prefix(context.added[::-1], context.whole[::-1], 0)
            self._context = list(context.whole)  # a group shares the ids of its prompt
        length = len(self._context)
        used = length - self._prompt_length
        if self.rewrote:
            used = max(used, trajectory.tree.num_tokens - self._prompt_length)
        budget, exhausted = self._sampler.budget(length, used, max_tokens)
        if budget < 1:
            raise self._full(exhausted, str(length), str(used))
        start, asked = time.perf_counter(), time.time()
        drawing = replace(
            self.sampling,
            max_tokens=budget,
            stop=stop,
            stop_token_ids=self.renderer.end_ids,  # a base model may not know them as ends of its own
            seed=derive_seed(self._seed, index),
            routes_from=trajectory.tree.routed if context.whole is None else 0,
        )
        if self._sampler.media is not None:
            ids = {token for token in (context.added if context.whole is None else self._context) if token < 0}
            trajectory.media |= {number: self._sampler.media[number] for number in ids - trajectory.media.keys()}
        if self.again is not None and index < self.again.turns:
            sample = self.again.take(index, self._context, self.tokenizer)
        else:
            sample = await self._sample(self._context, drawing)
        if self.ended is not None:  # while it was sampled: the trajectory is no longer this conversation's to change
            raise ConversationEnded(self.ended)
        if context.whole is None:
            trajectory.tree.extend(context.added, sample.ids, sample.logprobs, sample.routes)
        else:
            trajectory.tree.add_turn(context.whole, sample.ids, sample.logprobs, sample.routes)
        self._context += sample.ids
        self._action = sample.ids
        self.sampled = sample.ids, sample.logprobs
        turn = Turn(
            index,
            {"role": "assistant", "content": self.renderer.text(sample.ids)},
            finish_reason=sample.finish_reason,
            num_tokens=len(sample.ids),
            context_length=length,
            observation_length=added if index else 0,
            fork_cause=None if context.whole is None else self._cause,
            seconds=time.perf_counter() - start,
            weight_version=sample.weight_version,
            last_weight_version=sample.last_weight_version,
            start=asked,
            follows=self._past[0],
            given=self._past[1],
        )
        if not index:
            trajectory.tools = self.renderer.tools
        elif self.renderer is not self._renderers[0]:
            turn.tools = self.renderer.tools or []
        self._cause = self._sampler.history
        trajectory.turns.append(turn)
        self._renderers.append(self.renderer)
        self.exhausted = exhausted if sample.finish_reason == "length" else None
        if protocol is not None and self.exhausted is None:
            self._read(turn, protocol)
        return turn

    async def _sample(self, context: list[int], drawing: SamplingParams) -> Sample:
        try:
            return await self._ask(context, drawing)
        except (EngineError, ConversationEnded):
            raise
        except Exception as error:
            self.failure = error
            raise
        finally:
            self._last = time.perf_counter()

    async def _ask(self, context: list[int], drawing: SamplingParams) -> Sample:
        engine, media = self._sampler.engine, self._trajectory.media
        if media and isinstance(engine, MediaEngine):
            inputs = {number: each.inputs for number, each in media.items()}
            return await engine.generate_with_media(context, inputs, drawing, self.session)
        return await engine.generate(context, drawing, self.session)

    def _read(self, turn: Turn, protocol: CallProtocol) -> None:
        """Reads calls, answer and errors from a turn's text into the turn."""
        # the assistant's header is in there, and with it the `<think>` that some templates open themselves
        size = _HEADER_TOKENS
        if turn.index and turn.fork_cause != _REWRITTEN:  # not the turn before: it would be read as this one's
            size = min(size, turn.observation_length)
        tail = self._trajectory.tree.tail(turn.num_tokens + size)
        header = [token for token in tail[: len(tail) - turn.num_tokens] if token >= 0]
        renderer = self.renderer
        if isinstance(protocol, NativeProtocol):
            end = renderer.end_of(self._action)
            parsed = protocol.parse(turn.text, renderer.tokenizer, header, renderer.tools, end)
        else:
            parsed = protocol.parse(turn.text, renderer.tokenizer, header)
        turn.message, turn.tool_calls, turn.error = parsed.message, parsed.calls, parsed.error
        turn.answer = parsed.answer


def _size(message: Message) -> int:
    """Approximate characters of a message; a medium counts as long text."""
    shown = (
        sum(kind_of_part(part) > 0 for part in message["content"]) if isinstance(message.get("content"), list) else 0
    )
    return shown * LONG + sum(len(value) if isinstance(value, str) else len(str(value)) for value in message.values())
