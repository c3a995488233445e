"""Every command and every Python block in the documentation works."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from support.images import build_processor, build_vision_model
from support.models import CPU_RUN, build_model
from support.recipes import RECIPES, parse_recipe, processes_of
from support.registered import keep, keep_estimators
from support.runs import write_run

from mt_grpo.app import request
from mt_grpo.cli import main
from mt_grpo.rewards import REWARDS
from mt_grpo.runlog import open_run
from mt_grpo.training import MTGRPOConfig, preflight
from mt_grpo.viewer.runs import Runs

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str, page: str | None = None) -> list[tuple[str, str]]:
    """Blocks of all pages, or of one, each with the name of its page."""
    pattern = re.compile(rf"```{language}\n(.*?)```", re.DOTALL)
    pages = [each for each in PAGES if page in (None, each.name)]
    return [(each.name, block) for each in pages for block in pattern.findall(each.read_text())]


MEASURES = {
    "tool_execution": "tool-execution rate",
    "exist_answer_in_search_results": "answer in search results",
    "exact_match": "exact match",
    "format": "format",
    "turns": "turns per question",
}
COMMANDS = sorted({line for _, block in blocks("bash") for line in block.strip().splitlines()})
FEW = "--dataset_train_split train[:8] --dataset_test_split validation[:4] --max_turn_length 16"
SMALL = {"train": f"--max_steps 1 --per_device_train_batch_size 8 {FEW}", "rollout": FEW}


def words(command: str) -> list[str]:
    return list(itertools.dropwhile(lambda word: re.fullmatch(r"[A-Z_]+=\S*", word), shlex.split(command)))


def starting(word: str) -> list[str]:
    return [command for command in COMMANDS if Path(words(command)[0]).name == word]


def ours(*names: str, having: str = "") -> list[str]:
    """Commands of `mt-grpo` by their second word."""
    return [each for each in starting("mt-grpo") if words(each)[1] in names and having in each]


LAUNCHED, REPLAY = ours("train", having="--accelerate_config"), ours(*SMALL, having="--replay")
RUN = [each for each in ours(*SMALL) if each not in (*LAUNCHED, *REPLAY)]
RUN = list({re.sub(r"--num_prompts \d+", "", each): each for each in RUN}.values())
TESTED_ELSEWHERE = ours(*SMALL, "serve", "doctor", "view", "eval")


def test_no_command_is_left_untested():
    assert sum(len(starting(word)) for word in ("make", "mt-grpo", "accelerate")) == len(COMMANDS)


@pytest.mark.parametrize("command", starting("make"))
def test_make_target_exists(command):
    subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("command", ours("serve"))
def test_serve_command_becomes_a_server(command, monkeypatch):
    """`test_vllm_server.py` starts a real one; here it ends where vLLM, and for some a GPU, is needed."""
    became = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(os, "execve", lambda *arguments: became.append(arguments))
    monkeypatch.setattr("mt_grpo.app.serve.check_vllm", lambda: None)
    main([*words(command)[1:], "--model_name_or_path", "embedded"])  # others are not at hand
    ((_, server, _),) = became
    assert "vllm.entrypoints.openai.api_server" in server


LINES = [(page.name, line) for page in [*PAGES, *RECIPES] for line in page.read_text().splitlines()]
"""All that may be copied."""


def test_the_server_has_the_gpu_after_those_that_train():
    """Elsewhere vLLM takes 92 % of the first of the trainer's."""
    pattern = r"(\S* )mt-grpo serve --config (recipes/(?!quickstart)[\w./]+)"
    started = [(name, *found.groups()) for name, line in LINES for found in re.finditer(pattern, line)]
    texts = {path.name: path.read_text() for path in RECIPES if path.parent.name == "Qwen"}
    served = {name for name, text in texts.items() if "\nuse_vllm: true" in text and "mode: colocate" not in text}
    assert {name for name, _, _ in started} >= {"scale.md", *served}
    for _, before, recipe in started:
        assert before.partition(",")[0].rstrip().endswith(f"CUDA_VISIBLE_DEVICES={processes_of(ROOT / recipe)}")


CUDA_OF_TORCH = {"2.13.0": "13.0"}
"""The CUDA that the build of a torch on PyPI is made for; vLLM's is made for the same torch."""


def test_the_image_has_the_cuda_and_python_of_torch():
    pinned = re.search(r"TORCH-torch==([\d.]+)", (ROOT / "scripts" / "install.sh").read_text())[1]
    image = re.search(r"FROM nvidia/cuda:([\d.]+)-devel-ubuntu([\d.]+)", (ROOT / "Dockerfile").read_text())
    assert image[1].rsplit(".", 1)[0] == CUDA_OF_TORCH[pinned]
    assert image[2] == "24.04"  # its python3 is 3.12; the project takes 3.11 and later


def test_benchmarks_exist():
    named = {name for page in PAGES for name in re.findall(r"python\s+(benchmarks/\w+\.py)", page.read_text())}
    assert named and [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_mt_grpo_command_works(command, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    name, *arguments = words(command)[1:]
    arguments += ["--dry_run"] * (name == "train" and "--output_dir" in arguments)  # another command trains the recipe
    arguments += [*shlex.split(SMALL[name]), "--output_dir", str(tmp_path / "run")]
    if "recipes/distillation.yaml" in arguments:  # its teacher is what another command trains
        arguments += ["--teacher", "embedded"]
    assert main([name, *arguments]) == 0
    trains = name == "train" and "--dry_run" not in arguments
    assert (tmp_path / "run" / "summary.json").exists() == trains


@pytest.mark.slow
@pytest.mark.parametrize("command", REPLAY)
def test_replay_command_trains_on_a_run(command, tmp_path, monkeypatch):
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    monkeypatch.chdir(tmp_path)
    folder = Path(words(command)[words(command).index("--replay") + 1])
    assert main(["train", recipe, *shlex.split(SMALL["train"]), "--output_dir", str(folder)]) == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main(words(command)[1:]) == 0
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    again = Path(words(command)[words(command).index("--output_dir") + 1])
    assert json.loads((again / "summary.json").read_text())["steps"] == 1
    assert [row["mode"] for row in open_run(again).rows] == ["train"] * 8


@pytest.mark.slow
@pytest.mark.parametrize("command", ours("eval"))
def test_eval_command_compares_models(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("recipes").symlink_to(ROOT / "recipes")
    shutil.copytree(ROOT / "mt_grpo" / "data" / "embedded" / "model", "runs/quickstart")
    assert main([*words(command)[1:], "--num_prompts", "4", *shlex.split(FEW)]) == 0
    said = capsys.readouterr().out
    assert "quickstart minus embedded: reward +0.000" in said and "reward by hops" in said
    assert Runs("evals/quickstart").answer("runs", {})["runs"]


@pytest.mark.parametrize("command", ours("doctor"))
def test_doctor_command_finds_nothing_wrong(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main([*words(command)[1:], "--output_dir", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "ok    processes" in out and "nothing stands in the way of this run" in out


@pytest.mark.parametrize("command", [each for each in starting("mt-grpo") if each not in TESTED_ELSEWHERE])
def test_command_without_a_trainer_works(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words(command)[1:]) == 0
    printed, errors = capsys.readouterr()
    assert printed and not errors


@pytest.mark.parametrize("command", {tuple(words(each)[1:]): each for each in ours("view")}.values())
def test_view_command_shows_a_run(command, tmp_path):
    folder = words(command)[2]
    write_run(tmp_path / folder, steps=1)
    arguments = [sys.executable, "-m", "mt_grpo", *words(command)[1:]]
    arguments += [] if "--export" in command else ["--no_browser"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            said = process.stdout.readline()
            if "--export" in command:
                assert process.wait(120) == 0 and (tmp_path / said.split(":")[0]).exists()
                return
            with urllib.request.urlopen(said.split(" is at ")[1].split()[0], timeout=60) as page:
                assert page.status == 200
        finally:
            process.kill()


@pytest.mark.parametrize("command", LAUNCHED)
def test_launched_command_fits_and_asks_for_its_gpus(command, monkeypatch, capsys):
    """They are not at hand: the recipe is parsed for its processes, and the launch says what it lacks."""
    monkeypatch.chdir(ROOT)
    (recipe,) = [word for word in words(command) if word.endswith(".yaml")]
    processes = processes_of(ROOT / recipe)
    monkeypatch.setattr(MTGRPOConfig, "world_size", processes)
    preflight.check_batch_sizes(parse_recipe([recipe]).training)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert main(words(command)[1:]) == 1
    assert f"takes {processes} GPUs, a process each, and this machine has 1" in capsys.readouterr().err


@pytest.mark.parametrize("command", starting("accelerate"))
def test_accelerate_command_works_up_to_its_gpus(command, monkeypatch, capsys):
    """Seven GPUs are not at hand: one process says so, as one of seven."""
    _, launch, flag, config, script, *arguments = shlex.split(command)
    assert (launch, flag) == ("launch", "--config_file")
    assert (ROOT / config).exists() and (ROOT / script).exists()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(MTGRPOConfig, "world_size", load_config_from_file(config).num_processes)
    monkeypatch.setattr(request, "WORLD_SIZES", ("PROCESSES_OF_THE_TEST",))  # torch would wait for the other six
    monkeypatch.setenv("PROCESSES_OF_THE_TEST", str(load_config_from_file(config).num_processes))
    monkeypatch.setattr(preflight, "has_bfloat16", lambda: False)
    assert main(["train", *arguments]) == 1
    assert "mt-grpo: `bf16: true` needs a GPU" in capsys.readouterr().err


FIRST, AGENT = [block for _, block in blocks("python", "README.md")]
"""The first screen's training, and the tools and rewards that the recipe names."""

STEPS = "max_steps=20, per_device_train_batch_size=48"


@pytest.mark.slow
def test_the_first_screen_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert STEPS in FIRST
    namespace = {"__name__": "docs"}
    exec(compile(FIRST.replace(STEPS, "max_steps=1, per_device_train_batch_size=8"), "README.md", "exec"), namespace)
    assert namespace["trainer"].state.global_step == 1
    assert (tmp_path / "runs" / "first" / "metrics.jsonl").exists()


def results(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def rows(name: str, label: str = "") -> list[dict]:
    return [row for row in results(name)["rows"] if not label or label in row.values()]


def middle(values, digits, factor=1):
    return f"{statistics.median(values) * factor:.{digits}f}"


def spread(values, digits):
    return f"{middle(values, digits)} ({min(values):.{digits}f} to {max(values):.{digits}f}"


def of_readme():
    before, after = (results("quickstart")[when] for when in ("before", "after"))
    yield from (f"| {label} | {before[name]:.2f} | {after[name]:.2f} |" for name, label in MEASURES.items())
    [long], [short] = (
        rows("step_cpu", "same, 12 turns"),
        rows("step_cpu", "prompt 512, group 8, 4 turns, extension holds"),
    )
    [varying] = rows("rollout", "rollouts, TRL / ours, 32 x 4 log-normal tools")
    [step] = rows("rollout", "whole step, TRL / ours, 32 x one 50 ms tool")
    [thinking] = rows("tokens_trained", "qwen3, 8 turns of 300 + 100 tokens")
    assert thinking["share"]["ours"] == 1
    yield f"trains {100 * thinking['share']['TRL']:.1f} %"
    for factor in (
        f"{short['ratio']['median']:.1f}",
        f"{long['ratio']['median']:.0f}",
        f"{long['peak_mib']['trl'] / long['peak_mib']['tree']:.1f}",
        f"{spread(varying['values'], 1)})",
        f"{spread(step['values'], 0)})",
        f"{thinking['ratio']['median']:.1f}",
    ):
        yield f" | {factor} | `benchmarks/"


def of_measurements():
    for row in rows("step_cpu"):
        ratio = f"{row['ratio']['median']:.2f} ({row['ratio']['minimum']:.2f})"
        yield f"| {middle(row['seconds']['trl'], 2)} | {middle(row['seconds']['tree'], 2)} | {ratio} |"
    for row in rows("step_teacher_cpu"):
        ratio = f"{row['ratio']['median']:.2f} ({row['ratio']['minimum']:.2f})"
        assert row["ratio_over_limit"]["median"] >= 0.8
        yield f"{middle(row['seconds']['tree'], 2)} | {ratio} | {row['ratio_over_limit']['median']:.2f} |"
    yield f"{middle([row['hidden'] for row in rows('teacher_server')], 2)[1:]} of what it takes after the last one"
    yield from (f"| {row['ratio']['median']:.1f} ({row['ratio']['minimum']:.1f}) |" for row in rows("head"))
    yield from (f"| {row['ratio']['median']:.0f} ({row['ratio']['minimum']:.0f}) |" for row in rows("packing"))
    yield from (f"| {middle(rows('tree_row')[0]['seconds'][side], 2)} |" for side in ("trl", "tree"))
    yield from (f"{middle(row['values'], 2)} of its time" for row in rows("answers") if "target" in row)
    loops = [row for row in rows("rollout") if row["label"].startswith("event-loop") and "CPU" in row["label"]]
    yield from (f"| {middle(row['values'], 1)} (" for row in loops)
    yield from (f"| {middle(row['wall'], 0, 1e3)} | {middle(row['cpu'], 0, 1e3)} |" for row in rows("weight_sync")[:5])
    yield f"| {rows('weight_sync')[-2]['wall ratio']['median']:.2f} | ≥ 0.7 |"
    yield from (f"| {row['tree']['largest']:.1e} |" for row in rows("parity"))
    for ratio in (row["ratio"] for row in rows("environment_pool")):
        least_to_most = f"({ratio['minimum']:.2f} to {ratio['maximum']:.2f}"
        yield f"took {ratio['median']:.2f} times as long on one server as on two {least_to_most},"
    threads, processes = (row["values"] for row in rows("tool_processes"))
    ratios = [one / other for (one, _), (other, _) in zip(threads, processes, strict=True)]
    least_to_most = spread(ratios, 2).partition(" ")[2]
    yield f"took {middle(ratios, 2)} times as long in threads as in two processes {least_to_most},"
    late = [statistics.median(late for _, late in way) for way in (threads, processes)]
    yield f"late by {late[0]:.1f} s in threads and {1e3 * late[1]:.0f} ms in processes"


def of_accuracy():
    measured = [row for row in rows("methods") if row["RMSE"]]
    yield from (f"| {row['method']} | {row['RMSE']:.1e} | {row['RMSE to float32']:.1e} |" for row in measured)


def of_any_agent():
    measured, forms = results("endpoint"), results("bring_your_own")["rows"]
    assert measured["at_once"]["lost"] == 0 and measured["added_ms"] <= measured["settings"]["aim_ms"]
    yield f"HTTP adds {measured['added_ms']:.2f} ms"
    yield f"takes {measured['rows']['in process']['cpu_ms']:.2f} ms without it"
    for form in ("openai", "program"):
        before, after = (f"{forms[form][when]['exact_match']:.3f}" for when in ("before", "after"))
        yield f"goes from {before} exact match to {after} in {forms[form]['steps']} steps"


@pytest.mark.parametrize(
    ("page", "figures"),
    [
        ("README.md", of_readme),
        ("benchmarks/reports/measurements.md", of_measurements),
        ("docs/any_agent.md", of_any_agent),
        ("benchmarks/reports/accuracy.md", of_accuracy),
    ],
)
def test_a_page_has_the_committed_figures(page, figures):
    """Where a benchmark has run again, its page follows."""
    text = " ".join((ROOT / page).read_text().split())
    assert [figure for figure in figures() if figure.strip() not in text] == []


FRAMEWORKS = tuple(f"from {name}" for name in ("agents ", "langchain_core.", "pydantic_ai ", "smolagents "))
"""How blocks begin that need packages which `make interop-agents` installs; it runs them."""


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if "```python" in page.read_text() and page.name != "example.md"],
    ids=lambda p: p.name,
)
def test_python_blocks_run(page, tokenizer, tmp_path, questions, monkeypatch):
    keep_estimators(monkeypatch)
    keep(monkeypatch, REWARDS)
    namespace = {"__name__": "docs"}
    for name, block in blocks("python", page.name):
        if block != FIRST and not block.startswith(FRAMEWORKS):
            exec(compile(block, name, "exec"), namespace)
    if page.name == "agents.md":
        result = namespace["converse"](build_model(tokenizer, max_position_embeddings=2048), tokenizer)
        assert len(result["ids"][0]) == len(result["mask"][0]) > 0
    if page.name == "images.md":
        processor, options = build_processor("qwen3_vl"), {**CPU_RUN, "max_steps": 1, "max_turn_length": 8}
        trainer = namespace["build"](build_vision_model(processor.tokenizer), processor, str(tmp_path), **options)
        trainer.train()
        assert all(one.media for one in trainer.batch.trajectories)
    if page.name == "rollouts.md":
        assert "42" in tokenizer.decode(namespace["replay"](tokenizer)["ids"][0])
    if page.name == "README.md":
        ((_, block),) = blocks("yaml", page.name)
        named = yaml.safe_load(block)
        asked = [*named["tools"], *named["turn_reward_funcs"], *named["outcome_reward_funcs"]]
        assert all(callable(namespace[path.removeprefix("my_agent.")]) for path in asked)


def test_the_recipe_of_the_readme_trains_as_printed(tmp_path, monkeypatch):
    """On the device that is there; its model is not at hand, and the tests' time is short."""
    ((_, recipe),) = blocks("yaml", "README.md")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_agent", raising=False)
    (tmp_path / "my_agent.py").write_text(AGENT)
    (tmp_path / "my_agent.yaml").write_text(recipe)
    (tmp_path / "questions.jsonl").write_text('{"prompt": "Which country has Lima as its capital?", "answer": "Peru"}')
    short = ["--model_name_or_path", "embedded", "--max_steps", "2", "--max_turn_length", "16"]
    assert main(["train", *shlex.split(recipe.splitlines()[0].split("mt-grpo train ")[1]), *short]) == 0
    lines = (tmp_path / "runs" / "my_agent" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if '"loss"' in line] == [1, 2]
