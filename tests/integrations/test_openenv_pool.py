"""Several servers of one OpenEnv environment: who gets a conversation, and what a dead one takes along."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from mt_grpo.errors import ConfigError
from mt_grpo.integrations.openenv import STARTS, openenv_server

URLS = ["http://a:1", "http://b:1", "http://c:1"]


class Host:
    """Scripted servers by address, in the place of OpenEnv's client."""

    def __init__(self) -> None:
        self.open, self.dead, self.asked, self.most, self.starting = dict.fromkeys(URLS, 0), set(), [], 0, 0

    def client(self, base_url):
        async def reset(seed):
            self.asked.append(base_url)
            if base_url in self.dead:
                raise ConnectionRefusedError(base_url)
            self.starting += 1
            self.most = max(self.most, self.starting)
            await asyncio.sleep(0)
            self.starting -= 1
            self.open[base_url] += 1
            return SimpleNamespace(observation=base_url, reward=None, done=False)

        async def close():
            self.open[base_url] -= base_url not in self.dead

        return SimpleNamespace(reset=reset, close=close)


@pytest.fixture
def host():
    return Host()


def begin(host, number, url=URLS, env=None):
    """Environments of so many conversations, after their reset."""
    made = env or openenv_server(url, action=str, client=host.client)
    games = [made.make() for _ in range(number)]

    async def go():
        return await asyncio.gather(*(game.reset(seed=0) for game in games), return_exceptions=True)

    return games, asyncio.run(go())


def test_a_conversation_gets_the_server_with_the_fewest(host):
    games, seen = begin(host, 9)
    assert [seen.count(url) for url in URLS] == [3, 3, 3]
    asyncio.run(games[seen.index(URLS[1])].close())
    assert host.open == {URLS[0]: 3, URLS[1]: 2, URLS[2]: 3}


def test_what_is_over_makes_room_once(host):
    env = openenv_server("http://a:1,http://b:1", action=str, client=host.client)
    games, _ = begin(host, 4, env=env)

    async def end():
        for _ in range(2):  # a second close changes nothing
            await games[0].close()

    asyncio.run(end())
    _, seen = begin(host, 1, env=env)
    assert seen == [URLS[0]] and host.open[URLS[0]] == host.open[URLS[1]] == 2


def test_a_server_that_is_gone_is_passed_over(host):
    host.dead.add(URLS[0])
    env = openenv_server("http://a:1,http://b:1", action=str, client=host.client)
    _, seen = begin(host, 4, env=env)
    assert seen == [URLS[1]] * 4
    host.asked.clear()
    begin(host, 4, env=env)
    assert URLS[0] not in host.asked  # it rests


def test_no_server_left_fails_the_conversation(host):
    host.dead.update(URLS)
    _, (failure,) = begin(host, 1)
    assert isinstance(failure, ConnectionRefusedError) and sorted(host.asked) == URLS


def test_few_environments_begin_on_a_server_at_once(host):
    begin(host, 4 * STARTS, url="http://a:1")
    assert host.open["http://a:1"] == 4 * STARTS and host.most <= STARTS


def test_no_address_is_refused():
    with pytest.raises(ConfigError, match="was given no address"):
        openenv_server([], action=str, client=dict)
