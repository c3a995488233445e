"""Agents named in options: trained on what was sampled, and refused where options contradict them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from support.models import CPU_RUN, build_model
from support.trainers import batch, check_log_probs

from mt_grpo.cli import main
from mt_grpo.data import load_rows
from mt_grpo.errors import ConfigError
from mt_grpo.integrations.openai_api import AgentSource, Command
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.training.environment import build_env, check_env
from mt_grpo.trajectory import StopReason

ROOT = Path(__file__).parents[2]
LOOP = f"{ROOT / 'benchmarks' / 'agents' / 'openai_loop.py'}:solve"
END = "<|im_end|>"


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


def trainer_of(agent, folder, tokenizer, questions, **options):
    args = MTGRPOConfig(str(folder), max_completion_length=400, learning_rate=1e-2, **{**CPU_RUN, **options})
    return MTGRPOEnvTrainer(
        build_model(tokenizer),
        AgentSource(agent),
        [],
        ["env_reward"],
        args,
        train_dataset=questions,
        processing_class=tokenizer,
    )


def test_an_openai_loop_is_trained_as_it_was_sampled(tmp_path):
    rows = load_rows("embedded", "train[:2]")
    options = {"agent": LOOP, "call_protocol": "learnt_tags", "max_turn_length": 48, "max_completion_length": 320}
    args = MTGRPOConfig(str(tmp_path), max_steps=1, **options, **CPU_RUN)
    trainer = MTGRPOEnvTrainer("embedded", None, [], ["exact_match_reward_func"], args, train_dataset=rows)
    check_log_probs(trainer, batch(trainer))
    trajectories = trainer.batch.trajectories
    assert all(trajectory.tree.num_sequences == 1 and not trajectory.failed for trajectory in trajectories)
    assert any(turn.has_result for trajectory in trajectories for turn in trajectory.turns)
    assert all(trajectory.render_mismatch is None for trajectory in trajectories)


def test_a_loop_that_rewrites_has_the_loss_of_a_forward_a_turn(tmp_path, tokenizer, questions):
    gradients = []
    for forward in ("tree", "turn_by_turn"):
        trainer = trainer_of(compacting, tmp_path, tokenizer, questions, forward=forward, seed=3)
        inputs = batch(trainer)
        trajectories = trainer.batch.trajectories
        assert [trajectory.error for trajectory in trajectories] == [None] * 4
        assert {trajectory.tree.num_sequences for trajectory in trajectories} == {4}
        if forward == "tree":
            check_log_probs(trainer, inputs)
        trainer.compute_loss(trainer.model, inputs).backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[1].norm() > 0


def test_a_failing_agent_does_not_end_the_run(tmp_path, tokenizer, questions):
    async def agent(row, client):
        said = await client.openai().chat.completions.create(model="m", messages=row["prompt"], max_tokens=4)
        if "a" in said.choices[0].message.content:
            raise KeyError("a")
        return float(len(said.choices[0].message.content))

    trainer = trainer_of(agent, tmp_path, tokenizer, questions, max_steps=2, rollout_timeout=60.0)
    trainer.train()
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
        ({"agent": "a.b", "tools": ["calculator"]}, "`tools` and `agent` are both set"),
        ({"agent": "a.b", "system_prompt": "S"}, "`system_prompt` and `agent` are both set"),
        ({"agent": "a.b", "env": "c.d"}, "`env` and `agent` both say who answers the model"),
        ({"agent": "a.b", "multi_turn_scheduler": "gym_scheduler"}, "both set, and a scheduler holds"),
        ({"agent": "a.b", "environments": {"one": "c.d"}}, "`agent` and `environments` are both set"),
        ({"agent": "json.JSONDecoder"}, "give a function that is called with the row and the client"),
        (
            {"environments": {"one": {"agent": "json.loads", "tools": ["calculator"]}}},
            "`agent` of `environments: one`",
        ),
        ({"environments": {"one": {"agent": {"host": "h"}}}}, "`environments: one: agent` has to name"),
    ],
)
def test_options_that_contradict_an_agent_are_refused(options, problem, tmp_path):
    with pytest.raises(ConfigError) as error:
        build_env(MTGRPOConfig(str(tmp_path), **CPU_RUN, **options))
    assert problem in str(error.value)


def test_agents_may_be_some_of_the_environments(tmp_path):
    named = {"loop": {"agent": LOOP}, "program": {"agent": {"command": "cat -n"}}, "tools": {"tools": ["calculator"]}}
    args = MTGRPOConfig(str(tmp_path), environments=named, system_prompt="S", max_env_steps=2, **CPU_RUN)
    env = check_env(None, args)
    assert isinstance(env["loop"], AgentSource) and isinstance(env["program"].agent, Command)
    assert env["program"].agent.arguments == ["cat", "-n"] and env["tools"].system_prompt == "S"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"agent": LOOP}, "`tools` and `agent` are both set"),
        ({"agent": "gone.py:solve", "tools": None, "system_prompt": None, "max_env_steps": None}, "no file 'gone.py'"),
    ],
)
def test_an_agent_is_refused_before_anything_slow_is_imported(options, problem, tmp_path, capsys):
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text()) | options
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"output_dir": str(tmp_path / "run")}))
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 1
    assert problem in capsys.readouterr().err
