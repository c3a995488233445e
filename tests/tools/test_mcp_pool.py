"""Several MCP servers as one: real ones, over streamable HTTP, in processes of their own."""

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
from mt_grpo.tools.mcp import mcp_tools, session
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

    def make(**options):
        made.append(HttpServer(**options))
        return made[-1]

    yield make
    for one in made:
        one.kill()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("mt_grpo.tools.mcp.ATTEMPTS", 2)
    yield
    gc.collect()  # tools that nobody has end their sessions


@pytest.fixture
def tools_of(tmp_path):
    def tools_of(*servers):
        urls = [one if isinstance(one, str) else one.url for one in servers]
        path = tmp_path / "servers.json"
        path.write_text(json.dumps({"mcpServers": {"small": {"url": urls, "transport": "http"}}}))
        return mcp_tools(str(path))

    return tools_of


def play(tools, number, before_turn=lambda trajectory: None):
    """Trajectories of conversations that ask their server for its process, twice."""

    def say(session, turn):
        before_turn(runner.under_way[session])
        return (ASK, ASK, "<answer>done</answer>")[turn]

    runner = RolloutRunner(MultiTurnToolEnv(tools, tool_timeout=30.0), ScriptedEngine(build_tokenizer(), say))
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


def processes(*trajectories) -> set[int]:
    """That answered the calls."""
    return {int(call.result) for each in trajectories for turn in each.turns for call in turn.tool_calls}


def reasons(trajectories) -> set[StopReason]:
    return {each.stop_reason for each in trajectories}


def test_a_conversation_stays_on_one_of_the_servers(tools_of, two):
    tools = tools_of(*two)
    done, both = play(tools, 8), {one.process.pid for one in two}
    assert reasons(done) == {StopReason.ANSWERED}, [each.error for each in done]
    assert all(len(processes(each)) == 1 for each in done) and processes(*done) == both

    async def outside_of_conversations():
        process = next(tool for tool in tools if tool.name == "process")
        return await asyncio.gather(*(process.function() for _ in range(8)))

    assert set(map(int, asyncio.run(outside_of_conversations()))) == both


@pytest.mark.slow
def test_a_dead_server_ends_its_conversations_and_comes_back(tools_of, own, two, caplog, monkeypatch):
    monkeypatch.setattr(session, "HEARTBEAT_SECONDS", 0.2)
    mortal, stays = own(), two[0]
    tools, dead = tools_of(mortal, stays), mortal.process.pid
    kill = AtSecondTurn(mortal, mortal.kill)
    done = play(tools, 6, before_turn=kill)
    lost = [each for each in done if each.stop_reason is StopReason.ENV_ERROR]
    assert kill.session in [each.session for each in lost]
    for each in lost:
        assert f"The MCP server 'small' at {mortal.url}, which this conversation used, is gone" in each.error
    others = [each for each in done if each not in lost]
    assert reasons(others) == {StopReason.ANSWERED} and stays.process.pid in processes(*others)
    assert processes(*play(tools, 4)) == {stays.process.pid}
    mortal.start()
    tools[0].remote.server._pool._hosts[mortal.url].rests = 1.0  # as if its rest were over
    assert processes(*play(tools, 4)) == {stays.process.pid, mortal.process.pid} != {stays.process.pid, dead}
    assert f"The MCP server 'small' at {mortal.url} is back." in caplog.text


@pytest.mark.slow
def test_a_restart_between_calls_ends_the_conversation(tools_of, own):
    mortal = own()
    [done] = play(tools_of(mortal, NOBODY), 1, before_turn=AtSecondTurn(mortal, mortal.restart))
    assert done.stop_reason is StopReason.ENV_ERROR and f"at {mortal.url}, which this conversation used" in done.error


@pytest.mark.slow
def test_a_frozen_server_is_passed_over(tools_of, own, two, monkeypatch):
    monkeypatch.setattr(session, "PROBE_SECONDS", 1.0)
    frozen, stays = own(), two[0]
    tools = tools_of(frozen, stays)
    frozen.freeze()
    assert processes(*play(tools, 4)) == {stays.process.pid}


# Before a run


def test_a_server_that_is_down_is_named_and_the_run_goes_on(tools_of, two, caplog):
    tools = tools_of(two[0], NOBODY)
    [said] = [record.message for record in caplog.records if record.name == "mt_grpo.tools.mcp"]
    assert said.startswith("1 of the 2 servers of the MCP server 'small' cannot be started (http://127.0.0.1:9")
    assert reasons(play(tools, 3)) == {StopReason.ANSWERED}


@pytest.mark.slow
def test_a_busy_server_is_asked_again(tools_of, own, two, monkeypatch):
    monkeypatch.setattr("mt_grpo.tools.mcp.ATTEMPTS", 6)
    assert tools_of(own(busy=3), two[0])[0].name == "add"


def test_no_server_is_refused(tools_of):
    with pytest.raises(ConfigError) as refused:
        tools_of(NOBODY, NOBODY.replace("9", "8"))
    said = str(refused.value)
    assert said.startswith("None of the 2 servers of the MCP server 'small' can be started (http://127.0.0.1:9/mcp: C")
    assert said.endswith("): check that they run, and their `url`.") and "\n" not in said


def test_a_port_that_answers_something_else_is_refused(tools_of, two):
    web = ScriptedServer(lambda *request: (404, {"detail": "Not Found"}))
    said = rf"The address {web.url} of the MCP server 'small' cannot be used \(it answered 404 Not Found\): correct it"
    try:
        with pytest.raises(ConfigError, match=said):
            tools_of(two[0], web.url)
    finally:
        web.stop()


@pytest.mark.slow
def test_a_server_of_other_tools_is_refused(tools_of, own, two):
    other = own(kind="other")
    said = rf"The addresses {two[0].url} and {other.url} .* have different tools \('add'"
    with pytest.raises(ConfigError, match=said):
        tools_of(two[0], other)
