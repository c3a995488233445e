"""verl's own files of tools, by its own paths."""

from __future__ import annotations

import asyncio
import sys

import pytest
import yaml

from mt_grpo.imports import import_object
from mt_grpo.tools import load_tools_file
from mt_grpo.tools.stateful import ToolSession

SCHEMA = {
    "type": "function",
    "function": {
        "name": "check",
        "description": "Checks an answer.",
        "parameters": {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
    },
}
FILE = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.reward_score import gsm8k
from verl.utils.rollout_trace import rollout_trace_op


class Check(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        from verl.tools.schemas import ToolResponse as Late  # looked up when it is called

        score = gsm8k.compute_score("#### " + parameters["answer"], "1,000", method="flexible")
        return Late(text=str(score)), score, {}
"""


def call(tool, row, *calls):
    """What calls of a tool answer in one conversation, and the rewards at its end."""

    async def hold():
        session = ToolSession([tool], row)
        try:
            answers = [await session.tools[tool.name].function(**arguments) for arguments in calls]
            return answers, session.take_reward(), await session.rewards()
        finally:
            await session.release()

    return asyncio.run(hold())


def load(folder, class_name):
    path = folder / "tools.yaml"
    entry = {"class_name": class_name, "config": {"type": "native"}, "tool_schema": SCHEMA}
    path.write_text(yaml.safe_dump({"tools": [entry]}))
    (tool,) = load_tools_file(str(path))
    return tool


def test_verls_gsm8k_tool_is_found_by_its_path(tmp_path):
    tool = load(tmp_path, "verl.tools.gsm8k_tool.Gsm8kTool")
    row = {"extra_info": {"tools_kwargs": {"check": {"create_kwargs": {"ground_truth": "1,000"}}}}}
    answers, step, rewards = call(tool, row, {"answer": "7"}, {"answer": "1000"}, {"answer": "1000"})
    assert ["reward=0.0" in answers[0], "reward=1.0" in answers[1]] == [True, True]
    assert step == pytest.approx(-0.1) and rewards == {"check": 1.0}


def test_a_file_written_for_verl_is_not_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "verl_check.py").write_text(FILE)
    tool = load(tmp_path, "verl_check.py:Check")
    answers, step, _ = call(tool, {}, {"answer": "1000"})
    assert answers == ["1.0"] and step == 1.0


def test_a_file_of_the_folder_goes_before_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "swift").mkdir()
    (tmp_path / "swift" / "__init__.py").write_text("mine = 1")
    for name in [name for name in sys.modules if name.partition(".")[0] == "swift"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert import_object("swift.mine") == 1
    del sys.modules["swift"]
