"""Which of several servers a conversation gets, and what it waits for."""

import asyncio
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
from support.waiting import until_true

from mt_grpo.concurrency import Conversation, OutOfTime, call
from mt_grpo.servers import external
from mt_grpo.servers.external import (
    MAX_STARTING,
    EnvServerPool,
    Full,
    ServerLost,
    Unreachable,
    backoff,
    in_words,
)

URLS = ["http://a:1", "http://b:1", "http://c:1"]
FIRST = URLS[0]
PASSED_OVER = f"The test server at {FIRST} is passed over for 30 s: "


class Servers:
    """Scripted servers, each with room for so many conversations."""

    def __init__(self, room: float = float("inf"), dead: tuple[str, ...] = ()) -> None:
        self.room, self.dead = room, set(dead)
        self.open, self.asked, self.starting, self.most = Counter(), Counter(), 0, 0

    async def start(self, url: str) -> str:
        self.asked[url] += 1
        if url in self.dead:
            raise Unreachable("it is off")
        self.starting += 1
        self.most = max(self.most, self.starting)
        await asyncio.sleep(0)
        self.starting -= 1
        if self.open[url] >= self.room:
            raise Full
        self.open[url] += 1
        return url

    def end(self, pool: EnvServerPool, url: str) -> None:
        self.open[url] -= 1
        pool.give(url)


@pytest.fixture
def quick(monkeypatch):
    """Waits of milliseconds."""
    for name, seconds in (("MIN_BACKOFF", 0.001), ("MAX_BACKOFF", 0.01), ("POLL", 0.001), ("START_TIMEOUT", 0.05)):
        monkeypatch.setattr(external, name, seconds)


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when a test says so."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(external, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def pool():
    return EnvServerPool(URLS, "test server")


@pytest.fixture
def alone():
    return EnvServerPool(URLS[:1], "test server")


def begin(pool, servers, number):
    """The servers of so many conversations that begin together, or what they failed with."""

    async def all_of_them():
        return await asyncio.gather(*(pool.begin(servers.start) for _ in range(number)), return_exceptions=True)

    return [each if isinstance(each, Exception) else each[0] for each in asyncio.run(all_of_them())]


def test_ties_are_broken_by_chance_since_others_have_the_servers():
    assert {begin(EnvServerPool(URLS, "test server"), Servers(), 1)[0] for _ in range(60)} == set(URLS)


def test_few_begin_on_a_server_at_once(alone):
    servers = Servers()
    begin(alone, servers, 4 * MAX_STARTING)
    assert servers.open[FIRST] == 4 * MAX_STARTING and servers.most <= MAX_STARTING


def test_a_dead_server_is_passed_over_rests_and_is_asked_again(pool, clock, caplog):
    """By one conversation at a time, until it is back; all of it is said once, not every 30 seconds."""
    servers = Servers(dead=(FIRST,))
    assert FIRST not in begin(pool, servers, 6)
    asked = servers.asked[FIRST]
    assert FIRST not in begin(pool, servers, 6) and servers.asked[FIRST] == asked
    clock.now += 31.0
    begin(pool, servers, 9)
    assert servers.asked[FIRST] == asked + 1
    assert caplog.messages == [f"{PASSED_OVER}it is off."]
    servers.dead.clear()
    clock.now += 31.0
    assert FIRST in begin(pool, servers, 2)
    assert caplog.messages[1:] == [f"The test server at {FIRST} is back."]


def test_no_server_left_fails_after_some_attempts(pool, quick):
    servers = Servers(dead=tuple(URLS))
    (failure,) = begin(pool, servers, 1)
    assert isinstance(failure, ServerLost) and str(failure) == "No test server can be reached (it is off)."
    assert min(servers.asked[url] for url in URLS) > 1


def test_a_server_that_comes_up_meanwhile_is_found(alone, quick, monkeypatch):
    monkeypatch.setattr(external, "START_TIMEOUT", 60.0)
    servers = Servers(dead=(FIRST,))

    async def start(url):
        if servers.asked[url] == 3:
            servers.dead.clear()
        return await servers.start(url)

    assert asyncio.run(alone.begin(start))[0] == FIRST


def test_conversations_wait_while_all_servers_are_full(pool, quick, caplog):
    servers = Servers(room=2)

    async def one():
        url, _ = await pool.begin(servers.start)
        assert max(servers.open.values()) <= 2
        for _ in range(5):
            await asyncio.sleep(0)
        servers.end(pool, url)

    async def play():
        await asyncio.gather(*(one() for _ in range(40)))

    asyncio.run(play())
    assert not +servers.open
    assert len(caplog.messages) <= 3
    assert all("is full: conversations wait for room." in message for message in caplog.messages)


def test_a_full_server_is_not_asked_by_everybody(alone, monkeypatch):
    monkeypatch.setattr(external, "FULL_TIMEOUT", 0.0)
    servers = Servers(room=0)
    failures = begin(alone, servers, 10 * MAX_STARTING)
    assert {str(each) for each in failures} == {"No test server had room for a conversation for 0 s."}
    assert servers.asked[FIRST] <= MAX_STARTING + 3


def test_more_room_on_a_server_is_found(alone, quick):
    servers = Servers(room=1)

    async def play():
        await alone.begin(servers.start)
        waiting = [asyncio.ensure_future(alone.begin(servers.start)) for _ in range(8)]
        await until_true(lambda: servers.asked[FIRST] > 3)
        servers.room = 9
        await asyncio.gather(*waiting)

    asyncio.run(play())
    assert servers.open[FIRST] == 9


def test_a_server_that_fails_fast_does_not_get_everybody(pool):
    servers = Servers()

    async def start(url):
        if url == FIRST:
            raise ValueError("broken")
        return await servers.start(url)

    failed = [begin(pool, SimpleNamespace(start=start), 1) for _ in range(12)]
    assert sum(isinstance(one, ValueError) for (one,) in failed) <= 1


@pytest.mark.parametrize("where", ["starts", "waits"])
def test_a_cancelled_conversation_leaves_its_place(alone, quick, where):
    servers = Servers(room=1)

    async def play():
        if where == "waits":
            url, _ = await alone.begin(servers.start)
        task = asyncio.ensure_future(alone.begin(servers.start if where == "waits" else asyncio.Event().wait))
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if where == "waits":
            servers.end(alone, url)
        await alone.begin(servers.start)

    asyncio.run(play())
    assert servers.open[FIRST] == 1


def test_a_lost_server_is_named_once(pool, caplog):
    begin(pool, Servers(), 6)
    pool.give(FIRST, "it ended")
    pool.give(FIRST, "it ended")
    assert caplog.messages == [f"{PASSED_OVER}it ended."]


def test_pauses_are_drawn_below_a_bound_that_doubles():
    for attempt in range(40):
        bound = min(external.MAX_BACKOFF, external.MIN_BACKOFF * 2**attempt)
        drawn = [backoff(attempt) for _ in range(200)]
        assert 0 <= min(drawn) < bound / 4 and bound * 3 / 4 < max(drawn) <= bound


def test_many_faults_are_counted():
    assert in_words({"a": "off", "b": "off", "c": "off"}) == "a: off; b: off; c: off"
    assert in_words(dict.fromkeys("abcde", "off")) == "a: off; b: off; c: off; and 2 more"


def test_what_a_conversation_holds_is_given_back_at_its_end():
    ended = []

    async def ask():
        return Conversation.current()

    async def hold(name):
        with Conversation.begun():
            mine = Conversation.current()
            mine.at_end.callback(ended.append, name)
            assert await asyncio.create_task(ask()) is mine
        assert Conversation.current() is None

    async def both():
        await asyncio.gather(hold("a"), hold("b"))

    asyncio.run(both())
    assert sorted(ended) == ["a", "b"]


def test_the_wait_for_room_is_no_time_of_the_call_that_waits(alone, quick):
    """Another call is out of time meanwhile, though it may take longer."""
    servers = Servers(room=1)

    async def play() -> str:
        url, _ = await alone.begin(servers.start)
        waits = asyncio.ensure_future(call(partial(alone.begin, servers.start), what="begins", timeout=0.3))
        with pytest.raises(OutOfTime):
            await call(asyncio.Event().wait, what="hangs", timeout=0.6)
        assert not waits.done()
        servers.end(alone, url)
        return (await waits)[0]

    assert asyncio.run(play()) == FIRST
