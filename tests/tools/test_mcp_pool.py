"""Several MCP servers as one: real ones, over streamable HTTP, in processes of their own."""

from __future__ import annotations

import asyncio
import gc
import json

import pytest
from support.loopback import ScriptedServer
from support.mcp_servers import HttpServer
from support.models import build_tokenizer

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.errors import ConfigError
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.tools.mcp import mcp_tools, read_servers, server, session
from mt_grpo.trajectory import StopReason

NOBODY = "http://127.0.0.1:9/mcp"
ASK = '<reasoning>r</reasoning>\n<tool>{"name": "process", "args": {}}</tool>'


@pytest.fixture(scope="module")
def two():
    made = [HttpServer(), HttpServer()]
    yield made
    for one in made:
        one.kill()


@pytest.fixture
def own():
    made = []

    def make(number, **options):
        made.extend(HttpServer(**options) for _ in range(number))
        return made[-number:]

    yield make
    for one in made:
        one.kill()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(server, "ATTEMPTS", 2)
    yield
    gc.collect()  # tools that nobody has end their sessions


def tools_of(tmp_path, *servers):
    urls = [one if isinstance(one, str) else one.url for one in servers]
    path = tmp_path / "servers.json"
    path.write_text(json.dumps({"mcpServers": {"small": {"url": urls, "transport": "http"}}}))
    return mcp_tools(str(path))


def play(tools, number, turns=(ASK, ASK, "<answer>done</answer>"), before_turn=lambda trajectory: None):
    """Trajectories of conversations that ask their server for its process, twice."""

    def say(session, turn):
        before_turn(runner.under_way[session])
        return turns[turn]

    env = MultiTurnToolEnv(tools, tool_timeout=30.0)
    runner = RolloutRunner(env, ScriptedEngine(build_tokenizer(), say))
    requests = [RolloutRequest("Ask.", f"{index:03d}") for index in range(number)]
    return asyncio.run(runner.run(requests, SamplingParams()))


class AtSecondTurn:
    """Does something once, when a conversation on a server is about to take its second turn."""

    def __init__(self, server: HttpServer, act) -> None:
        self.process, self.act, self.session = server.process.pid, act, None

    def __call__(self, trajectory) -> None:
        if self.session is None and processes(trajectory) == {self.process}:
            self.session = trajectory.session
            self.act()


def processes(trajectory) -> set[int]:
    return {int(call.result) for turn in trajectory.turns for call in turn.tool_calls}


def test_a_conversation_stays_on_one_of_the_servers(tmp_path, two):
    done = play(tools_of(tmp_path, *two), 8)
    assert {each.stop_reason for each in done} == {StopReason.ANSWERED}, [each.error for each in done]
    assert all(len(processes(each)) == 1 for each in done)
    assert {processes(each).pop() for each in done} == {one.process.pid for one in two}


def test_calls_outside_of_conversations_share_the_servers(tmp_path, two):
    tools = {tool.name: tool for tool in tools_of(tmp_path, *two)}

    async def together():
        return await asyncio.gather(*(tools["process"].function() for _ in range(8)))

    assert set(map(int, asyncio.run(together()))) == {one.process.pid for one in two}


@pytest.mark.slow
def test_a_dead_server_ends_its_conversations_and_comes_back(tmp_path, own, two, caplog, monkeypatch):
    monkeypatch.setattr(session, "HEARTBEAT_SECONDS", 0.2)
    [mortal], stays = own(1), two[0]
    tools = tools_of(tmp_path, mortal, stays)
    dead = mortal.process.pid
    kill = AtSecondTurn(mortal, mortal.kill)
    done = play(tools, 6, before_turn=kill)
    lost = [each for each in done if each.stop_reason is StopReason.ENV_ERROR]
    assert kill.session in [each.session for each in lost]
    for each in lost:
        assert f"The MCP server 'small' at {mortal.url}, which this conversation used, is gone" in each.error
    others = [each for each in done if each not in lost]
    assert {each.stop_reason for each in others} == {StopReason.ANSWERED}
    assert stays.process.pid in {process for each in others for process in processes(each)}
    again = play(tools, 4)
    assert {process for each in again for process in processes(each)} == {stays.process.pid}
    mortal.start()
    tools[0].remote.server._pool._hosts[mortal.url].rests = 1.0  # as if its rest were over
    seen = {process for each in play(tools, 4) for process in processes(each)}
    assert seen == {stays.process.pid, mortal.process.pid} and dead not in seen
    assert f"The MCP server 'small' at {mortal.url} is back." in caplog.text


@pytest.mark.slow
def test_a_restart_between_calls_ends_the_conversation(tmp_path, own):
    [mortal] = own(1)
    [done] = play(tools_of(tmp_path, mortal, NOBODY), 1, before_turn=AtSecondTurn(mortal, mortal.restart))
    assert done.stop_reason is StopReason.ENV_ERROR and f"at {mortal.url}, which this conversation used" in done.error


@pytest.mark.slow
def test_a_frozen_server_is_passed_over(tmp_path, own, two, monkeypatch):
    monkeypatch.setattr(session, "PROBE_SECONDS", 1.0)
    [frozen], stays = own(1), two[0]
    tools = tools_of(tmp_path, frozen, stays)
    frozen.freeze()
    done = play(tools, 4)
    assert {process for each in done for process in processes(each)} == {stays.process.pid}


@pytest.mark.slow
def test_all_servers_dead_end_conversations_not_the_run(tmp_path, own, monkeypatch):
    monkeypatch.setattr("mt_grpo.servers.env_servers.START_TIMEOUT", 0.2)
    both = own(2)
    tools = tools_of(tmp_path, *both)
    for one in both:
        one.kill()
    done = play(tools, 2)
    assert {each.stop_reason for each in done} == {StopReason.ENV_ERROR}
    assert all("No MCP server 'small' can be reached" in each.error for each in done)


# Before a run


def test_a_server_that_is_down_is_named_and_the_run_goes_on(tmp_path, two, caplog):
    tools = tools_of(tmp_path, two[0], NOBODY)
    [said] = [record for record in caplog.records if record.name == "mt_grpo.tools.mcp.server"]
    assert said.message.startswith(
        "1 of the 2 servers of the MCP server 'small' cannot be started (http://127.0.0.1:9"
    )
    assert {each.stop_reason for each in play(tools, 3)} == {StopReason.ANSWERED}


@pytest.mark.slow
def test_a_busy_server_is_asked_again(tmp_path, own, two, monkeypatch):
    monkeypatch.setattr(server, "ATTEMPTS", 6)
    assert tools_of(tmp_path, *own(1, busy=3), two[0])[0].name == "add"


def test_no_server_is_refused(tmp_path):
    with pytest.raises(ConfigError) as refused:
        tools_of(tmp_path, NOBODY, NOBODY.replace("9", "8"))
    said = str(refused.value)
    assert said.startswith("None of the 2 servers of the MCP server 'small' can be started (http://127.0.0.1:9/mcp: C")
    assert said.endswith("): check that they run, and their `url`.") and "\n" not in said


def test_a_port_that_answers_something_else_is_refused(tmp_path, two):
    web = ScriptedServer(lambda *request: (404, {"detail": "Not Found"}))
    try:
        with pytest.raises(ConfigError) as refused:
            tools_of(tmp_path, two[0], web.url)
    finally:
        web.stop()
    said = f"The address {web.url} of the MCP server 'small' cannot be used (it answered 404 Not Found): correct it, "
    assert str(refused.value).startswith(said)


@pytest.mark.slow
def test_a_server_of_other_tools_is_refused(tmp_path, own, two):
    [other] = own(1, kind="other")
    with pytest.raises(
        ConfigError, match=rf"The addresses {two[0].url} and {other.url} .* have different tools \('add'"
    ):
        tools_of(tmp_path, two[0], other)


@pytest.mark.parametrize(
    ("url", "urls"),
    [
        ("http://node[1-2]:8000/mcp", ["http://node1:8000/mcp", "http://node2:8000/mcp"]),
        ("http://a/mcp, http://b/mcp", ["http://a/mcp", "http://b/mcp"]),
        (["http://a/mcp", "http://b:[1-2]/mcp"], ["http://a/mcp", "http://b:1/mcp", "http://b:2/mcp"]),
        ("http://far/sse/?tools=a,b", ["http://far/sse/?tools=a,b"]),  # one, which is left as it is
        ("http://[::1]:8000/mcp/", ["http://[::1]:8000/mcp/"]),
    ],
)
def test_an_entry_may_have_several_addresses(tmp_path, url, urls):
    path = tmp_path / "servers.json"
    path.write_text(json.dumps({"mcpServers": {"small": {"url": url, "auth_token": "secret"}}}))
    [config] = read_servers(str(path))
    assert [member.url for member in config.members] == urls
    assert {member.auth_token for member in config.members} == {"secret"}


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ([], "has an empty list as its `url`: give an address"),
        ([1], r"has a `url` that is no str or list of str: \[1\]"),
        (["http://a/mcp", "http://a/mcp"], "names http://a/mcp twice"),
        (["node1:8000"], "node1:8000` is no address of a server"),
    ],
)
def test_wrong_addresses_of_an_entry_are_refused(tmp_path, url, problem):
    path = tmp_path / "servers.json"
    path.write_text(json.dumps({"mcpServers": {"small": {"url": url}}}))
    with pytest.raises(ConfigError, match=problem):
        read_servers(str(path))
