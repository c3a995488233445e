"""The examples of the pages on agents, environments, tools, credit and rewards work as they are written."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from support.conversations import play
from support.recipes import parse_recipe
from support.registered import keep, keep_estimators

from mt_grpo.cli import main
from mt_grpo.envs.tool_env import execute_calls
from mt_grpo.rewards import REWARDS, load_rewards
from mt_grpo.runlog import open_run, read_trajectories
from mt_grpo.tools import ToolSession, calculator, load_tools_file
from mt_grpo.trajectory import ToolCall

ROOT = Path(__file__).parent.parent
SHORT = ["--max_steps", "1", "--per_device_train_batch_size", "8", "--max_turn_length", "12", "--output_dir", "run"]
OF_TOOLS = ("tools", "system_prompt", "call_protocol", "max_env_steps", "turn_reward_funcs", "column_mapping")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Writes files of a page into the current folder: its blocks that follow a sentence with their names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    modules = []

    def write(page: str, *names: str) -> None:
        text = (ROOT / "docs" / page).read_text()
        for name in names:
            (block,) = re.findall(rf"`{re.escape(name)}`:\n\n```\w+\n(.*?)```", text, re.DOTALL)
            Path(name).write_text(block)
            modules.append(Path(name).stem)
            monkeypatch.delitem(sys.modules, modules[-1], raising=False)

    yield write
    for name in modules:
        sys.modules.pop(name, None)


def recipe(example: str, without=(), rows=None, **options) -> str:
    """The quickstart's recipe with the options of a page's, on these rows."""
    whole = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    whole = {name: value for name, value in whole.items() if name not in without} | yaml.safe_load(example) | options
    if rows is None:
        whole |= {"dataset_train_split": "train[:8]", "do_eval": False}
    else:
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        whole |= {"dataset_name": "rows.jsonl", "do_eval": False}
    Path("recipe.yaml").write_text(yaml.safe_dump(whole))
    return "recipe.yaml"


# Agents

LOOP, PROGRAM, *_ = [block for block in blocks("any_agent.md", "yaml") if block.startswith("agent:")]
CITIES = [{"question": f"How many live in city {number}?", "answer": "million"} for number in range(4)]


@pytest.mark.slow
def test_the_loop_of_the_page_trains(example):
    example("any_agent.md", "my_agent.py")
    assert main(["train", recipe(LOOP, OF_TOOLS, CITIES), *SHORT]) == 0
    lines = list(read_trajectories("run"))
    assert len(lines) == 8 and {line["error"] for line in lines} == {None}
    assert all(line["env_rewards"].keys() == {"right"} for line in lines)
    assert all(line["prompt"] == [{"role": "user", "content": line["row"]["question"]}] for line in lines)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_program_of_the_page_is_rolled_out(example, capsys):
    example("any_agent.md", "my_agent.py", "agent.sh")
    assert main(["rollout", recipe(PROGRAM, OF_TOOLS, CITIES), *SHORT[4:], "--num_prompts", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("outcome reward env_reward: 0") == 2 and "env_error" not in shown


# Environments


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "module", "row", "rewards"),
    [
        ("trl_environments.md", "counting", {"prompt": "Use the tool.", "target": 3}, {"Counter"}),
        ("games.md", "guessing", {"prompt": "Play.", "seed": 3}, {"env_reward"}),
    ],
)
def test_the_example_of_the_page_trains(example, page, module, row, rewards):
    example(page, f"{module}.py")
    (options,) = blocks(page, "yaml")
    rows = [{**row, list(row)[1]: number} for number in range(4)]
    assert main(["train", recipe(options, (*OF_TOOLS, "outcome_reward_funcs"), rows), *SHORT]) == 0
    [*_, last] = read_trajectories("run")
    assert last["stop_reason"] != "env_error", last["error"]
    assert last["rewards"]["outcome"].keys() == rewards


@pytest.mark.slow
def test_the_example_of_a_scheduler_trains_in_a_recipe(example, monkeypatch):
    keep(monkeypatch, REWARDS)
    (code,), (options,) = blocks("schedulers.md", "python"), blocks("schedulers.md", "yaml")
    Path("doubt.py").write_text(code)
    rows = [{"prompt": "What is 6*7?", "solution": "42"}] * 16
    whole = recipe(options, ("tools", "max_env_steps", "turn_reward_funcs"), rows, dataset_train_split="train")
    assert main(["train", whole, *SHORT]) == 0
    assert [line["error"] for line in read_trajectories("run")] == [None] * 8


@pytest.mark.parametrize(
    ("page", "word", "resolved"),
    [
        ("branching.md", "", {"branch_at": 2, "num_branches": 4}),
        ("rewards.md", "information_gain", {"advantage_estimator": "reward_to_go"}),
        ("credit.md", "answer_logprob", {"advantage_estimator": "state_baseline"}),
    ],
)
def test_the_recipe_of_a_page_is_in_place(example, capsys, page, word, resolved):
    (options,) = [block for block in blocks(page, "yaml") if word in block]
    assert main(["train", recipe(options), "--dry_run", "--output_dir", "run"]) == 0
    assert resolved.items() <= yaml.safe_load(capsys.readouterr().out).items()


def test_a_factory_needs_no_dataset(example, capsys):
    example("trl_environments.md", "counting.py")
    options = {"model_name_or_path": "embedded", "environment_factory": "counting.py:Counter", "use_cpu": True}
    Path("recipe.yaml").write_text(yaml.safe_dump(options | {"bf16": False, "output_dir": "run"}))
    for more, said in (
        ([], "There is no dataset, so `reset` of the environment gives the prompts"),
        (["--do_eval", "--max_steps", "1"], "`do_eval: true` needs a dataset"),
    ):
        assert main(["train", "recipe.yaml", *more, "--dry_run"]) == 1
        assert said in capsys.readouterr().err


def test_the_example_of_the_reference_pays_and_counts_down():
    (code,), namespace = blocks("reference.md", "python"), {"__name__": "docs"}
    exec(code, namespace)
    env = namespace["Countdown"]([calculator], max_steps=3, protocol="learnt_tags")
    call = '<tool>{"name": "calculator", "args": {"expression": "%s"}}</tool>'
    ((trajectory,), _) = play(env, [call % "6 * 7", call % "six", "nothing", "<answer>42</answer>"])
    assert [turn.reward for turn in trajectory.turns] == [1, 0, 0, None]
    left = [turn.replies[-1]["content"].splitlines()[-1] for turn in trajectory.turns[:3]]
    assert left == ["2 replies left.", "1 replies left.", "0 replies left."] and trajectory.answer == "42"


# Tools


async def converse(row: dict, *calls: ToolCall) -> tuple:
    session = ToolSession(load_tools_file("tools.yaml"), row, 30.0)
    await execute_calls(list(calls), session.tools, 30.0)
    step_reward, rewards = session.take_reward(), await session.rewards()
    await session.release()
    return [call.result for call in calls], step_reward, rewards


@pytest.mark.slow
def test_the_example_of_an_mcp_server_works(example):
    pytest.importorskip("mcp.server.mcpserver", exc_type=ImportError)  # the page shows that of mcp 2
    example("mcp.md", "library.py", "servers.json", "tools.yaml")
    servers = json.loads(Path("servers.json").read_text())
    servers["mcpServers"]["library"]["command"] = sys.executable  # the tests' environment need not be the shell's
    Path("servers.json").write_text(json.dumps(servers))
    calls = [ToolCall("look_up", {"title": "Lima"}), ToolCall("look_up", {"title": "Rome"})]
    assert asyncio.run(converse({}, *calls)) == (["A port of Peru.", "No such book."], None, {})


def test_the_example_of_a_stateful_tool_works(example):
    example("stateful_tools.md", "my_tools.py", "tools.yaml")
    (row,) = blocks("stateful_tools.md", "json")
    calls = [ToolCall("guess", {"guess": 5}), ToolCall("guess", {"guess": 7})]
    results, step_reward, rewards = asyncio.run(converse(json.loads(row), *calls))
    assert results == ["2 away", "0 away"]
    assert step_reward == pytest.approx(0.2) and rewards == {"guess": 1.0}


# Credit and rewards


def of_credit(language: str, word: str = "") -> list[str]:
    return [block for block in blocks("credit.md", language) if word in block]


def train(options: dict, *arguments: str) -> None:
    short = [*SHORT, "--max_turn_length", "16", *arguments, "--overwrite_output_dir", "true"]
    assert main(["train", recipe(yaml.safe_dump(options)), *short]) == 0


def test_the_example_of_a_credit_rule_trains_in_a_recipe(example, monkeypatch, capsys):
    """With the YAML of the page; that of a built-in rule with an option is understood."""
    _, rule, with_parts = of_credit("python")
    keep_estimators(monkeypatch)
    Path("turn_only.py").write_text(rule + with_parts)
    *_, named, with_option = map(yaml.safe_load, of_credit("yaml"))
    whole = recipe(yaml.safe_dump({**named, **with_option}))
    assert main(["train", whole, "--dry_run", "--output_dir", "run"]) == 0
    assert with_option.items() <= yaml.safe_load(capsys.readouterr().out).items()
    train(named)
    for name in ("summary.json", "config.yaml"):  # JSON is YAML
        recorded = yaml.safe_load(Path("run", name).read_text())
        assert recorded["advantage_estimator"] == named["advantage_estimator"]
    train(named, "--advantage_estimator", "turn_only_in_parts")
    run = open_run("run")
    turns = [turn for row in run.rows for turn in run.trajectory(row["session"])["turns"]]
    assert {part["name"] for turn in turns for part in turn["parts"]} == {"turn reward", "baseline"}


def test_the_example_of_a_state_score_fits_its_recipe(example):
    Path("my_scores.py").write_text(of_credit("python")[0])
    options = parse_recipe([recipe(of_credit("yaml", "Found")[0])]).training
    (score,) = load_rewards([options.state_score], "state")
    assert score.name == "Found" and options.advantage_estimator == {"name": "state_baseline", "lam": 0.9}
