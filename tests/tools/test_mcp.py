"""Tools of MCP servers: real ones, over all three transports."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.mcp_servers import HttpServer
from support.own_process import TERMINAL
from support.waiting import until

from mt_grpo.envs.tool_env import execute_calls
from mt_grpo.errors import ConfigError
from mt_grpo.tools import ToolDefinitionError, mcp
from mt_grpo.tools.mcp import (
    McpServer,
    McpServerConfig,
    McpToolError,
    _Pace,
    _result_text,
    mcp_tools,
    read_servers,
    session,
)
from mt_grpo.trajectory import ToolCall

SERVER = Path(__file__).parent.parent / "support" / "mcp_server.py"


def stdio(name: str = "small", **env: str) -> dict:
    paths = os.environ.get("PYTHONPATH", "")
    return {"command": sys.executable, "args": [str(SERVER)], "env": {"PYTHONPATH": paths, "NAME": name, **env}}


@pytest.fixture
def write(tmp_path):
    """Writes a file of servers; a text as it is."""

    def write(content: str = "", **servers: dict) -> str:
        path = tmp_path / "servers.json"
        path.write_text(content or json.dumps({"mcpServers": servers}))
        return str(path)

    return write


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends while it is looked at
        return False
    return state != "Z"


@pytest.fixture(scope="module")
def small():
    """One server over standard input and output, shared by the tests that do not end it or bear that it ends."""
    return McpServer.shared(McpServerConfig("small", **stdio()))


async def text(small: McpServer, tool: str, **arguments) -> str:
    return _result_text((await small.call(tool, arguments)).content)


def called(tools: dict, *calls: tuple) -> list[ToolCall]:
    made = [ToolCall(name, arguments) for name, arguments in calls]
    asyncio.run(execute_calls(made, tools, 30.0))
    return made


# What the model sees


def test_tools_of_a_server_have_its_schemas_and_answer(write, small):
    tools = {tool.name: tool for tool in mcp_tools(write(small=stdio()))}
    assert (tools["add"].description, tools["add"].parameters["required"]) == ("Adds two numbers.", ["a", "b"])
    added, wrong, failed, big, weighed = called(
        tools,
        ("add", {"a": 1, "b": 2}),
        ("add", {"a": "one", "b": 2}),
        ("fail", {"reason": "no"}),
        ("big", {"characters": 1_000_000}),
        ("weigh", {"what": "salt"}),
    )
    assert (added.result, len(big.result)) == ("3", 1_000_000)
    assert wrong.error == "add: argument 'a' must be of type integer, not string"
    assert failed.error.startswith("McpToolError: Error executing tool fail")
    assert json.loads(weighed.result) == weighed.data == {"kilograms": 4.0}  # structured content is its data
    with pytest.raises(ToolDefinitionError, match="have no tool 'ad' .*; the nearest is 'add'"):
        mcp_tools(write(small=stdio()), ["ad"])


def test_tools_that_take_too_long_to_read_are_refused(write, monkeypatch):
    monkeypatch.setattr(mcp, "READ_SECONDS", 0.0)
    with pytest.raises(ToolDefinitionError, match="tools of the MCP servers of .* take more than 0 s to read: name"):
        mcp_tools(write(small=stdio()))


def test_calls_of_different_event_loops_share_one_server(small):
    assert len({asyncio.run(text(small, "process")) for _ in range(3)}) == 1
    assert McpServer.shared(McpServerConfig("small", **stdio())) is small


def test_a_server_works_on_many_calls_at_once(small):
    async def together() -> list[str]:
        return await asyncio.gather(*[text(small, "slow", seconds=0.2) for _ in range(100)])

    assert asyncio.run(together()) == ["awake"] * 100


@pytest.mark.parametrize("how", ["runs out of time", "unknown tool"])
def test_a_call_that_fails_ends_no_server(small, how):
    async def around() -> tuple[str, str]:
        before = await text(small, "process")
        if how == "runs out of time":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(small.call("slow", {"seconds": 60}), 0.1)
        else:  # a result with an error in one version of the library, an error of the protocol in the other
            with contextlib.suppress(McpToolError):
                assert "nope" in await text(small, "nope")
        return before, await text(small, "process")

    before, after = asyncio.run(around())
    assert before == after


# Servers that end


@pytest.mark.slow
def test_a_server_killed_in_mid_call_fails_calls_and_restarts(small):
    async def converse() -> tuple[list, str, str]:
        before = await text(small, "process")
        slow = [asyncio.ensure_future(small.call("slow", {"seconds": 60})) for _ in range(3)]
        await text(small, "slow", seconds=1)  # the calls before it are under way by then
        os.kill(int(before), signal.SIGKILL)
        return await asyncio.gather(*slow, return_exceptions=True), before, await text(small, "process")

    failures, before, after = asyncio.run(converse())
    for failure in failures:
        assert isinstance(failure, McpToolError) and "'small' ended during the call" in str(failure)
        assert str(failure).endswith("; the next call starts it again.")
    assert before != after
    with pytest.raises(McpToolError, match="ended during the call with 'out of licences'; the next call starts it"):
        asyncio.run(small.call("die", {"words": "out of licences"}))


@pytest.mark.slow
def test_a_server_that_keeps_ending_is_left_alone_for_a_while(monkeypatch):
    monkeypatch.setattr("mt_grpo.tools.mcp.RESTARTS", 2)
    mine = McpServer(McpServerConfig("small", **stdio("ends")))

    async def converse() -> list:
        return [await asyncio.gather(mine.call("die", {"words": "bye"}), return_exceptions=True) for _ in range(3)]

    *_, (last,) = asyncio.run(converse())
    assert "was started 2 times without answering a call, and is started again in" in str(last)


@pytest.mark.slow
def test_a_server_that_does_not_answer_a_ping_is_replaced(monkeypatch):
    monkeypatch.setattr(session, "PROBE_SECONDS", 0.5)
    mine = McpServer(McpServerConfig("small", **stdio("freezes")))

    async def converse() -> tuple[str, str]:
        before = await text(mine, "process")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(mine.call("freeze", {}), 0.5)
        return before, await text(mine, "process")

    before, after = asyncio.run(converse())
    assert before != after
    until(lambda: not alive(int(before)))


# Servers that do not start


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"command": "no-such-server"}, "there is no command 'no-such-server'; run `no-such-server` by hand"),
        (stdio(BROKEN="1"), "it ended with 'no licence for this machine'; run `"),
        ({"command": "sleep", "args": [60]}, "it has not listed its tools within 0.3 s"),
        ({"url": "http://127.0.0.1:9/mcp"}, "ConnectError: "),
        ({"url": "http://127.0.0.1:9/sse"}, "ConnectError: "),
    ],
)
def test_a_server_that_cannot_be_started_is_refused(write, entry, problem, monkeypatch):
    monkeypatch.setattr("mt_grpo.tools.mcp.ATTEMPTS", 2)
    if entry.get("command") == "sleep":
        monkeypatch.setattr(session, "START_SECONDS", 0.3)
    with pytest.raises(ConfigError) as refused:
        mcp_tools(write(bad=entry))
    assert str(refused.value).startswith(f"The MCP server 'bad' cannot be started: {problem}")
    assert "\n" not in str(refused.value)


def test_the_library_is_asked_for_where_it_is_missing(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"not installed: `pip install mt-grpo\[mcp\]`"):
        mcp_tools(write(other=stdio("other")))


def test_python_is_this_one_where_there_is_no_other(write, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "add" in {tool.name for tool in mcp_tools(write(alone={**stdio("alone"), "command": "python"}))}


# Servers that listen


@pytest.fixture(scope="module", params=["sse", "http"])
def listening(request):
    started = HttpServer(request.param, token="secret")
    yield started
    started.kill()


@pytest.mark.slow
def test_a_server_at_a_url_is_called_with_the_token(write, listening):
    (add,) = mcp_tools(write(far={"url": listening.url, "auth_token": "secret"}), ["add"])
    assert called({"add": add}, ("add", {"a": 2, "b": 3}))[0].result == "5"
    with pytest.raises(ConfigError, match="cannot be started: .*401"):
        mcp_tools(write(far={"url": listening.url, "auth_token": "guess"}))


@pytest.mark.slow
def test_a_server_at_a_url_that_is_killed_is_found_again(listening, monkeypatch):
    monkeypatch.setattr(session, "HEARTBEAT_SECONDS", 0.3)
    far = McpServer(McpServerConfig("far", url=listening.url, auth_token="secret"))

    async def begin() -> None:
        slow = asyncio.ensure_future(far.call("slow", {"seconds": 60}))
        await text(far, "add", a=1, b=1)
        listening.kill()
        with pytest.raises(McpToolError, match="'far' ended during the call"):
            await slow

    asyncio.run(begin())
    listening.start()
    assert asyncio.run(text(far, "add", a=1, b=1)) == "2"


@pytest.mark.slow
def test_sse_is_tried_where_streamable_http_is_refused(write, listening):
    url = listening.url.replace("/sse", "/events")  # does not say what it is
    assert mcp_tools(write(far={"url": url, "auth_token": "secret"}), ["add"])


# The end


SCRIPT = """
import asyncio, gc, os, time
import mt_grpo.tools
assert "mcp" not in sys.modules
from mt_grpo.tools.mcp import mcp_tools, McpServer
if sys.argv[2] == "start":
    import threading
    def interrupt():
        while not os.path.exists(sys.argv[3]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt).start()
(process,) = mcp_tools(sys.argv[1], ["process"])
pid = asyncio.run(process.function())
print(pid, flush=True)
how = sys.argv[2]
if how == "raise":
    raise RuntimeError("the run failed")
if how == "interrupt":
    async def wait():
        (slow,) = mcp_tools(sys.argv[1], ["slow"])
        asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGINT)
        await slow.function(seconds=60)
    asyncio.run(wait())
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "fork":
    child = os.fork()
    if child == 0:
        mine = asyncio.run(process.function())
        mt_grpo.tools.mcp.session._close_servers()
        os._exit(0 if mine != pid else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert asyncio.run(process.function()) == pid
"""


def run_script(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", TERMINAL + SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "interrupt", "kill", "fork"])
def test_no_server_outlives_its_process(write, how):
    run = run_script(write(small=stdio()), how)
    assert (run.returncode == 0) == (how == "fork"), run.stderr
    until(lambda: not alive(int(run.stdout.split()[0])))


@pytest.mark.slow
def test_a_start_that_hangs_can_be_interrupted(write, tmp_path):
    begun, process = tmp_path / "begun", tmp_path / "process"
    mute = {"command": "sh", "args": ["-c", f"echo $$ > {begun}; mv {begun} {process}; exec sleep 100"]}
    assert "KeyboardInterrupt" in run_script(write(mute=mute), "start", str(process)).stderr
    until(lambda: not alive(int(process.read_text())))


@pytest.mark.slow
def test_a_server_ends_with_the_last_tool_that_uses_it(write):
    (process,) = mcp_tools(write(gone=stdio("gone")), ["process"])
    number, files = int(asyncio.run(process.function())), len(os.listdir("/proc/self/fd"))
    assert alive(number)
    del process
    gc.collect()
    until(lambda: not alive(number))
    until(lambda: len(os.listdir("/proc/self/fd")) < files)


# Files


@pytest.mark.parametrize(
    ("entry", "transports"),
    [
        ({"url": "http://far/sse/?key=1"}, ("sse",)),
        ({"url": "http://far/mcp"}, ("http", "sse")),
        ({"url": "http://far/sse", "transport": "streamable-http"}, ("http",)),
        ({"url": "http://far", "type": "sse"}, ("sse",)),
        ({"command": "near", "args": [1], "autoApprove": [], "type": "stdio"}, ("stdio",)),  # of another program
    ],
)
def test_the_transport_follows_from_the_entry(write, entry, transports):
    (config,) = read_servers(write(a=entry))
    near = ("near", ["1"]) if "command" in entry else (config.command, config.args)
    assert (config.transports, (config.command, config.args)) == (transports, near)


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
def test_an_entry_may_have_several_addresses(write, url, urls):
    [config] = read_servers(write(small={"url": url, "auth_token": "secret"}))
    assert [(member.url, member.auth_token) for member in config.members] == [(each, "secret") for each in urls]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not valid JSON"),
        ('{"servers": {}}', "names no server"),
        ({}, "needs either a `command` to start it with or the `url`"),
        ({"url": "u", "command": "c"}, "needs either"),
        ({"url": "u", "auth_tokn": "t"}, "unknown key 'auth_tokn'; the nearest is 'auth_token'"),
        ({"command": ["c"]}, r"a `command` that is no str: \['c'\]"),
        ({"command": "c", "env": {"KEY": None}}, "has a `env` whose 'KEY' is null: give text, or leave it out"),
        ({"url": "u", "transport": "ssee"}, "transport 'ssee'; the nearest is 'sse'"),
        ({"url": "u", "transport": "stdio"}, "`stdio` needs a `command`"),
        ({"url": []}, "has an empty list as its `url`: give an address"),
        ({"url": [1]}, r"has a `url` that is no str or list of str: \[1\]"),
        ({"url": ["http://a/mcp", "http://a/mcp"]}, "names http://a/mcp twice"),
        ({"url": ["node1:8000"]}, "node1:8000` is no address of a server"),
    ],
)
def test_a_wrong_file_of_servers_is_refused(write, content, problem):
    with pytest.raises(ConfigError, match=problem):
        read_servers(write(content) if isinstance(content, str) else write(a=content))
    with pytest.raises(ConfigError, match="'none.json' .* does not exist"):
        read_servers("none.json")


def test_calls_are_spaced_after_a_burst_of_a_second(monkeypatch):
    waited = []
    monkeypatch.setattr("mt_grpo.tools.mcp.time.monotonic", lambda: 100.0)

    async def sleep(seconds: float) -> None:
        waited.append(round(seconds, 6))

    async def calls(pace: _Pace) -> None:
        for _ in range(4):
            await pace.wait()

    monkeypatch.setattr("mt_grpo.tools.mcp.asyncio.sleep", sleep)
    asyncio.run(calls(_Pace(2.0)))
    assert waited == [0.0, 0.0, 0.5, 1.0]
