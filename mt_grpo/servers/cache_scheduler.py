"""
Schedules turns when a server's KV cache cannot hold all conversations. Without an order, each turn pushes the prefix
of another conversation out of the cache, which is computed again at its next turn.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from mt_grpo.servers.http import RequestFailed, ServerSetupError

_FULL = 0.97  # share of the cache that is given away
_AHEAD = 0.6  # turns for which every conversation must have room to grow before another one is let in
_UNKNOWN_PAUSE = 10.0
"""Seconds for which a prefix is kept as long as a server does not say what it costs to compute it."""
_TOLD = 5  # looks after which it is known what a token takes
_SAMPLES = 200  # that a mean remembers
LOOK = 0.5
"""Seconds between two looks at the cache."""
_CAUTION = 1.45
"""How much more others may hold than is told of them, before this process takes more than its even share."""
_REST = 5.0  # seconds from one cut of the share that is given away to the next
_LOOKS = 10  # that the means of what others hold remember
_SLOWLY, _RECENT = 0.05, 0.98  # weights: of a look in what is busy, and of sums before it
_UNKNOWN = 200.0  # tokens of an action, and of an observation, before any was seen
_LESS, _MORE, _LEAST = 0.9, 1.01, 0.02  # the share given away: after preemptions, after any other look, at least

_VALUE = re.compile(r"^(vllm:\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'\b(num_gpu_blocks|block_size|kv_cache_size_tokens)="(\d+)"')


@dataclass(frozen=True)
class Pressure:
    """What a server says of its cache."""

    capacity: float
    usage: float
    running: float = 0.0
    waiting: float = 0.0
    preemptions: float = 0.0
    prefill_seconds: float = 0.0
    prefilled: float = 0.0

    @classmethod
    def read(cls, metrics: str) -> Pressure | None:
        """What the text of `/metrics` says of all engines of a server; `None` where it does not tell."""
        sums: dict[str, float] = {}
        engines, capacity = 0, 0.0
        for name, labels, value in _VALUE.findall(metrics):
            sums[name] = sums.get(name, 0.0) + float(value)
            if name == "vllm:cache_config_info":
                sizes = {key: int(number) for key, number in _LABEL.findall(labels)}
                blocks = sizes.get("num_gpu_blocks", 0) * sizes.get("block_size", 0)
                capacity += sizes.get("kv_cache_size_tokens", blocks)  # fewer where layers differ in what they keep
            engines += name == "vllm:kv_cache_usage_perc"
        if not engines or not capacity:
            return None
        return cls(
            capacity,
            sums["vllm:kv_cache_usage_perc"] / engines,
            sums.get("vllm:num_requests_running", 0.0),
            sums.get("vllm:num_requests_waiting", 0.0),
            sums.get("vllm:num_preemptions_total", 0.0),
            sums.get("vllm:request_prefill_time_seconds_sum", 0.0),
            sums.get("vllm:prefix_cache_queries_total", 0.0) - sums.get("vllm:prefix_cache_hits_total", 0.0),
        )


@dataclass
class _Mean:
    """The mean of the latest values."""

    value: float = 0.0
    number: int = 0
    most: int = _SAMPLES

    def add(self, value: float) -> None:
        """Takes one more value in."""
        self.number = min(self.number + 1, self.most)
        self.value += (value - self.value) / self.number


@dataclass(eq=False)
class _CachedConversation:
    """A conversation as a cache sees it."""

    rank: int
    tokens: int = 0
    running: int = 0
    asking: int = 0
    placed: bool = False
    since: float = 0.0
    turns: int = 0


class CacheScheduler:
    """
    Decides which conversations of one server have their next turn: as many as fit into its cache after they have grown
    for `_AHEAD` turns. If they grow beyond it, the youngest wait. Where tools take longer than computing a prefix
    again, all turns begin. The cache that tokens take is measured by the server's usage. Of processes that share it,
    each takes as much as fits if all others take the same, or what they are seen to take.
    """

    def __init__(self, processes: int = 1) -> None:
        self._processes = processes
        self.capacity = float("inf")
        self.conversations: dict[str, _CachedConversation] = {}
        self._asking: dict[str, _CachedConversation] = {}
        self._tokens = self._ranks = self._running = 0
        self._action, self._observation = _Mean(_UNKNOWN, 5), _Mean(_UNKNOWN, 5)
        self._pause, self._told, self._used = _Mean(), _Mean(), _Mean()
        self._seen: Pressure | None = None
        self._away = self._busy = self._told_at = 0.0
        self._computed = self._computing = 0.0
        self._share, self._cut = 1.0, -_REST
        self._held, self._held_running = _Mean(), _Mean()
        self._others, self._size = _Mean(most=_LOOKS), _Mean(most=_LOOKS)

    def ask(self, session: str, tokens: int, now: float) -> None:
        """Notes that a conversation wants a turn after a context of so many tokens."""
        conversation = self.conversations.get(session)
        if not self.conversations:  # what others hold may have changed since
            self._others, self._size = _Mean(most=_LOOKS), _Mean(most=_LOOKS)
        if conversation is None:
            conversation = self.conversations[session] = _CachedConversation(self._next_rank())
        elif conversation.turns and not (conversation.running or conversation.asking):
            self._observation.add(max(0, tokens - conversation.tokens))
            self._pause.add(now - conversation.since)
            if conversation.placed and not self._keeps(conversation, now):
                conversation.placed, conversation.rank = False, self._next_rank()
        self._grow(conversation, max(tokens, conversation.tokens) if conversation.running else tokens)
        conversation.asking += 1
        self._asking[session] = conversation

    def admit(self, now: float, all_of_them: bool = False) -> list[str]:
        """The conversations whose turns begin: by what fits, or `all_of_them` that wait."""
        if not self._asking:
            return []
        action, ahead, number = self._action.value, self._ahead, len(self.conversations)
        fits = self._fits(self._tokens + number * (action + ahead), number)
        if all_of_them or fits or self._away > self._longest_pause():
            return [self._let_in(session) for session in list(self._asking)]
        begin = list[str]()
        shared = self._processes > 1  # others may run where none of ours does
        placed = {one for one in self.conversations.values() if self._holds(one, now)}
        total = sum(one.tokens + action for one in placed)

        def take(conversation: _CachedConversation) -> None:
            nonlocal total
            conversation.placed = False
            placed.discard(conversation)
            total -= conversation.tokens + action

        those = sorted(self._asking.items(), key=lambda one: one[1].rank)
        for session, conversation in those:
            if conversation not in placed:
                continue
            younger = sorted((one for one in placed if one.rank > conversation.rank), key=lambda one: -one.rank)
            for one in younger:
                if not (self._fits(total, len(placed)) or one.running):
                    take(one)
            if (
                not younger
                and not conversation.running
                and (self._running or shared and len(placed) > 1)
                and not self._fits(total, len(placed))
            ):
                take(conversation)
            else:
                begin.append(self._let_in(session))
        for session, conversation in those:
            if conversation in placed or not conversation.asking:
                continue
            need, number = conversation.tokens + action, len(placed) + 1
            if (self._running or shared and placed) and not self._fits(total + need + ahead * number, number):
                break
            placed.add(conversation)
            total += need
            begin.append(self._let_in(session))
        return begin

    def end(self, session: str, tokens: int, now: float) -> None:
        """Notes that a turn is over; `tokens` were sampled, 0 if it failed."""
        conversation = self.conversations.get(session)
        if conversation is None or not conversation.running:  # the conversation was over before it
            return
        conversation.running -= 1
        self._running -= not conversation.running
        conversation.since = now
        if tokens:
            conversation.turns += 1
            self._grow(conversation, conversation.tokens + tokens)
            self._action.add(tokens)

    def withdraw(self, session: str) -> None:
        """Notes that a turn which waits is not wanted any more."""
        conversation = self._asking.get(session)
        if conversation is not None:
            conversation.asking -= 1
            if not conversation.asking:
                del self._asking[session]

    def leave(self, session: str) -> None:
        """Notes that a conversation is over."""
        conversation = self.conversations.pop(session, None)
        self._asking.pop(session, None)
        if conversation is not None:
            self._running -= conversation.running > 0
            self._tokens -= conversation.tokens

    def forget(self) -> None:
        """Forgets all conversations, and keeps what was learned from them."""
        for session in list(self.conversations):
            self.leave(session)

    def observe(self, pressure: Pressure, now: float) -> None:
        """Takes in what the server says of its cache."""
        self.capacity = pressure.capacity
        before = self._seen
        if before is None or pressure.prefilled < before.prefilled:  # it was restarted
            before = pressure
        self._seen = pressure
        self._computed = _RECENT * self._computed + pressure.prefilled - before.prefilled
        spent = pressure.prefill_seconds - before.prefill_seconds
        self._computing = _RECENT * self._computing + min(spent, now - self._told_at)
        if spent:  # requests that are computed together each count the whole time; one may take several looks
            self._told_at = now
        self._busy += (pressure.usage * pressure.capacity - self._busy) * _SLOWLY
        pausing = [one for one in self.conversations.values() if one.turns and not (one.running or one.asking)]
        away = [now - one.since for one in pausing]
        self._away = (self._pause.value * self._pause.number + sum(away)) / (self._pause.number + 1)
        if pressure.preemptions > before.preemptions and now >= self._cut + _REST:
            self._share, self._cut = max(_LEAST, self._share * _LESS), now
        else:
            self._share = min(1.0, self._share * _MORE)
        # a server that is in a long step says what was before
        if self._running and pressure.running and pressure.usage:
            tokens = sum(
                conversation.tokens + self._action.value / 2
                for conversation in self.conversations.values()
                if conversation.running
            )
            self._told.add(tokens / self._running)
            self._used.add(pressure.usage * pressure.capacity / pressure.running)
        holding = [one for one in self.conversations.values() if self._holds(one, now)]
        if holding:
            self._held.add(len(holding))
            self._held_running.add(sum(one.running > 0 for one in holding))
        if pressure.running:
            self._size.add(pressure.usage * pressure.capacity / pressure.running)
        others = max(0.0, pressure.running + pressure.waiting - sum(one.running for one in holding))
        self._others.add(others * self._held.value / self._held_running.value if self._held_running.value else others)

    def _fits(self, tokens: float, number: int) -> bool:
        """Whether tokens of so many conversations fit beside others: each takes as much, or what is seen of them."""
        tokens *= self._per_token
        each = self._size.value + self._action.value / 2 if self._size.number else tokens / number
        others = (self._processes - 1) * (number * each + tokens) / 2
        if self._others.number:
            others = min(others, _CAUTION * self._others.value * each)
        return tokens + others <= self._whole

    @property
    def _whole(self) -> float:
        """The tokens that may hold room: more than fit where tools take so long that their prefixes are worth less."""
        held, running, longest = self._held.value, self._held_running.value, self._longest_pause()
        worth = max(0.0, 1 - self._away / longest) if longest else 0.0
        weighed = running + (held - running) * worth
        return _FULL * self._share * self.capacity * (held / weighed if weighed else 1.0)

    @property
    def _per_token(self) -> float:
        """What a token of a context takes of the cache."""
        return self._used.value / self._told.value if self._told.number >= _TOLD else 1.0

    def _next_rank(self) -> int:
        self._ranks += 1
        return self._ranks

    def _let_in(self, session: str) -> str:
        conversation = self._asking.pop(session)
        self._running += not conversation.running
        conversation.running += conversation.asking
        conversation.asking, conversation.placed = 0, True
        return session

    def _grow(self, conversation: _CachedConversation, tokens: int) -> None:
        self._tokens += tokens - conversation.tokens
        conversation.tokens = tokens

    @property
    def _ahead(self) -> float:
        """Tokens by which a conversation may grow before another one is let in."""
        return _AHEAD * (self._action.value + self._observation.value)

    def _holds(self, conversation: _CachedConversation, now: float) -> bool:
        """Whether a conversation has a place."""
        return conversation.running > 0 or (conversation.placed and self._keeps(conversation, now))

    def _keeps(self, conversation: _CachedConversation, now: float) -> bool:
        """Whether a conversation between two turns still has its place. One that asks for its turn has it."""
        return conversation.asking > 0 or max(self._away, now - conversation.since) < self._longest_pause()

    def _longest_pause(self) -> float:
        """Seconds for which it pays to keep so many tokens in the cache: to compute them holds up all others."""
        if self._computed < 1:
            return _UNKNOWN_PAUSE
        return self._busy * self._computing / self._computed


@dataclass
class Turn:
    """A turn that may begin. Whoever has it sets `sampled`, the tokens that were sampled."""

    sampled: int = 0


class Gate:
    """Lets turns on a server begin, as `CacheScheduler` decides; at once while it says nothing of its cache."""

    def __init__(
        self, scheduler: CacheScheduler, look: Callable[[], Awaitable[Pressure | None]], up: Callable[[], bool]
    ) -> None:
        self._scheduler, self._look, self._up = scheduler, look, up
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._told = asyncio.Event()
        self._open = False
        self._watch: asyncio.Future[None] | None = None
        self._due = False

    @asynccontextmanager
    async def turn(self, session: str, tokens: int) -> AsyncIterator[Turn]:
        """Waits until a conversation has its turn, after a context of so many tokens, and holds it."""
        if self._watch is None:
            self._watch = asyncio.ensure_future(self._keep_looking())
        await self._told.wait()
        scheduler, turn, begun = self._scheduler, Turn(), self._loop.create_future()
        scheduler.ask(session, tokens, time.monotonic())
        self._waiting.setdefault(session, []).append(begun)
        self._begin_soon()
        try:
            await begun
        except asyncio.CancelledError:
            waiting = self._waiting.get(session, [])
            if begun in waiting:
                waiting.remove(begun)
                scheduler.withdraw(session)
            else:  # it had just begun
                scheduler.end(session, 0, time.monotonic())
            self._begin_soon()
            raise
        try:
            yield turn
        finally:
            scheduler.end(session, turn.sampled, time.monotonic())
            self._begin_soon()

    def leave(self, session: str) -> None:
        """Notes that a conversation is over, or goes on elsewhere."""
        self._scheduler.leave(session)
        self._wake(session)
        self._begin_soon()

    async def close(self) -> None:
        """Stops polling."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    def _begin_soon(self) -> None:
        """Once for all that happens at the same time."""
        if self._waiting and not self._due:
            self._due = True
            self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._due = False
        for session in self._scheduler.admit(time.monotonic(), self._open or not self._up()):
            self._wake(session)

    def _wake(self, session: str) -> None:
        for turn in self._waiting.pop(session, []):
            if not turn.done():
                turn.set_result(None)

    async def _keep_looking(self) -> None:
        """Looks as long as there are conversations."""
        try:
            while True:
                try:
                    pressure = await self._look()
                    if pressure is None:
                        break
                    self._scheduler.observe(pressure, time.monotonic())
                except RequestFailed as error:  # whether the server is down is found out by the requests
                    if error.status is not None and not error.repeat:
                        break
                self._told.set()
                self._begin_soon()
                await asyncio.sleep(LOOK)
                if not self._scheduler.conversations:
                    self._watch = None
                    return
        except ServerSetupError:  # told by the requests
            pass
        finally:
            self._told.set()
        self._open = True
        self._begin_soon()
