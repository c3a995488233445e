"""verl's own files of tools, by its own paths."""

import asyncio
import sys
from types import ModuleType

import pytest
import yaml
from support.loopback import ScriptedServer

from mt_grpo.imports import ImportPathError, import_object
from mt_grpo.integrations.verl import WeatherInteraction, load_interactions
from mt_grpo.tools import load_tools_file
from mt_grpo.tools.function import ToolDefinitionError
from mt_grpo.tools.loading import ToolSession
from mt_grpo.tools.python_sandbox import CodeError

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


def told(gold):
    return {"extra_info": {"tools_kwargs": {"check": {"create_kwargs": {"ground_truth": gold}}}}}


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


def load(folder, class_name, **config):
    path = folder / "tools.yaml"
    entry = {"class_name": class_name, "config": {"type": "native", **config}, "tool_schema": SCHEMA}
    path.write_text(yaml.safe_dump({"tools": [entry]}))
    (tool,) = load_tools_file(str(path))
    return tool


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that programs are started in; no module of ours has a name of verl or ms-swift."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def theirs():
        return [module for module in sys.modules if module.partition(".")[0] in ("verl", "swift")]

    for module in theirs():
        monkeypatch.delitem(sys.modules, module)
    yield tmp_path
    for module in theirs():
        del sys.modules[module]


def test_verls_gsm8k_tool_is_found_by_its_path(tmp_path):
    tool = load(tmp_path, "verl.tools.gsm8k_tool.Gsm8kTool")
    answers, step, rewards = call(tool, told("1,000"), {"answer": "7"}, {"answer": "1000"}, {"answer": "1000"})
    assert "reward=0.0" in answers[0] and "reward=1.0" in answers[1]
    assert step == pytest.approx(-0.1) and rewards == {"check": 1.0}


def test_a_file_written_for_verl_is_not_changed(folder):
    (folder / "verl_check.py").write_text(FILE)
    assert call(load(folder, "verl_check.py:Check"), {}, {"answer": "1000"})[:2] == (["1.0"], 1.0)


def test_a_file_of_the_folder_goes_before_ours(folder):
    (folder / "swift").mkdir()
    (folder / "swift" / "__init__.py").write_text("mine = 1")
    assert import_object("swift.mine") == 1


CLONE = {
    "__init__.py": "import tensordict_of_verl",
    "tools/__init__.py": "",
    "tools/base_tool.py": "class BaseTool: pass",
    "tools/gsm8k_tool.py": "from .base_tool import BaseTool\nclass Gsm8kTool(BaseTool): pass",
    "tools/length_tool.py": FILE.replace("Check", "Length"),
}


@pytest.mark.parametrize("runs", [False, True], ids=["as cloned", "with all that it needs"])
@pytest.mark.parametrize("name", ["gsm8k_tool.Gsm8kTool", "length_tool.Length"])
def test_tools_are_found_in_the_root_of_a_clone_of_verl(name, runs, folder):
    for file, text in (CLONE | ({"__init__.py": "DataProto = 1"} if runs else {})).items():
        (folder / "verl" / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / "verl" / file).write_text(text)
    tool = load(folder, f"verl.tools.{name}")
    assert "1.0" in call(tool, told("1,000"), {"answer": "1000"})[0][0]
    assert getattr(sys.modules["verl"], "DataProto", None) == (1 if runs else None)


@pytest.fixture
def sandbox(monkeypatch):
    """Servers of a search and of Sandbox Fusion, which prints code unless that says `fail`; a tool may send any."""
    monkeypatch.setitem(SCHEMA, "function", {"name": "check", "parameters": {"type": "object", "properties": {}}})

    def run(method, path, body):
        if "queries" in body:
            return 200, {"result": [[{"document": {"contents": f"Title\nabout {each}"}} for each in body["queries"]]]}
        if body["language"] == "cpp":
            compiled = {"status": "Finished", "return_code": 1, "stdout": "", "stderr": "no semicolon\n"}
            return 200, {"status": "Failed", "message": "", "compile_result": compiled, "run_result": None}
        failed = "fail" in body["code"]
        streams = {"stdout": f"ran {body['code']}\n", "stderr": "it failed\n" if failed else ""}
        result = {"status": "Finished", "return_code": int(failed), **streams}
        return 200, {"status": "Failed" if failed else "Success", "message": "", "run_result": result}

    server = ScriptedServer(run)
    yield server
    server.stop()


SANDBOX = "verl.tools.sandbox_fusion_tools.SandboxFusionTool"
SUBCLASS = """
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.utils.rollout_trace import rollout_trace_op


class Printing(SandboxFusionTool):
    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        code = f"print({parameters['code']})"
        timeout, language = self.default_timeout, self.default_language
        result = await self.execution_pool.execute.remote(self.execute_code, instance_id, code, timeout, language)
        return result, None, None
"""


def test_verls_sandbox_tool_sends_code_to_its_server(tmp_path, sandbox):
    options = {"sandbox_fusion_url": f"{sandbox.url}/run_code", "default_timeout": 3, "memory_limit_mb": 64}
    tool = load(tmp_path, SANDBOX, **options, num_workers=2, enable_global_rate_limit=True, rate_limit=1)
    answers, step, rewards = call(tool, {}, {"code": "1"}, {"code": "2", "timeout": 1})
    assert (answers, step, rewards) == (["ran 1", "ran 2"], None, {})
    limits = {"language": "python", "memory_limit_MB": 64}
    asked = [{"code": "1", **limits, "run_timeout": 3}, {"code": "2", **limits, "run_timeout": 1}]
    assert sandbox.asked("/run_code") == asked


@pytest.mark.parametrize(
    ("arguments", "error"), [({"code": "fail"}, "ran fail\nit failed"), ({"language": "cpp"}, "no semicolon")]
)
def test_code_that_fails_in_verls_sandbox_is_an_error(tmp_path, sandbox, arguments, error):
    tool = load(tmp_path, SANDBOX, sandbox_fusion_url=f"{sandbox.url}/run_code")
    with pytest.raises(CodeError) as failed:
        call(tool, {}, arguments)
    assert str(failed.value) == error


def test_a_subclass_of_verls_sandbox_tool_is_not_changed(folder, sandbox):
    (folder / "printing.py").write_text(SUBCLASS)
    tool = load(folder, "printing.py:Printing", sandbox_fusion_url=f"{sandbox.url}/run_code")
    assert call(tool, {}, {"code": "6 * 7"})[0] == ["ran print(6 * 7)"]


@pytest.mark.parametrize(
    ("tool", "problem"),
    [
        (SANDBOX, "`SandboxFusionTool` has no `sandbox_fusion_url` in its `config`"),
        ("verl.tools.search_tool.SearchTool", "`SearchTool` has no `retrieval_service_url` in its `config`"),
        ("verl.tools.geo3k_tool.Geo3kTool", "by `mathruler`, and 'mathruler.grader' is not installed: `pip"),
    ],
)
def test_a_tool_that_lacks_what_it_needs_is_refused(tool, problem, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mathruler.grader", None)
    with pytest.raises(ToolDefinitionError, match=problem):
        load(tmp_path, tool)


def test_verls_search_tool_sends_each_query_to_its_server(tmp_path, sandbox):
    tool = load(tmp_path, "verl.tools.search_tool.SearchTool", retrieval_service_url=sandbox.url)
    (answer,), step, _ = call(tool, {}, {"query_list": ["Lima", "Cusco"]})
    assert "about Lima" in answer.partition("---")[0] and "about Cusco" in answer and step == 0.0
    with pytest.raises(ValueError, match="`query_list` is no list of queries"):
        call(tool, {}, {"query_list": "Lima"})


def test_verls_geo3k_tool_grades_expressions(tmp_path, monkeypatch):
    grader = ModuleType("mathruler.grader")
    grader.grade_answer = lambda said, gold: eval(said) == eval(gold)
    grader.extract_boxed_content = lambda text: text.partition("boxed{")[2].partition("}")[0]
    monkeypatch.setitem(sys.modules, "mathruler", ModuleType("mathruler"))
    monkeypatch.setitem(sys.modules, "mathruler.grader", grader)
    tool = load(tmp_path, "verl.tools.geo3k_tool.Geo3kTool")
    _, step, rewards = call(tool, told("3 * 2"), {"answer": "7"}, {"answer": "6"})
    assert step == -0.05 and rewards == {"check": 1.0}
    score = import_object("verl.utils.reward_score.geo3k.compute_score")
    assert score(r"<think>so</think> \boxed{6}", "6") == 1.0 and score(r"\boxed{6}", "6") == 0.9


def test_verls_weather_interaction_wants_a_tool_to_be_used(tmp_path):
    path = tmp_path / "interactions.yaml"
    entry = {"name": "weather", "class_name": "verl.interactions.weather_interaction.WeatherInteraction", "config": {}}
    path.write_text(yaml.safe_dump({"interaction": [entry]}))
    weather = load_interactions(str(path))["weather"]
    assert isinstance(weather, WeatherInteraction)

    async def scores(*roles):
        end, _, turn, _ = await weather.generate_response("1", [{"role": role, "content": "dry"} for role in roles])
        return end, turn, await weather.calculate_score("1")

    assert asyncio.run(scores("user", "assistant")) == (True, 0.0, 0.0)
    assert asyncio.run(scores("user", "tool", "assistant")) == (True, 1.0, 1.0)


@pytest.mark.parametrize(
    ("module", "known"), [("verl.tools.image_zoom_in_tool", "geo3k_tool"), ("verl.utils.dataset", "reward_score")]
)
def test_a_module_of_verl_that_is_not_here_is_named(module, known):
    with pytest.raises(ImportPathError) as refused:
        import_object(f"{module}.Thing")
    package = module.rpartition(".")[0]
    assert f"No module named {module!r}; without verl, `{package}` has " in str(refused.value)
    assert known in str(refused.value) and str(refused.value).endswith("install verl for others.")
