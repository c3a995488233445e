"""Environments of verifiers as options name them, where verifiers need not be installed."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import yaml
from support.agents import END, run_agent
from support.models import CPU_RUN

from mt_grpo.cli import main
from mt_grpo.envs import Outcome
from mt_grpo.errors import ConfigError
from mt_grpo.integrations.verifiers import VerifiersSource, example_of, kept_signals
from mt_grpo.options.values import verifiers_name
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training.environment import check_env
from mt_grpo.trajectory import StopReason

ROOT = Path(__file__).parents[2]
missing = pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="verifiers is installed")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"env": "verifiers:"}, "`env: verifiers:` names no environment: write `verifiers:NAME`"),
        ({"env": "verifiers:x", "env_config": "{x"}, "`env_config` is '{x', which is not a JSON mapping"),
        ({"env": "verifiers:x", "env_config": 3}, "`env_config` is 3: give a mapping"),
        ({"env": "a.b", "env_config": {}}, "has an effect with `env: verifiers:NAME` only"),
        ({"env_config": {"a": 1}}, "has an effect with `env: verifiers:NAME` only"),
        ({"env": "verifiers:x", "tools": ["calculator"]}, "`tools` and `env` are both set"),
        ({"env": "verifiers:x", "system_prompt": "S"}, "an environment of verifiers brings its own tools"),
        ({"env": "verifiers:x", "agent": "a.b"}, "`env` and `agent` both say who answers the model"),
        ({"environments": {"v": {"env": "verifiers:x", "tools": ["calculator"]}}}, "`tools` and `env` of `environme"),
        ({"environments": {"v": {"env": "a.b", "env_config": {}}}}, "`env_config` of `environments: v` has an effect"),
    ],
)
def test_contradicting_options_are_refused(options, problem, tmp_path):
    with pytest.raises(ConfigError, match=problem):
        check_env(None, MTGRPOConfig(str(tmp_path), **options, **CPU_RUN))


@missing
@pytest.mark.parametrize("options", [{"env": "verifiers:x"}, {"environments": {"v": "verifiers:x"}}])
def test_a_missing_package_is_named(options, tmp_path):
    with pytest.raises(
        ConfigError, match=r"needs verifiers, which is not installed: `pip install mt-grpo\[verifiers\]`"
    ):
        check_env(None, MTGRPOConfig(str(tmp_path), system_prompt="S" if "env" not in options else None, **options))


@missing
def test_a_recipe_of_verifiers_needs_no_dataset(tmp_path, capsys):
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    for option in ("dataset_name", "tools", "system_prompt", "max_env_steps", "turn_reward_funcs"):
        del recipe[option]
    recipe |= {"env": "verifiers:x", "outcome_reward_funcs": ["env_reward"], "output_dir": str(tmp_path / "run")}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 1
    assert "needs verifiers, which is not installed" in capsys.readouterr().err


def test_prompts_of_text_and_of_parts_make_one_table():
    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "text", "text": "Which colour?"}]
    prompt = [{"role": "system", "content": "Look."}, {"role": "user", "content": parts}]
    source = VerifiersSource.__new__(VerifiersSource)
    source.environment = SimpleNamespace(rows=lambda split: [{"prompt": prompt, "answer": "red"}] * 2)
    rows = source.rows("train")
    system, asked = rows[1]["prompt"]
    assert rows["example"] == [0, 1] and system["content"][0]["text"] == "Look."
    assert [part["text"] for part in asked["content"]] == [None, "Which colour?"]


def test_names_of_verifiers_are_told_from_paths():
    assert verifiers_name("verifiers:owner/some-env") == "owner/some-env"
    assert verifiers_name("verifiers.py:env") is None and verifiers_name(None) is None


def test_a_row_names_its_example():
    assert example_of({"example": 3}) == ("train", 3) and example_of({"example": 0, "split": "eval"}) == ("eval", 0)
    for row in ({}, {"example": -1}, {"example": True}, {"example": 1, "split": "test"}):
        with pytest.raises(ValueError, match="is the number of an example"):
            example_of(row)


def test_signals_are_left_alone_beside_the_main_thread():
    async def nested():
        with kept_signals():
            return True

    assert asyncio.run(asyncio.wait_for(asyncio.to_thread(asyncio.run, nested()), 120))


def test_an_agent_may_return_an_outcome_and_name_its_session():
    async def agent(row, client):
        client.add_session(f"trace-{row['number']}")
        url = client.base_url.replace(f"/{client.session}/", "/")
        headers = {"X-Session-ID": f"trace-{row['number']}", "Authorization": f"Bearer {client.api_key}"}
        async with httpx.AsyncClient() as asking:
            body = {"messages": [{"role": "user", "content": "Q"}]}
            answer = await asking.post(f"{url}/chat/completions", json=body, headers=headers)
        with pytest.raises(ValueError, match="has the name"):
            client.add_session(f"trace-{row['number']}")
        said = answer.json()["choices"][0]["message"]["content"]
        return Outcome({"right": 1.0}, StopReason.MAX_STEPS, said, {"seen": row["number"]})

    trajectories, runner = run_agent(agent, lambda session, turn: f"A{session}{END}", rows=[{}] * 2)
    for number, trajectory in enumerate(trajectories):
        assert trajectory.answer == f"A00{number}" and trajectory.env_rewards == {"right": 1.0}
        assert trajectory.stop_reason is StopReason.MAX_STEPS and trajectory.info == {"seen": number}
    assert runner.env.endpoint._conversations == {}
