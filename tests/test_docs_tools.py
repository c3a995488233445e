"""The examples of the pages on tools that people bring work as they are written."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest

from mt_grpo.envs.tool_env import execute_calls
from mt_grpo.tools import ToolSession, load_tools_file
from mt_grpo.trajectory import ToolCall

DOCS = Path(__file__).parent.parent / "docs"


def write(page: str, folder: Path, *names: str) -> None:
    """Writes the blocks of a page that follow a sentence with their file's name."""
    text = (DOCS / page).read_text()
    for name in names:
        (block,) = re.findall(rf"`{re.escape(name)}`:\n\n```\w+\n(.*?)```", text, re.DOTALL)
        (folder / name).write_text(block)


async def converse(row: dict, *calls: ToolCall) -> tuple:
    session = ToolSession(load_tools_file("tools.yaml"), row, 30.0)
    await execute_calls(list(calls), session.tools, 30.0)
    step_reward, rewards = session.take_reward(), await session.rewards()
    await session.release()
    return [call.result for call in calls], step_reward, rewards


@pytest.mark.slow
def test_the_example_of_an_mcp_server_works(tmp_path, monkeypatch):
    pytest.importorskip("mcp.server.mcpserver", exc_type=ImportError)  # the page shows that of mcp 2
    write("mcp.md", tmp_path, "library.py", "servers.json", "tools.yaml")
    servers = json.loads((tmp_path / "servers.json").read_text())
    servers["mcpServers"]["library"]["command"] = sys.executable  # the tests' environment need not be the shell's
    (tmp_path / "servers.json").write_text(json.dumps(servers))
    monkeypatch.chdir(tmp_path)
    calls = [ToolCall("look_up", {"title": "Lima"}), ToolCall("look_up", {"title": "Rome"})]
    assert asyncio.run(converse({}, *calls)) == (["A port of Peru.", "No such book."], None, {})


def test_the_example_of_a_stateful_tool_works(tmp_path, monkeypatch):
    write("stateful_tools.md", tmp_path, "my_tools.py", "tools.yaml")
    (row,) = re.findall(r"```json\n(.*?)```", (DOCS / "stateful_tools.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_tools", raising=False)
    results, step_reward, rewards = asyncio.run(
        converse(json.loads(row), ToolCall("guess", {"guess": 5}), ToolCall("guess", {"guess": 7}))
    )
    assert results == ["2 away", "0 away"]
    assert step_reward == pytest.approx(0.2)
    assert rewards == {"guess": 1.0}
    sys.modules.pop("my_tools")
