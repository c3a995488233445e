"""Each check of `mt-grpo doctor`, where all is well and where it fails."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image
from support.loopback import ScriptedServer, free_port
from support.models import build_tokenizer

from mt_grpo.app.recipe import build_recipe
from mt_grpo.app.request import read_request
from mt_grpo.doctor import checks, plan
from mt_grpo.doctor.checks import CHECKS, ERROR, PLAN
from mt_grpo.doctor.context import RunFacts, examine

ALL = CHECKS | PLAN | {"probe": plan.probe}

SILENT = """
from mt_grpo.envs import MultiTurnToolEnv

class Env(MultiTurnToolEnv):
    def start(self, prompt):
        return [{"role": "user", "content": str(prompt)}]
"""

TOOLS = """
import time

from mt_grpo.tools.mcp import McpRemote, McpTool


def slow(query: str) -> str:
    \"\"\"
    Takes its time.

    Args:
        query: Anything.
    \"\"\"
    time.sleep(1)


def broken(query: str) -> str:
    \"\"\"
    Fails.

    Args:
        query: Anything.
    \"\"\"
    raise RuntimeError("no route")


def tells(query: str) -> dict:
    \"\"\"
    Tells of its failure.

    Args:
        query: Anything.
    \"\"\"
    return {"error": "no route"}


def shows(query: str, count: int, kind: str = "a") -> str:
    \"\"\"
    Shows its arguments.

    Args:
        query: Anything.
        count: How many.
        kind: Not asked for.
    \"\"\"
    return f"{query!r} {count} {kind}"


def reads_colour(completions, colour, **columns):
    return [1.0 for _ in colour]


def of_server(name: str, **annotations: bool) -> McpTool:
    async def call(**arguments):
        return "called"

    schema = {"type": "object", "properties": {}}
    remote = McpRemote(None, {"name": name, "inputSchema": schema, "annotations": annotations})
    return McpTool(name, name, schema, call, remote=remote)


deletes, reads = of_server("deletes"), of_server("reads", readOnlyHint=True)
"""


@pytest.fixture
def check(recipe, tmp_path):
    """Runs one check on a recipe with these keys and options; returns its status and its sentences."""
    (tmp_path / "tools.py").write_text(TOOLS)

    def run(name: str, *options: str, **keys: object) -> tuple[list[str], str]:
        request = read_request([*recipe(**keys), *options], "doctor")
        found = list(examine(RunFacts(request, build_recipe(request)), {name: ALL[name]}))
        assert {one.check for one in found} == {name}
        return [one.status for one in found], " ".join(f"{one.what}. {one.mend}" for one in found)

    return run


def test_processes_make_whole_groups(check):
    assert check("processes", "--num_processes", "3")[0] == ["ok"]
    status, words = check("processes", "--num_processes", "3", num_generations=8)
    assert status == ["fail"] and "`num_generations: 8` does not divide the generation batch of 12" in words
    status, words = check("processes", "--accelerate_config", "zero3", num_generations=8)
    assert status == ["fail"] and "4 a device × 7 processes" in words


def test_processes_keep_the_stated_batch(check):
    status, words = check("processes", "--num_processes", "2", generation_batch_size=16)
    assert status == ["ok"] and "sample 16 conversations" in words
    assert check("processes", "--num_processes", "3", generation_batch_size=16)[0] == ["fail"]


def test_a_device_is_here_stated_or_missed(check, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check("device")[0] == ["ok"]
    assert check("device", use_cpu=None)[0] == ["warn"]
    assert check("device", "--gpu_memory", "80", use_cpu=None, bf16=True)[0] == ["warn"]
    status, words = check("device", use_cpu=None, bf16=True)
    assert status == ["fail"] and "`--gpu H100 --num_processes 7`" in words


def test_a_model_is_found_or_not(check, tmp_path):
    assert check("model")[0] == ["ok"]
    assert check("model", model_name_or_path=str(tmp_path))[0] == ["fail"]
    status, words = check("model", model_name_or_path="Qwen/Qwen2.5-7B-Instruct")
    assert status == ["warn"] and "with its `config.json`" in words


def test_rows_suffice_for_a_batch(check, tmp_path):
    assert check("rows")[0] == ["ok"]
    status, words = check("rows", "--num_processes", "3")
    assert status == ["fail"] and "4 rows, and one batch takes 6" in words
    status, words = check("rows", outcome_reward_funcs=[f"{tmp_path}/tools.py:reads_colour"])
    assert status == ["fail"] and "colour" in words
    assert check("rows", dataset_name="triviaqa", column_mapping=None)[0] == ["warn"]


def test_a_template_appends_or_refuses(check, model_folder, tmp_path):
    assert check("template")[0] == ["ok"]
    folder = tmp_path / "refuses"
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}<|im_end|>"
    )
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    status, words = check("template", model_name_or_path=str(folder))
    assert status == ["fail"] and "one message only" in words


@pytest.mark.parametrize("system_prompt", [None, "", "Compute."])
@pytest.mark.parametrize("protocol", [None, "learnt_tags"])
def test_a_first_prompt_has_its_tools(check, protocol, system_prompt):
    assert check("prompt", call_protocol=protocol, system_prompt=system_prompt)[0] == ["ok"]


def test_tools_that_the_first_prompt_lacks_are_named(check, tmp_path):
    (tmp_path / "env.py").write_text(SILENT)
    status, words = check("prompt", env=f"{tmp_path}/env.py:Env", call_protocol=None)
    assert status == ["warn"] and "not shown its tools (calculator)" in words


def test_a_first_prompt_with_images_is_looked_at(check, tmp_path):
    rows = [
        {"prompt": f"What is {number}?", "answer": "Lima", "image": [str(tmp_path / "one.png")]} for number in range(8)
    ]
    Image.new("RGB", (16, 16)).save(tmp_path / "one.png")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "env.py").write_text(SILENT)
    assert check("prompt", call_protocol=None, column_mapping=None)[0] == ["ok"]
    status, words = check("prompt", env=f"{tmp_path}/env.py:Env", call_protocol=None, column_mapping=None)
    assert status == ["warn"] and "not shown its tools (calculator)" in words
    (tmp_path / "one.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0")
    status, words = check("prompt", column_mapping=None)
    assert status == ["fail"] and "Row 0 (counted from 0) of the training dataset has an image that cannot" in words


def test_a_model_in_a_subfolder_is_found(check, model_folder):
    options = {"model_name_or_path": str(model_folder.parent), "model_init_kwargs": {"subfolder": model_folder.name}}
    assert check("model", **options)[0] == ["ok"]
    assert check("template", **options)[0] == ["ok"]


def test_lengths_are_held_against_the_context(check):
    assert check("lengths", max_completion_length=64)[0] == ["ok"]
    status, words = check("lengths", max_completion_length=512)
    assert status == ["warn"] and "more than the context of 512" in words
    status, words = check("lengths", system_prompt="word " * 600)
    assert status == ["fail"] and "the context 512" in words


@pytest.mark.parametrize(
    ("result", "fails"),
    [
        ("Error: no key", True),
        ("error 404", True),
        ('{"error": {"code": 3}}', True),
        ("[{'error': 'none found'}]", True),
        ("ValueError: x", True),
        ("Traceback (most recent call last):", True),
        ('{"error": null, "hits": []}', False),
        ("Errors are human.", False),
        ("No error.", False),
        ("", False),
    ],
)
def test_a_result_that_tells_of_an_error_is_known(result, fails):
    assert bool(ERROR.match(result)) == fails


class Client:
    """In the place of OpenEnv's: nobody listens at port 1."""

    def __init__(self, base_url):
        self.gone = base_url.endswith(":1")

    async def connect(self):
        if self.gone:
            raise ConnectionError("nobody")

    async def close(self):
        pass


def test_openenv_servers_answer(check, tmp_path, monkeypatch):
    monkeypatch.setattr("mt_grpo.integrations.openenv.CHECK_SECONDS", 0.1)
    assert check("environment")[0] == ["ok"]
    (tmp_path / "games.py").write_text(
        "from mt_grpo.integrations.openenv import openenv_server\n"
        f"from {Client.__module__} import Client\n"
        "echo = openenv_server(action=str, client=Client)\n"
    )
    options = {"env": f"{tmp_path}/games.py:echo", "tools": None, "call_protocol": None}
    status, words = check("environment", environment_urls="http://127.0.0.1:[1-2]", **options)
    assert (
        status == ["warn"] and "1 of 2 OpenEnv servers answer (http://127.0.0.1:1: ConnectionError: nobody)" in words
    )
    assert check("environment", environment_urls=["http://127.0.0.1:2"], **options)[0] == ["ok"]
    status, words = check("environment", environment_urls=["http://127.0.0.1:1"], **options)
    assert status == ["fail"] and "Cannot reach the server of `environment_urls`" in words


def test_each_tool_is_called_once(check, tmp_path):
    status, words = check("tools", tools=["calculator", f"{tmp_path}/tools.py:shows"])
    assert status == ["ok", "ok"]
    assert "calculator(expression='1 + 1')" in words and "\"'What is 0 of Peru' 1 a\"" in words
    status, words = check("tools", tools=[f"{tmp_path}/tools.py:slow"], tool_timeout=0.1)
    assert status == ["fail"] and "did not answer in 0.1 s" in words
    status, words = check("tools", tools=[f"{tmp_path}/tools.py:tells"])
    assert status == ["warn"] and "answered with what reads as an error" in words
    status, words = check("tools", tools=[f"{tmp_path}/tools.py:broken"])
    assert status == ["warn"] and "no route" in words
    assert check("tools", tools=None)[0] == ["ok"]


def test_a_tool_of_a_server_is_called_where_it_only_reads(check, tmp_path):
    status, words = check("tools", tools=[f"{tmp_path}/tools.py:deletes", f"{tmp_path}/tools.py:reads"])
    assert status == ["ok", "ok"]
    assert "deletes is offered by its MCP server, and not called" in words and "reads() answered" in words


def test_the_server_holds_the_model_or_not(check, server, tmp_path):
    assert check("server")[0] == ["ok"]
    status, words = check("server", use_vllm=True, vllm_server_base_url=server.url)
    assert status == ["ok"] and "a context of 64 tokens" in words
    status, words = check("server", use_vllm=True, vllm_server_base_url=server.url, model_name_or_path="embedded")
    assert status == ["fail"] and "serves" in words
    status, words = check("server", use_vllm=True, vllm_server_base_url=f"http://127.0.0.1:{free_port()}")
    assert status == ["fail"] and "mt-grpo serve" in words


def test_vllm_is_installed_or_not(check, monkeypatch):
    assert check(".venv-vllm")[0] == ["ok"]
    monkeypatch.setattr(checks, "version_in", lambda *names: "0.31.0")
    assert check(".venv-vllm", use_vllm=True)[0] == ["ok"]
    monkeypatch.setattr(checks, "version_in", lambda *names: checks.MISSING)
    monkeypatch.setattr(checks, "version_here", lambda name: checks.MISSING)
    status, words = check(".venv-vllm", use_vllm=True)
    assert status == ["fail"] and "scripts/install.sh .venv-vllm" in words
    assert check(".venv-vllm", use_vllm=True, vllm_server_base_url="http://far.example:8000")[0] == ["ok"]


def test_ports_are_free_or_taken(check, server, monkeypatch):
    assert check("ports", use_vllm=True, vllm_server_port=free_port())[0] == ["ok"]
    status, words = check("ports", use_vllm=True, vllm_server_base_url=server.url)
    assert status == ["ok"] and "the server listens" in words
    other = ScriptedServer(lambda method, path, body: (404, "something else"))
    try:
        port = int(other.url.rsplit(":", 1)[1])
        status, words = check("ports", use_vllm=True, vllm_server_port=port)
        assert status == ["fail"] and f"port {port} is taken by another program" in words
        monkeypatch.setattr(checks, "MEETING_PORT", port)
        assert check("ports", "--num_processes", "2")[0] == ["fail"]
    finally:
        other.stop()


def test_trackers_are_installed_or_not(check):
    assert check("report_to")[0] == ["ok"]
    status, words = check("report_to", report_to="clearml")
    assert status == ["fail"] and "pip install clearml" in words


def test_an_earlier_run_is_in_the_folder_or_not(check, tmp_path):
    assert check("output_dir")[0] == ["ok"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    status, words = check("output_dir")
    assert status == ["fail"] and "holds an earlier run" in words
    assert check("output_dir", overwrite_output_dir=True)[0] == ["ok"]
    assert check("output_dir", output_dir=str(tmp_path / "recipe.yaml"))[0] == ["fail"]


GPU = {"use_cpu": None}


def test_training_fits_or_not(check):
    assert check("training memory")[0] == ["ok"]
    assert check("training memory", "--gpu_memory", "80", **GPU)[0] == ["ok"]
    status, words = check("training memory", "--gpu_memory", "2", **GPU)
    assert status == ["fail"] and "no option that is known here makes it fit: take GPUs of 4 GB" in words


def test_the_server_has_room_or_not(check):
    vllm = {"use_vllm": True, **GPU}
    assert check("server memory", "--gpu_memory", "80", **vllm)[0] == ["ok"]
    status, words = check("server memory", "--gpu_memory", "3", **vllm)
    assert status == ["fail"] and "0 conversations" in words


def test_files_fit_or_not(check, monkeypatch):
    assert check("files", save_strategy="steps", save_steps=1)[0] == ["ok"]
    assert check("files", use_vllm=True)[0] == ["ok", "ok"]
    monkeypatch.setattr(plan, "free_bytes", lambda folder: 10)
    status, words = check("files", use_vllm=True, save_strategy="steps", save_steps=1)
    assert status == ["fail", "fail"]
    assert "`weight_sync_folder`" in words and "2 checkpoints" in words and "`save_total_limit`" in words


def test_a_step_is_estimated_and_calibrated(check, tmp_path):
    status, words = check("step")
    assert status == ["ok"] and "an estimate, for this CPU" in words
    record = {"turns/mean": 2.0, "completions/mean_length": 12.0, "tokens/unique": 40.0}
    lines = [{"step": 0, "train_loss": 1.0}, *({"step": step, "step_time": step * 1.0, **record} for step in range(6))]
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, words = check("step", "--calibrate", str(tmp_path / "done"))
    assert status == ["ok"] and "4.00 s (calibrated with the steps of" in words and "2.0 turns, 12 tokens" in words
    assert "calibrated" in check("step", output_dir=str(tmp_path / "done"))[1]
    status, words = check("step", "--calibrate", str(tmp_path))
    assert status == ["fail"] and "has no metrics of a step" in words
    (tmp_path / "done" / "metrics.jsonl").write_text("{")
    status, words = check("step", "--calibrate", str(tmp_path / "done"))
    assert status == ["fail"] and "is no record of a run" in words


def test_a_slow_server_asks_for_more_gpus(check, monkeypatch):
    slow = plan.Speed(400e12, 1e6, 1e-4, 1e-4, "a slow memory")
    monkeypatch.setattr(plan, "speed_of", lambda gpu: slow)
    options = ["--gpu_memory", "80", "--num_processes", "7"]
    status, words = check("step", *options, use_vllm=True, **GPU)
    assert status == ["ok", "warn"] and "7 + 1: " in words and "train on 4 and serve on 4: 4 servers" in words
    slow = plan.Speed(1e6, 2e12, 1e-4, 1e-4, "a slow processor")
    status, words = check("step", *options, use_vllm=True, num_iterations=8, **GPU)
    assert status == ["ok", "ok"] and "7 + 1 is near the best" in words


@pytest.mark.parametrize("forward", ["tree", "padded"])
def test_a_probe_measures_a_micro_batch(check, forward):
    status, words = check("probe", max_completion_length=64, forward=forward, gradient_checkpointing=True)
    assert status == ["ok"] and "one micro-batch of 4 conversations of" in words


def test_a_probe_of_an_adapter_measures_too(check):
    status, _ = check("probe", max_completion_length=64, use_peft=True, lora_target_modules=["q_proj", "v_proj"])
    assert status == ["ok"]


def test_a_probe_that_runs_out_of_memory_says_so(check, monkeypatch):
    def fail(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(plan, "_logps", fail)
    status, words = check("probe", max_completion_length=64)
    assert status == ["fail"] and "does not fit" in words and "`gradient_checkpointing: true`" in words


def test_a_probe_that_would_end_the_machine_is_refused(check, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1e6}))
    status, words = check("probe", max_completion_length=64)
    assert status == ["fail"] and "run it on the machine of the run" in words


def examined(recipe, *options, **keys):
    request = read_request([*recipe(**keys), *options], "doctor")
    return list(examine(RunFacts(request, build_recipe(request)), CHECKS | PLAN))


def test_one_reason_that_stops_many_checks_is_told_once(recipe):
    found = examined(recipe, model_name_or_path="Qwen/Qwen2.5-7B-Instruct")
    assert sum("is not here" in one.what for one in found) == 1
    assert found[-1].check == "left out" and found[-1].status == "warn"
    assert found[-1].what.endswith("template, prompt, lengths, training memory, files, step")


def test_for_another_machine_this_one_is_no_reason_to_fail(recipe, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(plan, "free_bytes", lambda folder: 10)
    keys = {"use_vllm": True, "vllm_server_port": free_port(), "use_cpu": None, "max_completion_length": 64}
    found = {one.check: one for one in examined(recipe, "--gpu_memory", "80", **keys)}
    assert {found[name].status for name in ("server", "files")} == {"warn"}
    assert found["server"].what.startswith("here, which is not the machine of the run: ")
    assert "fail" not in {one.status for one in found.values()}


def test_rows_that_are_not_known_leave_the_rest(recipe):
    found = {one.check: one.status for one in examined(recipe, dataset_name="triviaqa", column_mapping=None)}
    assert found["rows"] == "warn" and {found[name] for name in ("tools", "step", "template")} == {"ok"}
