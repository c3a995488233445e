"""Which of several servers a conversation gets, and what it waits for."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
from support.waiting import until_true

from mt_grpo.concurrency import OutOfTime, call
from mt_grpo.servers import env_servers
from mt_grpo.servers.env_servers import (
    MAX_STARTING,
    EnvServerPool,
    Full,
    ServerLost,
    Unreachable,
    backoff,
    conversation,
    current_conversation,
    in_words,
)

URLS = ["http://a:1", "http://b:1", "http://c:1"]


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
        monkeypatch.setattr(env_servers, name, seconds)


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when a test says so."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(env_servers, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def pool():
    return EnvServerPool(URLS, "test server")


def begin(pool, servers, number):
    """The servers of so many conversations that begin together, or what they failed with."""

    async def all_of_them():
        return await asyncio.gather(*(pool.begin(servers.start) for _ in range(number)), return_exceptions=True)

    return [each if isinstance(each, Exception) else each[0] for each in asyncio.run(all_of_them())]


def test_conversations_are_spread_evenly(pool):
    servers = Servers()
    assert Counter(begin(pool, servers, 9)) == dict.fromkeys(URLS, 3)
    servers.end(pool, URLS[1])
    assert begin(pool, servers, 1) == [URLS[1]]


def test_ties_are_broken_by_chance_since_others_have_the_servers():
    firsts = {begin(EnvServerPool(URLS, "test server"), Servers(), 1)[0] for _ in range(60)}
    assert firsts == set(URLS)


def test_few_begin_on_a_server_at_once():
    servers = Servers()
    begin(EnvServerPool(URLS[:1], "test server"), servers, 4 * MAX_STARTING)
    assert servers.open[URLS[0]] == 4 * MAX_STARTING and servers.most <= MAX_STARTING


def test_a_dead_server_is_passed_over_and_rests(pool, caplog):
    servers = Servers(dead=(URLS[0],))
    assert URLS[0] not in begin(pool, servers, 6)
    asked = servers.asked[URLS[0]]
    assert URLS[0] not in begin(pool, servers, 6) and servers.asked[URLS[0]] == asked
    assert [record.message for record in caplog.records] == [
        f"The test server at {URLS[0]} is passed over for 30 s: it is off."
    ]


def test_a_server_that_is_back_is_taken_again(pool, clock, caplog):
    servers = Servers(dead=(URLS[0],))
    begin(pool, servers, 6)
    servers.dead.clear()
    clock.now += 31.0
    assert URLS[0] in begin(pool, servers, 2)
    assert caplog.records[-1].message == f"The test server at {URLS[0]} is back."


def test_one_conversation_at_a_time_asks_whether_it_is_back(pool, clock, caplog):
    servers = Servers(dead=(URLS[0],))
    begin(pool, servers, 6)
    asked = servers.asked[URLS[0]]
    clock.now += 31.0
    begin(pool, servers, 9)
    assert servers.asked[URLS[0]] == asked + 1
    assert len(caplog.records) == 1  # it is said once, not every 30 seconds


def test_no_server_left_fails_after_some_attempts(pool, quick):
    servers = Servers(dead=tuple(URLS))
    (failure,) = begin(pool, servers, 1)
    assert isinstance(failure, ServerLost) and str(failure) == "No test server can be reached (it is off)."
    assert min(servers.asked[url] for url in URLS) > 1


def test_a_server_that_comes_up_meanwhile_is_found(quick, monkeypatch):
    monkeypatch.setattr(env_servers, "START_TIMEOUT", 60.0)
    servers = Servers(dead=(URLS[0],))
    alone = EnvServerPool(URLS[:1], "test server")

    async def start(url):
        if servers.asked[url] == 3:
            servers.dead.clear()
        return await servers.start(url)

    assert asyncio.run(alone.begin(start))[0] == URLS[0]


def test_conversations_wait_while_all_servers_are_full(pool, quick, caplog):
    servers = Servers(room=2)

    async def play():
        async def one():
            url, _ = await pool.begin(servers.start)
            assert max(servers.open.values()) <= 2
            for _ in range(5):
                await asyncio.sleep(0)
            servers.end(pool, url)

        await asyncio.gather(*(one() for _ in range(40)))

    asyncio.run(play())
    assert not +servers.open
    said = [record.message for record in caplog.records]
    assert len(said) <= 3 and all("is full: conversations wait for room." in message for message in said)


def test_a_full_server_is_not_asked_by_everybody(monkeypatch):
    monkeypatch.setattr(env_servers, "FULL_TIMEOUT", 0.0)
    servers = Servers(room=0)
    alone = EnvServerPool(URLS[:1], "test server")
    failures = begin(alone, servers, 10 * MAX_STARTING)
    assert {str(each) for each in failures} == {"No test server had room for a conversation for 0 s."}
    assert servers.asked[URLS[0]] <= MAX_STARTING + 3


def test_more_room_on_a_server_is_found(quick):
    servers, alone = Servers(room=1), EnvServerPool(URLS[:1], "test server")

    async def play():
        await alone.begin(servers.start)
        waiting = [asyncio.ensure_future(alone.begin(servers.start)) for _ in range(8)]
        await until_true(lambda: servers.asked[URLS[0]] > 3)
        servers.room = 9
        await asyncio.gather(*waiting)

    asyncio.run(play())
    assert servers.open[URLS[0]] == 9


def test_a_server_that_fails_fast_does_not_get_everybody(pool):
    servers = Servers()

    async def start(url):
        if url == URLS[0]:
            raise ValueError("broken")
        return await servers.start(url)

    async def one_after_another():
        return await asyncio.gather(*[pool.begin(start)], return_exceptions=True)

    failed = [one for _ in range(12) for one in asyncio.run(one_after_another()) if isinstance(one, ValueError)]
    assert len(failed) <= 1


@pytest.mark.parametrize("where", ["starts", "waits"])
def test_a_cancelled_conversation_leaves_its_place(quick, where):
    servers, alone = Servers(room=1), EnvServerPool(URLS[:1], "test server")

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
    assert servers.open[URLS[0]] == 1


def test_a_lost_server_is_named_once(pool, caplog):
    caplog.set_level(logging.WARNING)
    begin(pool, Servers(), 6)
    pool.give(URLS[0], "it ended")
    pool.give(URLS[0], "it ended")
    assert [record.message for record in caplog.records] == [
        f"The test server at {URLS[0]} is passed over for 30 s: it ended."
    ]


def test_pauses_are_drawn_below_a_bound_that_doubles():
    for attempt in range(40):
        bound = min(env_servers.MAX_BACKOFF, env_servers.MIN_BACKOFF * 2**attempt)
        drawn = [backoff(attempt) for _ in range(200)]
        assert 0 <= min(drawn) < bound / 4 and bound * 3 / 4 < max(drawn) <= bound


def test_many_faults_are_counted():
    assert in_words({"a": "off", "b": "off", "c": "off"}) == "a: off; b: off; c: off"
    assert in_words(dict.fromkeys("abcde", "off")) == "a: off; b: off; c: off; and 2 more"


def test_what_a_conversation_holds_is_given_back_at_its_end():
    ended = []

    async def hold(name):
        with conversation():
            mine = current_conversation()
            mine.at_end.callback(ended.append, name)
            assert await asyncio.create_task(ask()) is mine
        assert current_conversation() is None

    async def ask():
        return current_conversation()

    async def both():
        await asyncio.gather(hold("a"), hold("b"))

    asyncio.run(both())
    assert sorted(ended) == ["a", "b"]


def test_the_wait_for_room_is_no_time_of_the_call_that_waits(quick):
    """Another call is out of time meanwhile, though it may take longer."""
    pool, servers = EnvServerPool(URLS[:1], "test server"), Servers(room=1)

    async def play() -> str:
        url, _ = await pool.begin(servers.start)
        begins = partial(pool.begin, servers.start)
        waits = asyncio.ensure_future(call(begins, what="begins", timeout=0.3))
        with pytest.raises(OutOfTime):
            await call(asyncio.Event().wait, what="hangs", timeout=0.6)
        assert not waits.done()
        servers.end(pool, url)
        return (await waits)[0]

    assert asyncio.run(play()) == URLS[0]
