"""Schedulers and reward classes named in options: trained like any environment, refused where they cannot be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from support.forked import Forked
from support.models import CPU_RUN, build_model
from support.registered import keep
from support.trainers import Letters

from mt_grpo.errors import ConfigError
from mt_grpo.integrations.swift import ORM, Accuracy, MultiTurnScheduler, SchedulerSource, multi_turns
from mt_grpo.rewards import REWARDS, load_rewards
from mt_grpo.rollout import ScriptedEngine
from mt_grpo.runlog import read_trajectories
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.training.columns import check_reward_columns
from mt_grpo.training.environment import build_env
from mt_grpo.trajectory import Trajectory, Turn

ROOT = Path(__file__).parent.parent.parent
END = "<|im_end|>"

PLUGIN = """
from mt_grpo.integrations.swift import ORM, MultiTurnScheduler, RolloutOutput, multi_turns, orms


class Doubt(MultiTurnScheduler):
    def step(self, infer_request, response_choice, current_turn):
        ids = response_choice.token_ids
        mask = [1] * len(ids)
        text = " Wait,"
        infer_request.messages[-1]["content"] += text
        added = self.infer_engine.default_template.tokenizer.encode(text, add_special_tokens=False)
        ids.extend(added)
        mask.extend([0] * len(added))
        return {
            "infer_request": infer_request,
            "response_token_ids": ids,
            "response_loss_mask": mask,
            "rollout_infos": {"said": response_choice.message.content},
        }


class Fresh(MultiTurnScheduler):
    async def run(self, infer_request, request_config, **kwargs):
        records = []
        for number in range(2):
            response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
            choice = response.choices[0]
            messages = infer_request.messages + [{"role": "assistant", "content": choice.message.content}]
            ids = choice.token_ids
            records.append(RolloutOutput(response=response, messages=messages, response_token_ids=[ids]))
            infer_request.messages = infer_request.messages[:1] + [{"role": "user", "content": "Once more."}]
        return records


class Shared(ORM):
    def __call__(self, completions, **kwargs):
        rewards = []
        for request_id in kwargs.get("request_id"):
            records = kwargs.get("trajectory_inputs")[request_id]
            rewards.append(float(sum(len(record["messages"][-1]["content"]) for record in records)))
        return rewards


multi_turns["test_doubt"] = Doubt
multi_turns["test_fresh"] = Fresh
orms["test_shared"] = Shared
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    path = tmp_path_factory.mktemp("plugin") / "plugin.py"
    path.write_text(PLUGIN)
    with pytest.MonkeyPatch.context() as patch:
        keep(patch, REWARDS)
        yield str(path)


def make(plugin, folder, tokenizer, questions, script, rewards, **options):
    options = {"output_dir": str(folder), **CPU_RUN, "max_completion_length": 60, "max_steps": 2, **options}
    args = MTGRPOConfig(external_plugins=[plugin], learning_rate=1e-2, **options)
    return MTGRPOEnvTrainer(
        build_model(tokenizer),
        None,
        [],
        rewards,
        args,
        train_dataset=questions,
        engine=ScriptedEngine(tokenizer, script) if script else None,
        processing_class=tokenizer,
    )


@pytest.mark.parametrize("scheduler", ["test_doubt", "test_fresh"])
def test_two_groups_are_trained(scheduler, plugin, tmp_path, tokenizer, questions):
    options = {"multi_turn_scheduler": scheduler, "max_turns": 2, "max_turn_length": 8}
    trainer = make(plugin, tmp_path, tokenizer, questions, None, [Letters()], **options)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert any((old != new).any() for old, new in zip(before, trainer.model.parameters(), strict=True))
    assert not any(trajectory.failed for trajectory in trainer.batch.trajectories)


def test_records_of_a_trajectory_share_its_reward(plugin, tmp_path, tokenizer, questions):
    def script(session, turn):
        return "ab" * (turn + 1) * (1 + int(session[-1])) + END

    rewards = [plugin + ":Shared"]
    trainer = make(
        plugin, tmp_path, tokenizer, questions, script, load_rewards(rewards, "outcome"),
        multi_turn_scheduler=f"{plugin}:Fresh", max_completion_length=200,
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._generate_and_score_completions([trainer.train_dataset[0]] * 4)
    assert trainer.batch.rewards.outcome_rewards.tolist() == [6.0, 12.0, 18.0, 24.0]
    for row, trajectory in enumerate(trainer.batch.trajectories):
        trained = (inputs["completion_mask"] * inputs["tool_mask"])[row].bool()
        assert trained.sum() == sum(turn.num_tokens for turn in trajectory.turns)
        assert len(inputs["advantages"][row][trained].unique()) == 1


def test_a_reward_class_is_given_what_its_scheduler_told(plugin, questions):
    MTGRPOConfig(output_dir="run", external_plugins=[plugin], **CPU_RUN)
    (shared,) = load_rewards(["test_shared"], "outcome")
    assert isinstance(shared, ORM) and shared.name == "test_shared"
    check_reward_columns([shared], questions, None)
    trajectory = Trajectory(
        [{"role": "user", "content": "Q"}],
        [Turn(0, {"role": "assistant", "content": "A1"})],
        session="7",
        row={"solution": "4"},
        info={"said": "A1"},
    )
    given = shared.arguments([trajectory], [trajectory.row])
    assert given["completions"] == ["A1"] and given["solution"] == ["4"] and given["rollout_infos"] == [{"said": "A1"}]
    (record,) = given["trajectory_inputs"]["7"]
    assert record == {
        "solution": "4", "request_id": "7", "rollout_infos": {"said": "A1"}, "messages": trajectory.messages
    }  # fmt: skip


class Odd(MultiTurnScheduler):
    """Tells and says what has no form in a file."""

    def step(self, infer_request, response_choice, current_turn):
        half = {"content": "\ud800 half", "role": "user"}
        infer_request.messages.append(half if int(infer_request.uuid[-1]) % 2 else {**half, "content": "Q"})
        infos = {("a", 1): {1, 2}, "bytes": b"x", "object": self}
        infos["itself"] = infos
        return {"infer_request": infer_request, "rollout_infos": infos}


def test_what_has_no_form_in_a_file_does_not_end_the_run(tmp_path, tokenizer, questions):
    args = MTGRPOConfig(output_dir=str(tmp_path), **{**CPU_RUN, "max_steps": 1}, max_completion_length=60)
    trainer = MTGRPOEnvTrainer(
        build_model(tokenizer), SchedulerSource(Odd, 2), [], [Letters()], args, train_dataset=questions,
        engine=ScriptedEngine(tokenizer, lambda session, turn: f"A{END}"), processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    lines = list(read_trajectories(tmp_path))
    assert [line["stop_reason"] for line in lines] == ["max_steps", "env_error"] * 2
    assert lines[0]["info"]["bytes"] == "b'x'" and "half a character" in lines[1]["error"]


@pytest.mark.parametrize(
    ("said", "solution", "right"),
    [
        ("so \\boxed{12}", "It is \\boxed{12}.", 1.0),
        ("<answer>1,200</answer>", "#### 1200", 1.0),
        ("<answer>x + 1</answer>", "\\boxed{x+1}", 0.0),
        ("<answer>Lima</answer>", "lima", 1.0),
        ("<answer>x2</answer>", "\\boxed{y2}", 0.0),
        ("I do not know what to say at all", "4", 0.0),
        ("<answer></answer>", "4", 0.0),
    ],
)
def test_accuracy_compares_numbers_and_words(said, solution, right):
    assert Accuracy()([said], [solution]) == [right]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"multi_turn_scheduler": "test_dubt"}, "There is no scheduler 'test_dubt'; the nearest is 'test_doubt'"),
        ({"multi_turn_scheduler": "mt_grpo.options.values.is_bare"}, "give a subclass of `MultiTurnScheduler`"),
        ({"multi_turn_scheduler": "test_doubt", "tools": ["calculator"]}, "`tools` and `multi_turn_scheduler` are"),
        ({"multi_turn_scheduler": "test_doubt", "env": "a.B"}, "`env` and `multi_turn_scheduler` are both set"),
        ({"multi_turn_scheduler": "test_doubt", "max_turns": 0}, "`max_turns` is 0"),
        ({"multi_turn_scheduler": "test_doubt", "loss_scale": "last"}, "`loss_scale` is 'last'"),
        ({"max_turns": 3}, "`max_turns` has an effect with `multi_turn_scheduler` only"),
        ({"loss_scale": "last_round"}, "`loss_scale` has an effect with `multi_turn_scheduler` only"),
        ({"environments": {"a": {"tools": [], "max_turns": 3}}}, "`max_turns` of `environments: a` has an effect"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, problem, plugin):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        build_env(MTGRPOConfig(output_dir="run", external_plugins=[plugin], **CPU_RUN, **options))


def test_what_is_no_scheduler_or_reward_is_not_registered():
    with pytest.raises(ConfigError, match="no subclass of MultiTurnScheduler"):
        multi_turns["mine"] = Accuracy


def test_an_environment_among_others_may_be_a_scheduler(plugin):
    environments = {
        "doubt": {"multi_turn_scheduler": "test_doubt", "max_turns": 4, "loss_scale": "last_round"},
        "tools": {"tools": ["calculator"]},
    }
    args = MTGRPOConfig(
        output_dir="run", external_plugins=[plugin], environments=environments, system_prompt="S", **CPU_RUN
    )
    built = build_env(args)
    assert isinstance(built["doubt"], SchedulerSource) and built["tools"].tools
    assert (built["doubt"].max_turns, built["doubt"].loss_scale, built["doubt"].system_prompt) == (
        4,
        "last_round",
        "S",
    )


@pytest.mark.slow
def test_the_example_of_the_page_trains_in_a_recipe(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "schedulers.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (options,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "doubt.py").write_text(example)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is 6*7?", "solution": "42"}\n' * 16)
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text()) | yaml.safe_load(options)
    for name in ("tools", "max_env_steps", "turn_reward_funcs"):
        del recipe[name]
    recipe |= {"dataset_name": "rows.jsonl", "do_eval": False, "max_steps": 1, "per_device_train_batch_size": 8}
    recipe |= {"max_turn_length": 8, "output_dir": "run", "dataset_train_split": "train"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path)
    run = Forked(["-m", "mt_grpo", "train", "--config", "recipe.yaml"], tmp_path / "log")
    assert run.wait() == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "run" / "summary.json").exists()
