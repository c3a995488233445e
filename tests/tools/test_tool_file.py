"""Files of tools in verl's form."""

import asyncio
import copy
import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from support.stateful_tools import SCHEMA

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.envs.tool_env import execute_calls
from mt_grpo.errors import ConfigError, UserError
from mt_grpo.tools import ToolSession, load_tools_file
from mt_grpo.tools.loading import StatefulTool
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.environment import build_env, check_env
from mt_grpo.trajectory import ToolCall

SERVER = Path(__file__).parent.parent / "support" / "mcp_server.py"
NATIVE = {"class_name": "support.stateful_tools.Guess", "config": {"type": "native"}, "tool_schema": SCHEMA}


def mcp(servers: str, selected: object = None, class_name: str = "", **config) -> dict:
    options = {"mcp_servers_config_path": servers} | ({} if selected is None else {"tool_selected_list": selected})
    return {"class_name": class_name, "config": {"type": "mcp", **config}, "mcp": options}


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("mcp") / "servers.json"
    entry = {"command": sys.executable, "args": [str(SERVER)], "env": {"PYTHONPATH": os.environ["PYTHONPATH"]}}
    path.write_text(json.dumps({"mcpServers": {"small": entry}}))
    return str(path)


@pytest.fixture
def write(tmp_path):
    def write(*tools) -> str:
        path = tmp_path / "tools.yaml"
        path.write_text(yaml.safe_dump({"tools": list(tools)}))
        return str(path)

    return write


def test_a_native_tool_is_made_of_its_class_config_and_schema(write):
    (tool,) = load_tools_file(write(copy.deepcopy(NATIVE)))
    assert isinstance(tool, StatefulTool)
    assert (tool.schema, tool.base.config) == (SCHEMA, {"type": "native"})


def test_tools_of_a_server_are_selected_by_name(write, servers):
    assert {"add", "slow"} < {tool.name for tool in load_tools_file(write(mcp(servers, {})))}
    assert [tool.name for tool in load_tools_file(write(mcp(servers, ["slow"])))] == ["slow"]


def test_the_timeout_of_an_entry_ends_a_call(write, servers):
    (slow,) = load_tools_file(write(mcp(servers, ["slow"], timeout=0.1, rate_limit=5)))
    call = ToolCall("slow", {"seconds": 60})
    asyncio.run(execute_calls([call], {"slow": slow}, 30.0))
    assert call.result == "Error: McpToolError: slow took longer than 0.1 s."


def test_a_subclass_reads_the_results_of_a_server(write, servers):
    tools = load_tools_file(write(mcp(servers, ["add", "slow"], "support.stateful_tools.Upper")))

    async def converse() -> tuple:
        session = ToolSession(tools, {}, 30.0)
        calls = [ToolCall("slow", {"seconds": 0}), ToolCall("add", {"a": 1, "b": "x"})]
        await execute_calls(calls, session.tools, 30.0)
        await session.release()
        return calls, session.take_reward(), session.metrics

    (slow, add), reward, metrics = asyncio.run(converse())
    assert (slow.result, reward, metrics) == ("AWAKE", 0.0, {"slow": [{"characters": 5}]})
    assert add.error == "add: argument 'b' must be of type integer, not string"


def test_a_recipe_names_a_file_of_tools(write, servers, tmp_path):
    path = write(NATIVE, mcp(servers, ["add"]))
    args = MTGRPOConfig(str(tmp_path), tools=["calculator"], tools_config_file=path, report_to=[], use_cpu=True)
    env = build_env(args)
    assert list(env.tools) == ["calculator", "guess", "add"]
    assert '"name": "add"' in env.start("hi")[0]["content"]
    assert check_env(MultiTurnToolEnv(list(env.tools.values())), args)
    with pytest.raises(ConfigError, match="`tools` is .*'guess'.* in the arguments"):
        check_env(MultiTurnToolEnv(["calculator"]), args)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"class_name": ""}, "Tool 1 in .* names no class: write `class_name: my_tools.Counter`"),
        ({"class_name": "support.stateful_tools.schema"}, "no subclass of `BaseTool`: subclass it, imported by"),
        ({"class_name": "support.stateful_tools.Gues"}, "has no 'Gues'; the nearest is 'Guess'"),
        ({"class_name": "my_tools.Counter"}, "does not import: there is no module 'my_tools'"),
        ({"clas_name": "x"}, "unknown key 'clas_name'; the nearest is 'class_name'"),
        ({"config": {}}, "does not say what it is"),
        ({"config": {"type": "mpc"}}, "does not say what it is"),
        ({"config": {"type": "mcp"}}, "names no file of MCP servers"),
        ({"mcp": {}}, "has `mcp` beside `type: native`"),
        ({"tool_schema": {"type": "function"}}, "wrong `tool_schema` at 'function': Field required"),
        ({"tool_schema": None}, "'Guess' has no schema"),
        *((mcp("s", timeout=seconds), f"`timeout` {seconds}: give secon") for seconds in (0, float("nan"))),
        (mcp("s", {"a": 1}), "`tool_selected_list` that is no list of names"),
        (mcp("s") | {"mcp": {"mcp_servers_config_path": "s", "tools": 1}}, "unknown key 'tools'"),
        (mcp("s"), "file of MCP servers 's' .* not exist"),
        (mcp("s", class_name="support.stateful_tools.Guess"), "no subclass of `MCPBaseTool`"),
    ],
)
def test_a_wrong_entry_is_refused(write, change, problem):
    with pytest.raises(UserError, match=problem):
        load_tools_file(write(NATIVE | change))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"tools: [", "is not valid YAML"),
        (b"[" * 1500, "is not valid YAML"),
        (b"tools: 2026-99-99", "is not valid YAML: month must be"),
        (b"\xff", "cannot be read: it is not text"),
        (b"tool: []", "lists no tools"),
        (b"tools: [1]", "Tool 1 in .* is no mapping"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, content, problem):
    path = tmp_path / "tools.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=problem):
        load_tools_file(str(path))
    with pytest.raises(UserError, match="'none.yaml' .* does not exist"):
        load_tools_file("none.yaml")


def test_a_class_that_does_not_start_is_refused(write, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from mt_grpo.tools import BaseTool\nclass Bad(BaseTool):\n    def __init__(self): ...\n")
    with pytest.raises(UserError, match="the class 'Bad' does not start from `config` and `tool_schema` .TypeError"):
        load_tools_file(write(NATIVE | {"class_name": f"{file}:Bad"}))
