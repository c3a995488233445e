"""Servers of one OpenEnv environment: what ends a conversation, what is tried again, and `environment_urls`."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from support.conversations import play
from support.waiting import until_true

from mt_grpo.envs.source import close_environments, source_of
from mt_grpo.errors import ConfigError
from mt_grpo.integrations.openenv import openenv_server
from mt_grpo.servers import external
from mt_grpo.servers.external import ServerLost
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training.environment import build_env, check_env
from mt_grpo.trajectory import StopReason

URLS = ["http://a:1", "http://b:1", "http://c:1"]


class Host:
    """Scripted servers by address, in the place of OpenEnv's client."""

    def __init__(self) -> None:
        self.open, self.faults, self.asked, self.reconnects = Counter(), {}, [], False
        self.room, self.closing = float("inf"), None

    def client(self, base_url):
        client = SimpleNamespace(_ws=object())

        async def reset(seed):
            self.asked.append(base_url)
            if base_url in self.faults:
                raise self.faults[base_url]
            if self.open[base_url] >= self.room:
                raise RuntimeError("Server error: full (code: CAPACITY_REACHED)")
            self.open[base_url] += 1
            return SimpleNamespace(observation=base_url, reward=None, done=False)

        async def step(action):
            if base_url in self.faults:
                raise self.faults[base_url]
            if self.reconnects:
                client._ws = object()
            return SimpleNamespace(observation=base_url, reward=1.0, done=action == "bye")

        async def close():
            self.open[base_url] -= base_url not in self.faults
            if self.closing is not None:
                raise self.closing

        client.reset, client.step, client.close = reset, step, close
        return client

    def env(self, url=URLS[0], **options):
        return openenv_server(url, **{"action": str, "client": self.client, **options})


@pytest.fixture
def host():
    return Host()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in (("MIN_BACKOFF", 0.001), ("MAX_BACKOFF", 0.01), ("POLL", 0.001)):
        monkeypatch.setattr(external, name, seconds)


def begin(env, number):
    """Games of so many conversations, and what their reset showed or raised."""
    games = [env.make() for _ in range(number)]

    async def go():
        return await asyncio.gather(*(game.reset(seed=0) for game in games), return_exceptions=True)

    return games, asyncio.run(go())


def test_the_model_is_not_blamed_for_what_observe_raises(host):
    def observe(seen):
        raise KeyError("echo") if observe.begun else None

    observe.begun = False
    [game], _ = begin(host.env(observe=observe), 1)
    observe.begun = True
    with pytest.raises(RuntimeError, match="`observe` raised KeyError: 'echo'"):
        asyncio.run(game.step("go"))


def test_conversations_are_spread_and_make_room_once(host):
    env = host.env(URLS)
    games, seen = begin(env, 9)
    assert [seen.count(url) for url in URLS] == [3, 3, 3]

    async def end():
        for _ in range(2):  # a second close changes nothing
            await games[seen.index(URLS[1])].close()

    asyncio.run(end())
    assert host.open == {URLS[0]: 3, URLS[1]: 2, URLS[2]: 3}
    assert begin(env, 1)[1] == [URLS[1]] and set(host.open.values()) == {3}


REFUSED = ConnectionRefusedError("off")
OF_THE_SERVER = RuntimeError("Server error: no licence (code: FACTORY_ERROR)")
OF_THE_GAME = RuntimeError("Server error: no such level (code: EXECUTION_ERROR)")


@pytest.mark.parametrize("fault", [REFUSED, OF_THE_SERVER], ids=["refused", "cannot make one"])
def test_a_server_that_begins_nothing_is_passed_over(host, fault):
    host.faults[URLS[0]] = fault
    env = host.env(URLS[:2])
    assert begin(env, 4)[1] == [URLS[1]] * 4
    host.asked.clear()
    begin(env, 4)
    assert URLS[0] not in host.asked  # it rests


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (REFUSED, "No OpenEnv server can be reached (ConnectionRefusedError: off)."),
        (OF_THE_GAME, "no such level"),
    ],
    ids=["no server is left", "a fault of its own"],
)
def test_a_reset_that_fails_everywhere_fails_the_conversation(host, fault, told):
    host.faults = dict.fromkeys(URLS, fault)
    _, (failure,) = begin(host.env(URLS, step_timeout=0.05), 1)
    assert told in str(failure)
    assert set(host.asked) == set(URLS) if fault is REFUSED else len(host.asked) == 1


def test_a_full_server_makes_conversations_wait(host):
    host.faults[URLS[0]] = RuntimeError("Server error: 1/1 (code: CAPACITY_REACHED)")
    game = host.env(step_timeout=0.001).make()

    async def begin_late():
        begun = asyncio.ensure_future(game.reset(seed=0))
        await until_true(lambda: len(host.asked) >= 3)
        assert not begun.done()  # the wait counts toward no timeout
        host.faults.clear()
        return await begun

    assert asyncio.run(begin_late()) == URLS[0]


def test_a_batch_of_more_than_there_is_room_for_ends(host):
    host.room = 1  # a trainer keeps environments for its rewards until the whole batch is finished
    done, _ = play(host.env(), ["hello", "bye"], [{}] * 4, keep=True)
    assert not +host.open and {each.stop_reason for each in done} == {StopReason.ENV_DONE}
    asyncio.run(close_environments(done))


def test_a_connection_that_cannot_be_closed_is_no_failure(host):
    host.closing = ConnectionResetError("gone")
    [done], _ = play(host.env(), ["hello", "bye"])
    assert done.stop_reason is StopReason.ENV_DONE and done.env_rewards == {"return": 2.0}


@pytest.mark.parametrize("how", ["dies", "begins again"])
def test_a_lost_server_ends_the_conversation(host, how):
    (game,), _ = begin(host.env(), 1)
    host.reconnects = how == "begins again"  # a client connects again by itself, to an environment without a reset
    host.faults = {URLS[0]: ConnectionResetError("gone")} if how == "dies" else {}
    why = "ConnectionResetError: gone" if how == "dies" else "it closed the connection"

    async def go_on():
        with pytest.raises(ServerLost) as lost:
            await game.step("go")
        await game.close()
        return str(lost.value)

    assert asyncio.run(go_on()) == f"The OpenEnv server at http://a:1, which this conversation used, is gone: {why}."


def test_a_reset_that_hangs_ends_in_time():
    client = SimpleNamespace(_ws=None, reset=lambda seed: asyncio.Event().wait(), close=AsyncMock())
    game = openenv_server(URLS[0], action=str, client=lambda base_url: client, step_timeout=0.01).make()
    with pytest.raises(TimeoutError, match=r"`reset` of the OpenEnv server at http://a:1 took longer than 0.01 s"):
        asyncio.run(game.reset(seed=0))


def test_no_address_is_refused(host):
    with pytest.raises(ConfigError, match="`url` gives `openenv_server` no address"):
        host.env([])
    with pytest.raises(ConfigError, match="has no address: set `environment_urls`, as `http://HOST:PORT`"):
        begin(host.env(None), 1)
    with pytest.raises(ConfigError, match="has no address"):
        asyncio.run(host.env(None).check())


# `environment_urls`


GAMES = """
from mt_grpo.integrations.openenv import openenv_server
echo = openenv_server('http://a:1', action=str, client=dict)
bare = openenv_server(action=str, client=dict)
"""


def config(tmp_path, **options):
    (tmp_path / "games.py").write_text(GAMES)
    return MTGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **options)


def test_the_option_gives_the_servers_of_the_environment(tmp_path):
    echo = f"{tmp_path}/games.py:echo"
    assert build_env(config(tmp_path, env=echo)).pool.urls == ["http://a:1"]
    named = build_env(config(tmp_path, env=echo, environment_urls=["http://node[1-2]:8000"]))
    assert named.pool.urls == ["http://node1:8000", "http://node2:8000"]
    one = {"env": f"{tmp_path}/games.py:bare", "environment_urls": "http://b:1"}
    several = {"one": one, "other": echo, "sums": {"tools": ["calculator"]}}
    built = build_env(config(tmp_path, environments=several, environment_urls=["http://c:1"]))
    assert built["one"].pool.urls == ["http://b:1"] and built["other"].pool.urls == ["http://c:1"]


def test_it_holds_for_an_environment_made_in_python(tmp_path, host):
    env, args = host.env(None, max_turns=3), config(tmp_path, environment_urls=["http://b:1"])
    given = check_env(env, args)
    assert given.pool.urls == ["http://b:1"] and given.max_turns == 3 and not env.pool.urls
    assert check_env(source_of(given), args) is given  # the commands give the trainer what they made of the options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": ["calculator"]}, "`environment_urls` names OpenEnv servers, and `env` is no environment that"),
        ({"environments": {"sums": {"tools": ["calculator"]}}}, "and `environments` is no environment that"),
        ({"env": "games.py:echo", "environment_urls": ["http://a:1/", "http://a:1"]}, "names http://a:1 twice"),
        ({"env": "games.py:echo", "environment_urls": ["node1:8000"]}, "`environment_urls: node1:8000` is no address"),
        ({"env": "games.py:echo", "environment_urls": []}, "`environment_urls` gives `openenv_server` no address"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused(tmp_path, options, message):
    if "env" in options:
        options = options | {"env": f"{tmp_path}/{options['env']}"}
    with pytest.raises(ConfigError, match=message):
        build_env(config(tmp_path, **{"environment_urls": ["http://a:1"], **options}))
