"""Agents, and environments of verifiers, named in options: trained on what was sampled, and refused."""

import asyncio
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import yaml
from support.agents import END, run_agent
from support.models import CPU_RUN
from support.trainers import assert_near, batch, check_log_probs, gradient

from mt_grpo.cli import main
from mt_grpo.data import load_rows
from mt_grpo.envs import Outcome
from mt_grpo.errors import ConfigError
from mt_grpo.integrations.openai_api import AgentSource, Command
from mt_grpo.integrations.verifiers import VerifiersSource, _example_of, _kept_signals
from mt_grpo.options.values import verifiers_name
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.training.environment import check_env
from mt_grpo.trajectory import StopReason

ROOT = Path(__file__).parents[2]
TOOLS = ["calculator"]
LOOP = f"{ROOT / 'benchmarks' / 'agents' / 'openai_loop.py'}:solve"
missing = pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="verifiers is installed")
INSTALL = "needs verifiers, which is not installed: `pip install mt-grpo[verifiers]`"


async def compacting(row, client):
    """Asks a sub-agent, then goes on; in the end with a summary instead of what was said."""
    asking, messages = client.openai().chat.completions, list(row["prompt"])
    for number in range(3):
        said = await asking.create(model="m", messages=messages, stop=["e", "a"], max_tokens=12)
        messages += [said.choices[0].message, {"role": "user", "content": f"More {number}"}]
    await asking.create(model="m", messages=[{"role": "user", "content": "A sub-agent's question"}], max_tokens=5)
    messages = [*row["prompt"], {"role": "assistant", "content": "A summary."}, messages[-1]]
    last = await asking.create(model="m", messages=messages, max_tokens=6, n=2)
    return float(len(last.choices[0].message.content) + last.usage.completion_tokens)


def of_agent(build, agent, **options):
    return build(None, env=AgentSource(agent), rewards=((), ["env_reward"]), eval_dataset=None, **options)


def test_an_openai_loop_is_trained_as_it_was_sampled(tmp_path):
    rows = load_rows("embedded", "train[:2]")
    options = {"agent": LOOP, "call_protocol": "learnt_tags", "max_turn_length": 48, "max_completion_length": 320}
    args = MTGRPOConfig(str(tmp_path), max_steps=1, **options, **CPU_RUN)
    trainer = MTGRPOEnvTrainer("embedded", None, [], ["exact_match_reward_func"], args, train_dataset=rows)
    check_log_probs(trainer, batch(trainer))
    made = trainer.batch.trajectories
    assert {(each.tree.num_sequences, each.failed, each.render_mismatch) for each in made} == {(1, False, None)}
    assert any(turn.has_result for trajectory in made for turn in trajectory.turns)


def test_a_loop_that_rewrites_has_the_loss_of_a_forward_a_turn(build):
    gradients = []
    for forward in ("tree", "turn_by_turn"):
        trainer = of_agent(build, compacting, forward=forward, seed=3)
        inputs = batch(trainer)
        assert {(each.error, each.tree.num_sequences) for each in trainer.batch.trajectories} == {(None, 4)}
        if forward == "tree":
            check_log_probs(trainer, inputs)
        gradients.append(gradient(trainer, inputs)[1])
    assert_near(*gradients)


def test_a_failing_agent_does_not_end_the_run(build):
    async def agent(row, client):
        said = await client.openai().chat.completions.create(model="m", messages=row["prompt"], max_tokens=4)
        if "a" in said.choices[0].message.content:
            raise KeyError("a")
        return float(len(said.choices[0].message.content))

    (trainer := of_agent(build, agent, rollout_timeout=60.0)).train()
    reasons = {trajectory.stop_reason for trajectory in trainer.batch.trajectories}
    assert reasons <= {StopReason.ENV_DONE, StopReason.ENV_ERROR}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"agent": 3}, "`agent` is 3: give the path of a function"),
        ({"agent": "{x"}, "is not a JSON mapping"),
        ({"agent": {"comand": "ls"}}, "unknown key 'comand'; the nearest is 'command'"),
        ({"agent": {"command": "ls", "function": "a.b"}}, "has to name one thing that runs"),
        ({"agent": {"host": "127.0.0.1"}}, "has to name one thing that runs"),
        ({"agent": {"command": ""}}, "`agent: command` is '': string should have at least 1 char"),
        ({"agent": {"command": "echo 'a"}}, "close its quotes"),
        ({"agent": {"command": "no-such-program x"}}, "is no program here"),
        ({"agent": {"command": "cat", "host": "192.0.2.1"}}, "host: 192.0.2.1}` cannot be listened at (Cannot assign"),
        ({"agent": {"command": "cat", "host": "no.invalid"}}, "host: no.invalid}` cannot be listened at ("),
        ({"agent": "a.b", "tools": TOOLS}, "`tools` and `agent` are both set"),
        ({"agent": "a.b", "system_prompt": "S"}, "`system_prompt` and `agent` are both set"),
        ({"agent": "a.b", "env": "c.d"}, "`env` and `agent` both say who answers the model"),
        ({"agent": "a.b", "multi_turn_scheduler": "gym_scheduler"}, "both set, and a scheduler holds"),
        ({"agent": "json.detect_encoding"}, "): give a function that is called with the row and the client"),
        ({"environments": {"one": {"agent": "json.loads", "tools": TOOLS}}}, "`agent` of `environments: one`"),
        ({"environments": {"one": {"agent": {"host": "h"}}}}, "`environments: one: agent` has to name"),
        # environments of verifiers
        pytest.param({"env": "verifiers:x"}, INSTALL, marks=missing),
        pytest.param({"environments": {"v": "verifiers:x"}, "system_prompt": "S"}, INSTALL, marks=missing),
        ({"env": "verifiers:"}, "`env: verifiers:` names no environment: write `verifiers:NAME`"),
        ({"env": "verifiers:x", "env_config": "{x"}, "`env_config` is '{x', which is not a JSON mapping"),
        ({"env": "verifiers:x", "env_config": 3}, "`env_config` is 3: give a mapping"),
        ({"env": "a.b", "env_config": {}}, "has an effect with `env: verifiers:NAME` only"),
        ({"env_config": {"a": 1}}, "has an effect with `env: verifiers:NAME` only"),
        ({"env": "verifiers:x", "tools": TOOLS}, "`tools` and `env` are both set"),
        ({"env": "verifiers:x", "system_prompt": "S"}, "an environment of verifiers brings its own tools"),
        ({"env": "verifiers:x", "agent": "a.b"}, "`env` and `agent` both say who answers the model"),
        ({"environments": {"v": {"env": "verifiers:x", "tools": TOOLS}}}, "`tools` and `env` of `environme"),
        ({"environments": {"v": {"env": "a.b", "env_config": {}}}}, "`env_config` of `environments: v` has an effect"),
    ],
)
def test_options_that_contradict_who_answers_are_refused(options, problem, tmp_path):
    with pytest.raises(ConfigError) as error:
        check_env(None, MTGRPOConfig(str(tmp_path), **CPU_RUN, **options))
    assert problem in str(error.value)


def test_agents_may_be_some_of_the_environments(tmp_path):
    named = {"loop": {"agent": LOOP}, "program": {"agent": {"command": "cat -n"}}, "tools": {"tools": ["calculator"]}}
    args = MTGRPOConfig(str(tmp_path), environments=named, system_prompt="S", max_env_steps=2, **CPU_RUN)
    env = check_env(None, args)
    assert isinstance(env["loop"], AgentSource) and isinstance(env["program"].agent, Command)
    assert env["program"].agent.arguments == ["cat", "-n"] and env["tools"].system_prompt == "S"


ENV = {"env": "verifiers:x", "outcome_reward_funcs": ["env_reward"]}
WITHOUT = dict.fromkeys(("dataset_name", "tools", "system_prompt", "max_env_steps", "turn_reward_funcs"))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"agent": LOOP}, "`tools` and `agent` are both set"),
        ({"agent": "gone.py:solve", "tools": None, "system_prompt": None, "max_env_steps": None}, "no file 'gone.py'"),
        pytest.param(ENV | WITHOUT, INSTALL, marks=missing),  # which need no dataset
    ],
)
def test_an_agent_is_refused_before_anything_slow_is_imported(options, problem, tmp_path, capsys):
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text()) | options
    recipe = {name: value for name, value in recipe.items() if value is not None}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"output_dir": str(tmp_path / "run")}))
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 1
    assert problem in capsys.readouterr().err


# Environments of verifiers, which need not be installed


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
    names = {"verifiers:owner/some-env": "owner/some-env", "verifiers.py:env": None, None: None}
    assert {name: verifiers_name(name) for name in names} == names


@pytest.mark.parametrize("row", [{}, {"example": -1}, {"example": True}, {"example": 1, "split": "test"}])
def test_a_row_names_its_example(row):
    assert _example_of({"example": 3}) == ("train", 3) and _example_of({"example": 0, "split": "eval"}) == ("eval", 0)
    with pytest.raises(ValueError, match="is the number of an example"):
        _example_of(row)


def test_signals_are_left_alone_beside_the_main_thread():
    async def nested():
        with _kept_signals():
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
    found = [(each.answer, each.env_rewards, each.stop_reason, each.info) for each in trajectories]
    assert found == [(f"A00{n}", {"right": 1.0}, StopReason.MAX_STEPS, {"seen": n}) for n in range(2)]
    assert runner.env.endpoint._conversations == {}
