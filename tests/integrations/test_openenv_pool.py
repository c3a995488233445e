"""Servers of one OpenEnv environment: what ends a conversation, what is tried again, and `environment_urls`."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
from support.models import build_tokenizer
from support.waiting import until_true

from mt_grpo.envs.source import close_environments, source_of
from mt_grpo.errors import ConfigError
from mt_grpo.integrations.openenv import openenv_server
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.servers import env_servers
from mt_grpo.servers.env_servers import ServerLost
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training.environment import build_env, check_env
from mt_grpo.trajectory import StopReason

URLS = ["http://a:1", "http://b:1", "http://c:1"]


class Host:
    """Scripted servers by address, in the place of OpenEnv's client."""

    def __init__(self) -> None:
        self.open, self.faults, self.asked, self.reconnects = Counter(), {}, [], False
        self.room = float("inf")

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

        client.reset, client.step, client.close = reset, step, close
        return client


@pytest.fixture
def host():
    return Host()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in (("MIN_BACKOFF", 0.001), ("MAX_BACKOFF", 0.01), ("POLL", 0.001)):
        monkeypatch.setattr(env_servers, name, seconds)


def begin(host, number, url=URLS, env=None, step_timeout=0.05):
    """Games of so many conversations, and what their reset showed or raised."""
    made = env or openenv_server(url, action=str, client=host.client, step_timeout=step_timeout)
    games = [made.make() for _ in range(number)]

    async def go():
        return await asyncio.gather(*(game.reset(seed=0) for game in games), return_exceptions=True)

    return games, asyncio.run(go())


def test_the_model_is_not_blamed_for_what_observe_raises(host):
    def observe(seen):
        raise KeyError("echo") if observe.begun else None

    observe.begun = False
    env = openenv_server(URLS, action=str, observe=observe, client=host.client)
    [game], _ = begin(host, 1, env=env)
    observe.begun = True
    with pytest.raises(RuntimeError, match="`observe` raised KeyError: 'echo'"):
        asyncio.run(game.step("go"))


def test_conversations_are_spread_over_the_servers(host):
    games, seen = begin(host, 9)
    assert [seen.count(url) for url in URLS] == [3, 3, 3]
    asyncio.run(games[seen.index(URLS[1])].close())
    assert host.open == {URLS[0]: 3, URLS[1]: 2, URLS[2]: 3}


def test_what_is_over_makes_room_once(host):
    env = openenv_server("http://a:1,http://b:1", action=str, client=host.client)
    games, seen = begin(host, 4, env=env)

    async def end():
        for _ in range(2):  # a second close changes nothing
            await games[0].close()

    asyncio.run(end())
    _, last = begin(host, 1, env=env)
    assert last == seen[:1] and host.open[URLS[0]] == host.open[URLS[1]] == 2


@pytest.mark.parametrize(
    "fault",
    [ConnectionRefusedError("off"), RuntimeError("Server error: no licence (code: FACTORY_ERROR)")],
    ids=["refused", "cannot make one"],
)
def test_a_server_that_begins_nothing_is_passed_over(host, fault):
    host.faults[URLS[0]] = fault
    env = openenv_server("http://a:1,http://b:1", action=str, client=host.client)
    _, seen = begin(host, 4, env=env)
    assert seen == [URLS[1]] * 4
    host.asked.clear()
    begin(host, 4, env=env)
    assert URLS[0] not in host.asked  # it rests


def test_no_server_left_fails_the_conversation(host):
    host.faults = dict.fromkeys(URLS, ConnectionRefusedError("off"))
    _, (failure,) = begin(host, 1)
    assert str(failure) == "No OpenEnv server can be reached (ConnectionRefusedError: off)."
    assert set(host.asked) == set(URLS)


def test_a_reset_that_fails_is_the_conversations_own_fault(host):
    host.faults = dict.fromkeys(URLS, RuntimeError("Server error: no such level (code: EXECUTION_ERROR)"))
    _, (failure,) = begin(host, 1)
    assert "no such level" in str(failure) and len(host.asked) == 1


def test_a_full_server_makes_conversations_wait(host):
    host.faults["http://a:1"] = RuntimeError("Server error: 1/1 (code: CAPACITY_REACHED)")
    game = openenv_server("http://a:1", action=str, client=host.client, step_timeout=0.001).make()

    async def play():
        begun = asyncio.ensure_future(game.reset(seed=0))
        await until_true(lambda: len(host.asked) >= 3)
        assert not begun.done()  # the wait counts toward no timeout
        host.faults.clear()
        return await begun

    assert asyncio.run(play()) == "http://a:1"


def test_a_batch_of_more_than_there_is_room_for_ends(host):
    host.room = 1  # a trainer keeps environments for its rewards until the whole batch is finished
    engine = ScriptedEngine(build_tokenizer(), lambda session, turn: ["hello<|im_end|>", "bye<|im_end|>"][turn])
    runner = RolloutRunner(openenv_server("http://a:1", action=str, client=host.client), engine)
    requests = [RolloutRequest("Talk.", f"{number:03d}") for number in range(4)]

    async def play():
        done = await runner.run(requests, SamplingParams(), keep_environments=True)
        assert not +host.open
        await close_environments(done)
        return done

    assert {each.stop_reason for each in asyncio.run(play())} == {StopReason.ENV_DONE}


@pytest.mark.parametrize("how", ["dies", "begins again"])
def test_a_lost_server_ends_the_conversation(host, how):
    env = openenv_server("http://a:1", action=str, client=host.client)
    (game,), _ = begin(host, 1, env=env)
    host.reconnects = how == "begins again"  # a client connects again by itself, to an environment without a reset
    if how == "dies":
        host.faults["http://a:1"] = ConnectionResetError("gone")
    why = "it closed the connection" if how == "begins again" else "ConnectionResetError: gone"

    async def go_on():
        with pytest.raises(ServerLost) as lost:
            await game.step("go")
        await game.close()
        return str(lost.value)

    assert asyncio.run(go_on()) == f"The OpenEnv server at http://a:1, which this conversation used, is gone: {why}."


def test_a_reset_that_hangs_ends_in_time(host):
    def client(base_url):
        made = host.client(base_url)
        made.reset = lambda seed: asyncio.Event().wait()
        return made

    game = openenv_server("http://a:1", action=str, client=client, step_timeout=0.01).make()
    with pytest.raises(TimeoutError, match=r"`reset` of the OpenEnv server at http://a:1 took longer than 0.01 s"):
        asyncio.run(game.reset(seed=0))


def test_no_address_is_refused(host):
    with pytest.raises(ConfigError, match="`url` gives `openenv_server` no address"):
        openenv_server([], action=str, client=dict)
    with pytest.raises(ConfigError, match="has no address: set `environment_urls`, as `http://HOST:PORT`"):
        begin(host, 1, url=None)
    with pytest.raises(ConfigError, match="has no address"):
        asyncio.run(openenv_server(action=str, client=dict).check())


# `environment_urls`


def config(tmp_path, **options):
    (tmp_path / "games.py").write_text(
        "from mt_grpo.integrations.openenv import openenv_server\n"
        "echo = openenv_server('http://a:1', action=str, client=dict)\n"
        "bare = openenv_server(action=str, client=dict)\n"
    )
    return MTGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **options)


def test_the_option_gives_the_servers_of_the_environment(tmp_path):
    names = config(tmp_path, env=f"{tmp_path}/games.py:echo", environment_urls=["http://node[1-2]:8000"])
    assert build_env(names).pool.urls == ["http://node1:8000", "http://node2:8000"]
    assert build_env(config(tmp_path, env=f"{tmp_path}/games.py:echo")).pool.urls == ["http://a:1"]


def test_it_holds_for_an_environment_made_in_python(tmp_path):
    env = openenv_server(action=str, client=dict, max_turns=3)
    given = check_env(env, config(tmp_path, environment_urls=["http://b:1"]))
    assert given.pool.urls == ["http://b:1"] and given.max_turns == 3 and not env.pool.urls
    source = source_of(given)  # the commands give the trainer what they made of the options
    assert check_env(source, config(tmp_path, environment_urls=["http://b:1"])) is given


def test_each_of_several_environments_may_have_its_own(tmp_path):
    games = f"{tmp_path}/games.py"
    several = {
        "one": {"env": f"{games}:bare", "environment_urls": "http://b:1"},
        "other": f"{games}:echo",
        "sums": {"tools": ["calculator"]},
    }
    built = build_env(config(tmp_path, environments=several, environment_urls=["http://c:1"]))
    assert built["one"].pool.urls == ["http://b:1"] and built["other"].pool.urls == ["http://c:1"]


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
