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
from support.own_process import TERMINAL
from support.waiting import until

from mt_grpo.envs.tool_env import execute_calls
from mt_grpo.errors import ConfigError
from mt_grpo.tools import ToolDefinitionError
from mt_grpo.tools.mcp import (
    McpServer,
    McpServerConfig,
    McpToolError,
    Pace,
    mcp_tools,
    read_servers,
    result_text,
    server,
    session,
)
from mt_grpo.trajectory import ToolCall

SERVER = Path(__file__).parent.parent / "support" / "mcp_server.py"
PATHS = os.environ.get("PYTHONPATH", "")


def stdio(name: str = "small", **env: str) -> dict:
    return {
        "command": sys.executable,
        "args": [str(SERVER), "stdio"],
        "env": {"PYTHONPATH": PATHS, "NAME": name, **env},
    }


def write(folder: Path, **servers: dict) -> str:
    path = folder / "servers.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    return str(path)


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends while it is looked at
        return False
    return state != "Z"


@pytest.fixture(scope="module")
def small():
    """One server over standard input and output, shared by the tests that do not end it or bear that it ends."""
    return McpServer.shared(read_entry(stdio()))


def read_entry(entry: dict) -> McpServerConfig:
    return McpServerConfig("small", **entry)


async def text(small: McpServer, tool: str, **arguments) -> str:
    return result_text((await small.call(tool, arguments)).content)


# What the model sees


def test_tools_of_a_server_have_its_schemas_and_answer(tmp_path, small):
    tools = {tool.name: tool for tool in mcp_tools(write(tmp_path, small=stdio()))}
    assert tools["add"].description == "Adds two numbers."
    assert tools["add"].parameters["required"] == ["a", "b"]
    calls = [
        ToolCall("add", {"a": 1, "b": 2}),
        ToolCall("add", {"a": "one", "b": 2}),
        ToolCall("fail", {"reason": "no"}),
        ToolCall("big", {"characters": 1_000_000}),
    ]
    asyncio.run(execute_calls(calls, tools, 30.0))
    assert calls[0].result == "3"
    assert calls[1].error == "add: argument 'a' must be of type integer, not string"
    assert calls[2].error.startswith("McpToolError: Error executing tool fail")
    assert len(calls[3].result) == 1_000_000
    weigh = ToolCall("weigh", {"what": "salt"})
    asyncio.run(execute_calls([weigh], tools, 30.0))
    assert json.loads(weigh.result) == weigh.data == {"kilograms": 4.0}  # structured content is the data of the call


def test_calls_of_different_event_loops_share_one_server(small):
    processes = {asyncio.run(text(small, "process")) for _ in range(3)}
    assert len(processes) == 1
    assert McpServer.shared(read_entry(stdio())) is small


def test_a_server_works_on_many_calls_at_once(small):
    async def together() -> list[str]:
        return await asyncio.gather(*[text(small, "slow", seconds=0.2) for _ in range(100)])

    assert asyncio.run(together()) == ["awake"] * 100


@pytest.mark.parametrize("how", ["runs out of time", "unknown tool"])
def test_a_call_that_fails_ends_no_server(small, how):
    async def fail() -> None:
        if how == "runs out of time":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(small.call("slow", {"seconds": 60}), 0.1)
        else:  # a result with an error in one version of the library, an error of the protocol in the other
            with contextlib.suppress(McpToolError):
                assert "nope" in await text(small, "nope")

    async def around() -> tuple[str, None, str]:
        return await text(small, "process"), await fail(), await text(small, "process")

    before, _, after = asyncio.run(around())
    assert before == after


# Servers that end


@pytest.mark.slow
def test_a_server_killed_in_mid_call_fails_calls_and_restarts(small):
    async def converse() -> tuple[list, str, str]:
        before = int(await text(small, "process"))
        slow = [asyncio.ensure_future(small.call("slow", {"seconds": 60})) for _ in range(3)]
        await text(small, "slow", seconds=1)  # the calls before it are under way by then
        os.kill(before, signal.SIGKILL)
        failures = await asyncio.gather(*slow, return_exceptions=True)
        return failures, str(before), await text(small, "process")

    failures, before, after = asyncio.run(converse())
    for failure in failures:
        assert isinstance(failure, McpToolError)
        assert "'small' ended during the call" in str(failure)
        assert str(failure).endswith("; the next call starts it again.")
    assert before != after


@pytest.mark.slow
def test_the_last_words_of_a_server_are_in_the_error(small):
    with pytest.raises(McpToolError, match="ended during the call with 'out of licences'; the next call starts it"):
        asyncio.run(small.call("die", {"words": "out of licences"}))


@pytest.mark.slow
def test_a_server_that_keeps_ending_is_left_alone_for_a_while(small, monkeypatch):
    monkeypatch.setattr(server, "RESTARTS", 2)
    mine = McpServer(read_entry(stdio("ends")))

    async def converse() -> list:
        return [await asyncio.gather(mine.call("die", {"words": "bye"}), return_exceptions=True) for _ in range(3)]

    *_, (last,) = asyncio.run(converse())
    assert "was started 2 times without answering a call, and is started again in" in str(last)


@pytest.mark.slow
def test_a_server_that_does_not_answer_a_ping_is_replaced(monkeypatch):
    monkeypatch.setattr(session, "PROBE_SECONDS", 0.5)
    mine = McpServer(read_entry(stdio("freezes")))

    async def converse() -> tuple[str, str]:
        before = await text(mine, "process")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(mine.call("freeze", {}), 0.5)
        return before, await text(mine, "process")

    before, after = asyncio.run(converse())
    assert before != after
    until(lambda: not alive(int(before)))


def test_python_is_this_one_where_there_is_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    tools = mcp_tools(write(tmp_path, alone={**stdio("alone"), "command": "python"}))
    assert {"add"} <= {tool.name for tool in tools}


# Servers that do not start


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"command": "no-such-server"}, "there is no command 'no-such-server'; run `no-such-server` by hand"),
        (stdio(BROKEN="1"), "it ended with 'no licence for this machine'; run `"),
        ({"url": "http://127.0.0.1:9/mcp"}, "ConnectError: "),
        ({"url": "http://127.0.0.1:9/sse"}, "ConnectError: "),
    ],
)
def test_a_server_that_cannot_be_started_is_refused(tmp_path, entry, problem, monkeypatch):
    monkeypatch.setattr(server, "ATTEMPTS", 2)
    with pytest.raises(ConfigError) as refused:
        mcp_tools(write(tmp_path, bad=entry))
    assert str(refused.value).startswith(f"The MCP server 'bad' cannot be started: {problem}")
    assert "\n" not in str(refused.value)


def test_a_server_that_says_nothing_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "START_SECONDS", 0.3)
    with pytest.raises(ConfigError, match="cannot be started: it has not listed its tools within 0.3 s"):
        mcp_tools(write(tmp_path, mute={"command": "sleep", "args": [60]}))


def test_the_library_is_asked_for_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"run `pip install mt-grpo\[mcp\]`"):
        mcp_tools(write(tmp_path, other=stdio("other")))


# Servers that listen


class Listening:
    """A server in a process of its own, on the same port however often it is started."""

    def __init__(self, kind: str) -> None:
        self.kind, self.port = kind, 0
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "TOKEN": "secret", "PORT": str(self.port)}
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER), self.kind], env=environment, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self.process.stdout.readline())

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module", params=["sse", "http"])
def listening(request):
    started = Listening(request.param)
    yield started
    started.stop()


def at(listening: Listening, path: str, **options) -> dict:
    return {"url": f"http://127.0.0.1:{listening.port}/{path}", "auth_token": "secret", **options}


@pytest.mark.slow
def test_a_server_at_a_url_is_called_with_the_token(tmp_path, listening):
    path = {"sse": "sse", "http": "mcp"}[listening.kind]
    (add,) = mcp_tools(write(tmp_path, far=at(listening, path)), ["add"])
    call = ToolCall("add", {"a": 2, "b": 3})
    asyncio.run(execute_calls([call], {"add": add}, 30.0))
    assert call.result == "5"
    with pytest.raises(ConfigError, match="cannot be started: .*401"):
        mcp_tools(write(tmp_path, far=at(listening, path, auth_token="guess")))


@pytest.mark.slow
def test_a_server_at_a_url_that_is_killed_is_found_again(listening, monkeypatch):
    monkeypatch.setattr(session, "HEARTBEAT_SECONDS", 0.3)
    far = McpServer(McpServerConfig("far", **at(listening, {"sse": "sse", "http": "mcp"}[listening.kind])))

    async def begin() -> McpToolError:
        slow = asyncio.ensure_future(far.call("slow", {"seconds": 60}))
        await text(far, "add", a=1, b=1)
        listening.stop()
        with pytest.raises(McpToolError) as failure:
            await slow
        return failure.value

    failure = asyncio.run(begin())
    assert "'far' ended during the call" in str(failure)
    listening.start()
    assert asyncio.run(text(far, "add", a=1, b=1)) == "2"


@pytest.mark.slow
def test_sse_is_tried_where_streamable_http_is_refused(tmp_path, listening):
    path = {"sse": "events", "http": "mcp"}[listening.kind]
    assert mcp_tools(write(tmp_path, far=at(listening, path)), ["add"])


@pytest.mark.parametrize(
    ("entry", "transports"),
    [
        ({"url": "http://far/sse/?key=1"}, ("sse",)),
        ({"url": "http://far/mcp"}, ("http", "sse")),
        ({"url": "http://far/sse", "transport": "streamable-http"}, ("http",)),
        ({"url": "http://far", "type": "sse"}, ("sse",)),
        ({"command": "near"}, ("stdio",)),
    ],
)
def test_the_transport_follows_from_the_entry(tmp_path, entry, transports):
    (config,) = read_servers(write(tmp_path, a=entry))
    assert config.transports == transports


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
        mt_grpo.tools.mcp.session.close_servers()
        os._exit(0 if mine != pid else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert asyncio.run(process.function()) == pid
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "interrupt", "kill", "fork"])
def test_no_server_outlives_its_process(tmp_path, how):
    run = subprocess.run(
        [sys.executable, "-c", TERMINAL + SCRIPT, write(tmp_path, small=stdio()), how],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (run.returncode == 0) == (how == "fork"), run.stderr
    server = int(run.stdout.split()[0])
    until(lambda: not alive(server))


@pytest.mark.slow
def test_a_start_that_hangs_can_be_interrupted(tmp_path):
    begun, process = tmp_path / "begun", tmp_path / "process"
    mute = {"command": "sh", "args": ["-c", f"echo $$ > {begun}; mv {begun} {process}; exec sleep 100"]}
    command = [sys.executable, "-c", TERMINAL + SCRIPT, write(tmp_path, mute=mute), "start", str(process)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "KeyboardInterrupt" in run.stderr
    until(lambda: not alive(int(process.read_text())))


@pytest.mark.slow
def test_a_server_ends_with_the_last_tool_that_uses_it(tmp_path):
    (process,) = mcp_tools(write(tmp_path, gone=stdio("gone")), ["process"])
    number = int(asyncio.run(process.function()))
    files = len(os.listdir("/proc/self/fd"))
    assert alive(number)
    del process
    gc.collect()
    until(lambda: not alive(number))
    until(lambda: len(os.listdir("/proc/self/fd")) < files)


# Files


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not valid JSON"),
        ('{"servers": {}}', "names no server"),
        ('{"mcpServers": {"a": {}}}', "needs either a `command` to start it with or the `url`"),
        ('{"mcpServers": {"a": {"url": "u", "command": "c"}}}', "needs either"),
        (
            '{"mcpServers": {"a": {"url": "u", "auth_tokn": "t"}}}',
            "unknown key 'auth_tokn'; the nearest is 'auth_token'",
        ),
        ('{"mcpServers": {"a": {"command": ["c"]}}}', r"a `command` that is no str: \['c'\]"),
        ('{"mcpServers": {"a": {"url": "u", "transport": "ssee"}}}', "transport 'ssee'; the nearest is 'sse'"),
        ('{"mcpServers": {"a": {"url": "u", "transport": "stdio"}}}', "`stdio` needs a `command`"),
    ],
)
def test_a_wrong_file_of_servers_is_refused(tmp_path, content, problem):
    path = tmp_path / "servers.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=problem):
        read_servers(str(path))
    with pytest.raises(ConfigError, match="'none.json' .* does not exist"):
        read_servers("none.json")


def test_keys_of_other_programs_are_left_alone(tmp_path):
    (config,) = read_servers(write(tmp_path, a={"command": "c", "args": [1], "autoApprove": [], "type": "stdio"}))
    assert (config.command, config.args, config.transports) == ("c", ["1"], ("stdio",))


def test_an_unknown_tool_in_the_selection_names_the_nearest(tmp_path, small):
    with pytest.raises(ToolDefinitionError, match="have no tool 'ad' .*; the nearest is 'add'"):
        mcp_tools(write(tmp_path, small=stdio()), ["ad"])


def test_calls_are_spaced_after_a_burst_of_a_second(monkeypatch):
    waited = []
    monkeypatch.setattr("mt_grpo.tools.mcp.time.monotonic", lambda: 100.0)

    async def sleep(seconds: float) -> None:
        waited.append(round(seconds, 6))

    monkeypatch.setattr("mt_grpo.tools.mcp.asyncio.sleep", sleep)

    async def calls(pace: Pace, number: int) -> None:
        for _ in range(number):
            await pace.wait()

    asyncio.run(calls(Pace(2.0), 4))
    assert waited == [0.0, 0.0, 0.5, 1.0]
