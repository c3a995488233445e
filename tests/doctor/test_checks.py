"""Each check of `mt-grpo doctor`, where all is well and where it fails."""

from __future__ import annotations

import json
import time

import pytest
import torch
from PIL import Image
from support.loopback import ScriptedServer, free_port
from support.models import build_tokenizer

from mt_grpo.app import commands
from mt_grpo.app.build import build_recipe
from mt_grpo.app.request import read_request
from mt_grpo.doctor import checks, plan, step_time
from mt_grpo.doctor.checks import CHECKS, ERROR, _examine
from mt_grpo.doctor.context import RunFacts
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.integrations.openenv import openenv_server
from mt_grpo.tools.mcp import McpRemote, McpTool

ALL = CHECKS | plan.PLAN | {"probe": plan.probe}


class Silent(MultiTurnToolEnv):
    def start(self, prompt):
        return [{"role": "user", "content": str(prompt)}]


def asked(answer):
    """A tool with one text as its argument."""

    def call(query: str) -> str:
        """
        Answers.

        Args:
            query: Anything.
        """
        return answer(query)

    return call


slow = asked(lambda query: time.sleep(1))
broken = asked(lambda query: {}["no route"])
tells = asked(lambda query: {"error": "no route"})


def shows(query: str, count: int, kind: str = "a") -> str:
    """
    Shows its arguments.

    Args:
        query: Anything.
        count: How many.
        kind: Not asked for.
    """
    return f"{query!r} {count} {kind}"


def reads_colour(completions, colour, **columns):
    return [1.0 for _ in colour]


async def solves(row, client):
    return 1.0


def of_server(name: str, **annotations: bool) -> McpTool:
    async def call(**arguments):
        return "called"

    schema = {"type": "object", "properties": {}}
    remote = McpRemote(None, {"name": name, "inputSchema": schema, "annotations": annotations})
    return McpTool(name, name, schema, call, remote=remote)


deletes, reads = of_server("deletes"), of_server("reads", readOnlyHint=True)


class Client:
    """In the place of OpenEnv's: nobody listens at port 1."""

    def __init__(self, base_url):
        self.gone = base_url.endswith(":1")

    async def connect(self):
        if self.gone:
            raise ConnectionError("nobody")

    async def close(self):
        pass


echo = openenv_server(action=str, client=Client)


def examined(recipe, names, *options, **keys):
    request = read_request([*recipe(**keys), *options], "doctor")
    return list(_examine(RunFacts(request, build_recipe(request)), names))


@pytest.fixture
def check(recipe, tmp_path):
    """Runs one check on a recipe with these keys and options; returns its status and its sentences."""

    def run(name: str, *options: str, **keys: object) -> tuple[str, str]:
        options, keys = json.loads(json.dumps([options, keys]).replace("HERE", str(tmp_path)))
        found = examined(recipe, {name: ALL[name]}, *options, **keys)
        assert {one.check for one in found} == {name}
        return " ".join(one.status for one in found), " ".join(f"{one.what}. {one.mend}" for one in found)

    return run


VLLM, ON_GPU, SHORT = {"use_vllm": True}, {"use_cpu": None}, {"max_completion_length": 64}
BIG = {"model_name_or_path": "Qwen/Qwen2.5-7B-Instruct"}
ENV = {"env": "test_checks.Silent", "call_protocol": None}
LACKS = "not shown its tools (calculator)"
ADAPTER = {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"]}

TABLE = [
    (
        "processes",
        "--num_processes 3",
        {"num_generations": 8},
        "fail",
        "8` does not divide the generation batch of 12",
    ),
    ("processes", "--accelerate_config zero3", {"num_generations": 8}, "fail", "4 a device × 7 processes"),
    ("processes", "--num_processes 2", {"generation_batch_size": 16}, "ok", "sample 16 conversations"),
    ("processes", "--num_processes 3", {"generation_batch_size": 16}, "fail", ""),
    ("device", "", ON_GPU, "warn", ""),
    ("device", "--gpu_memory 80", {**ON_GPU, "bf16": True}, "warn", ""),
    ("device", "", {**ON_GPU, "bf16": True}, "fail", "`--gpu H100 --num_processes 7`"),
    ("model", "", {"model_name_or_path": "HERE"}, "fail", ""),
    ("model", "", BIG, "warn", "with its `config.json`"),
    ("rows", "--num_processes 3", {}, "fail", "4 rows, and one batch takes 6"),
    ("rows", "", {"outcome_reward_funcs": ["test_checks.reads_colour"]}, "fail", "colour"),
    ("rows", "", {"dataset_name": "triviaqa", "column_mapping": None}, "warn", ""),
    *(
        ("prompt", "", {"call_protocol": protocol, "system_prompt": system}, "ok", "")
        for protocol in (None, "learnt_tags")
        for system in (None, "", "Compute.")
    ),
    ("prompt", "", ENV, "warn", LACKS),
    ("lengths", "", {"max_completion_length": 512}, "warn", "more than the context of 512"),
    ("lengths", "", {"system_prompt": "word " * 600}, "fail", "the context 512"),
    (
        "lengths",
        "",
        {"agent": "test_checks.solves", "tools": None, "call_protocol": None},
        "ok",
        "prompts are known once",
    ),
    ("tools", "", {"tools": ["test_checks.shows"]}, "ok", "\"'What is 0 of Peru' 1 a\""),
    ("tools", "", {"tools": ["test_checks.slow"], "tool_timeout": 0.1}, "fail", "did not answer in 0.1 s"),
    ("tools", "", {"tools": ["test_checks.tells"]}, "warn", "answered with what reads as an error"),
    ("tools", "", {"tools": ["test_checks.broken"]}, "warn", "no route"),
    ("tools", "", {"tools": ["test_checks.deletes"]}, "ok", "deletes is offered by its MCP server, and not called"),
    ("tools", "", {"tools": ["test_checks.reads"]}, "ok", "reads() answered"),
    ("tools", "", {"tools": None}, "ok", ""),
    ("server", "", {**VLLM, "vllm_server_base_url": "http://127.0.0.1:1"}, "fail", "mt-grpo serve"),
    ("report_to", "", {"report_to": "clearml"}, "fail", "pip install clearml"),
    ("output_dir", "", {"output_dir": "HERE/recipe.yaml"}, "fail", ""),
    ("training memory", "--gpu_memory 80", ON_GPU, "ok", ""),
    ("training memory", "--gpu_memory 2", ON_GPU, "fail", "no option that is known here makes it fit: take GPUs of 4"),
    ("server memory", "--gpu_memory 80", {**VLLM, **ON_GPU}, "ok", ""),
    ("server memory", "--gpu_memory 3", {**VLLM, **ON_GPU}, "fail", "0 conversations"),
    ("files", "", {"save_strategy": "steps", "save_steps": 1}, "ok", ""),
    ("files", "", VLLM, "ok ok", ""),
    ("step", "--calibrate HERE", {}, "fail", "has no metrics of a step"),
    ("probe", "", {**SHORT, "gradient_checkpointing": True}, "ok", "of 4 conversations of"),
    ("probe", "", {**SHORT, "forward": "padded"}, "ok", "one micro-batch of 4 conversations of"),
    ("probe", "", {**SHORT, **ADAPTER}, "ok", ""),
]
"""A check, options, keys of the recipe, and the status and a part of what is said."""


@pytest.mark.parametrize(("name", "options", "keys", "status", "words"), TABLE)
def test_a_check_says_what_is_well_and_what_is_not(check, monkeypatch, name, options, keys, status, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found, said = check(name, *options.split(), **keys)
    assert found == status and words in said


def test_a_template_that_refuses_messages_is_named(check, model_folder, tmp_path):
    folder, tokenizer = tmp_path / "refuses", build_tokenizer()
    tokenizer.chat_template = (
        "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}<|im_end|>"
    )
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    status, words = check("template", model_name_or_path=str(folder))
    assert status == "fail" and "one message only" in words


def test_a_first_prompt_with_images_is_looked_at(check, tmp_path):
    image, data = tmp_path / "one.png", tmp_path / "seen.jsonl"
    rows = [{"prompt": f"What is {number}?", "answer": "Lima", "image": [str(image)]} for number in range(8)]
    Image.new("RGB", (16, 16)).save(image)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"dataset_name": str(data), "column_mapping": None}
    assert check("prompt", **keys, call_protocol=None)[0] == "ok"
    status, words = check("prompt", **keys, **ENV)
    assert status == "warn" and LACKS in words
    image.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0")
    status, words = check("prompt", **keys)
    assert status == "fail" and "Row 0 (counted from 0) of the training dataset has an image that cannot" in words


def test_a_model_in_a_subfolder_is_found(check, model_folder):
    options = {"model_name_or_path": str(model_folder.parent), "model_init_kwargs": {"subfolder": model_folder.name}}
    assert check("model", **options)[0] == check("template", **options)[0] == "ok"


TELLING = ["Error: no key", "error 404", '{"error": {"code": 3}}', "[{'error': 'none found'}]", "ValueError: x"]
TELLING += ["Traceback (most recent call last):"]
SILENT = ['{"error": null, "hits": []}', "Errors are human.", "No error.", ""]


def test_a_result_that_tells_of_an_error_is_known():
    assert [bool(ERROR.match(result)) for result in (*TELLING, *SILENT)] == [True] * 6 + [False] * 4


@pytest.mark.parametrize(
    ("urls", "status", "said"),
    [
        ("http://127.0.0.1:[1-2]", "warn", "1 of 2 OpenEnv servers answer (http://127.0.0.1:1: ConnectionError: nob"),
        (["http://127.0.0.1:2"], "ok", ""),
        (["http://127.0.0.1:1"], "fail", "Cannot reach the server of `environment_urls`"),
    ],
)
def test_openenv_servers_answer(check, monkeypatch, urls, status, said):
    monkeypatch.setattr("mt_grpo.integrations.openenv.CHECK_SECONDS", 0.1)
    options = {"env": "test_checks.echo", "tools": None, "call_protocol": None}
    found, words = check("environment", environment_urls=urls, **options)
    assert found == status and said in words


def test_the_server_holds_the_model_or_not(check, server):
    status, words = check("server", **VLLM, vllm_server_base_url=server.url)
    assert status == "ok" and "a context of 64 tokens" in words
    status, words = check("server", **VLLM, vllm_server_base_url=server.url, model_name_or_path="embedded")
    assert status == "fail" and "serves" in words


def test_vllm_is_installed_or_not(check, monkeypatch):
    for version, expected in (("0.31.0", "ok"), ("0.33.1+cu129", "ok"), ("0.3.1", "warn"), ("0.34.0", "warn")):
        monkeypatch.setattr(commands, "version_of", lambda *names, found=version, environment=None: found)
        status, words = check(".venv-vllm", **VLLM)
        assert status == expected and f"vLLM {version} is in .venv-vllm" in words
    assert "mt-grpo is made for 0.31 to 0.33" in words and "`pip install 'mt-grpo[vllm]'` there" in words
    monkeypatch.setattr(commands, "version_of", lambda *names, environment=None: commands.MISSING)
    status, words = check(".venv-vllm", **VLLM)
    assert status == "fail" and "scripts/install.sh .venv-vllm" in words
    assert check(".venv-vllm", **VLLM, vllm_server_base_url="http://far.example:8000")[0] == "ok"


def test_ports_are_free_or_taken(check, server, monkeypatch):
    assert check("ports", **VLLM, vllm_server_port=free_port())[0] == "ok"
    status, words = check("ports", **VLLM, vllm_server_base_url=server.url)
    assert status == "ok" and "the server listens" in words
    other = ScriptedServer(lambda method, path, body: (404, "something else"))
    try:
        port = int(other.url.rsplit(":", 1)[1])
        status, words = check("ports", **VLLM, vllm_server_port=port)
        assert status == "fail" and f"port {port} is taken by another program" in words
        monkeypatch.setattr(checks, "MEETING_PORT", port)
        assert check("ports", "--num_processes", "2")[0] == "fail"
        status, words = check("ports", metrics_address=port)
        assert status == "fail" and f"`metrics_address: {port}` cannot be listened at" in words
    finally:
        other.stop()


def test_an_earlier_run_is_in_the_folder_or_not(check, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    status, words = check("output_dir")
    assert status == "fail" and "holds an earlier run" in words
    assert check("output_dir", overwrite_output_dir=True)[0] == "ok"


def test_files_that_do_not_fit_are_named(check, monkeypatch):
    monkeypatch.setattr(plan, "_free_bytes", lambda folder: 10)
    status, words = check("files", **VLLM, save_strategy="steps", save_steps=1)
    assert status == "fail fail"
    assert "`weight_sync_folder`" in words and "2 checkpoints" in words and "`save_total_limit`" in words


def test_a_step_is_calibrated(check, tmp_path):
    record = {"turns/mean": 2.0, "completions/mean_length": 12.0, "tokens/unique": 40.0}
    lines = [{"step": 0, "train_loss": 1.0}, *({"step": step, "step_time": step * 1.0, **record} for step in range(6))]
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, words = check("step", "--calibrate", "HERE/done")
    assert status == "ok" and "4.00 s (calibrated with the steps of" in words and "2.0 turns, 12 tokens" in words
    assert "calibrated" in check("step", output_dir="HERE/done")[1]
    with (tmp_path / "done" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "step_time": null, "tokens/unique": 4.0}\n{"step": 8, "ste')  # a run that goes on
    assert "4.00 s (calibrated with" in check("step", "--calibrate", "HERE/done")[1]
    (tmp_path / "done" / "metrics.jsonl").write_text("{\n")
    status, words = check("step", "--calibrate", "HERE/done")
    assert status == "fail" and "has a line that is not JSON of metrics" in words


@pytest.mark.parametrize(
    ("speed", "iterations", "status", "said"),
    [
        ((400e12, 1e6), 1, "ok warn", "train on 4 and serve on 4: 4 servers"),  # a slow memory
        ((1e6, 2e12), 8, "ok ok", "7 + 1 is near the best"),  # a slow processor
    ],
)
def test_a_slow_server_asks_for_more_gpus(check, monkeypatch, speed, iterations, status, said):
    monkeypatch.setattr(step_time, "_speed_of", lambda gpu: step_time._Speed(*speed, 1e-4, 1e-4, "slow"))
    options = ["--gpu_memory", "80", "--num_processes", "7"]
    found, words = check("step", *options, **VLLM, num_iterations=iterations, **ON_GPU)
    assert found == status and "7 + 1: " in words and said in words


def test_a_probe_that_does_not_fit_says_so(check, monkeypatch):
    def fail(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(plan, "_logps", fail)
    status, words = check("probe", **SHORT)
    assert status == "fail" and "does not fit" in words and "`gradient_checkpointing: true`" in words
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1e6}))
    status, words = check("probe", **SHORT)  # it would end the machine
    assert status == "fail" and "run it on the machine of the run" in words


def test_one_reason_that_stops_many_checks_is_told_once(recipe):
    found = examined(recipe, CHECKS | plan.PLAN, **BIG)
    assert sum("is not here" in one.what for one in found) == 1
    assert (found[-1].check, found[-1].status) == ("left out", "warn")
    assert found[-1].what.endswith("template, prompt, lengths, training memory, files, step")


def test_for_another_machine_this_one_is_no_reason_to_fail(recipe, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(plan, "_free_bytes", lambda folder: 10)
    keys = {**VLLM, **ON_GPU, **SHORT, "vllm_server_port": free_port()}
    found = {one.check: one for one in examined(recipe, CHECKS | plan.PLAN, "--gpu_memory", "80", **keys)}
    assert {found[name].status for name in ("server", "files")} == {"warn"}
    assert found["server"].what.startswith("here, which is not the machine of the run: ")
    assert "fail" not in {one.status for one in found.values()}


def test_rows_that_are_not_known_leave_the_rest(recipe):
    found = examined(recipe, CHECKS | plan.PLAN, dataset_name="triviaqa", column_mapping=None)
    statuses = {one.check: one.status for one in found}
    assert statuses["rows"] == "warn" and {statuses[name] for name in ("tools", "step", "template")} == {"ok"}
