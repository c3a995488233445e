"""Schedulers and rewards in files: imported by ms-swift's own module names, named in options, trained and refused."""

import asyncio
import re

import pytest
from datasets import Dataset
from support.conversations import play, user
from support.models import CPU_RUN, build_tokenizer
from support.registered import keep
from support.trainers import LETTERS, batch

from mt_grpo.errors import ConfigError
from mt_grpo.imports import import_file
from mt_grpo.integrations.swift import (
    ORM,
    Accuracy,
    MultiTurnScheduler,
    RetryScheduler,
    SchedulerSource,
    multi_turns,
    orms,
    rm_plugins,
)
from mt_grpo.rewards import REWARDS, load_rewards
from mt_grpo.runlog import read_trajectories
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training.columns import check_reward_columns
from mt_grpo.training.environment import build_env
from mt_grpo.trajectory import StopReason, Trajectory, Turn

END = "<|im_end|>"
PLUGIN = '''
import torch
from swift.infer_engine import RequestConfig, TransformersEngine
from swift.infer_engine.protocol import ChatCompletionResponseChoice, RolloutInferRequest, RolloutOutput
from swift.rewards import ORM, AsyncORM, orms, rm_plugins
from swift.rewards.orm import MathAccuracy
from swift.rewards.rm_plugin import DefaultRMPlugin
from swift.rollout.gym_env import Env, envs
from swift.rollout.multi_turn import GYMScheduler, MultiTurnScheduler, OpenEnvScheduler, multi_turns
from swift.template import Messages, Template
from swift.utils import get_logger, remove_response, to_device

logger = get_logger()


class Hint(MultiTurnScheduler):
    """Cuts a wrong answer off behind two tokens, and goes on in the same message."""

    hint = " But no,"

    def check_finished(self, infer_request, response_choice, current_turn):
        right = MathAccuracy()([infer_request.messages[-1]["content"]], [infer_request.data_dict["answer"]])[0]
        return right == 1 or super().check_finished(infer_request, response_choice, current_turn)

    def step(self, infer_request, response_choice, current_turn):
        logprobs = self._extract_logprobs_from_choice(response_choice)[:2]
        ids = response_choice.token_ids[:2]
        added = self.tokenizer.encode(self.hint, add_special_tokens=False)
        infer_request.messages[-1]["content"] = self.engine.tokenizer.decode(ids) + self.hint
        return {
            "infer_request": infer_request,
            "response_token_ids": ids + added,
            "response_loss_mask": [1] * len(ids) + [0] * len(added),
            "rollout_logprobs": logprobs,
        }


class Forgetful(MultiTurnScheduler):
    """Each response is a record; earlier thoughts are taken out by the template, or by hand as bare text."""

    async def run(self, infer_request, request_config, **kwargs):
        records = []
        while len(records) < 2:
            response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
            choice = response.choices[0]
            infer_request.messages.append({"role": "assistant", "content": choice.message.content})
            shown = self._shown(infer_request.messages)
            records.append(RolloutOutput(response=response, messages=shown, response_token_ids=choice.token_ids))
            infer_request.messages.append({"role": "user", "content": "Again."})
        return records

    def _shown(self, messages):
        template = self.infer_engine.template
        if not template.template_meta.is_thinking:
            return [one if one["role"] != "assistant" else one["content"] for one in messages[:-1]] + messages[-1:]
        inputs = type("Inputs", (), {})()
        inputs.messages, mode = messages, template.mode
        template.mode = "train"
        template._swift_prepare_inputs(inputs)
        template.mode = mode
        return inputs.messages


class Wrapper:
    closed = []

    def reset(self):
        self.steps = []
        return {"prompt": "Begin."}, None

    def step(self, action):
        self.steps.append(action)
        return {"seen": len(self.steps)}, 1.0, len(self.steps) == 2, None

    def close(self):
        Wrapper.closed.append(self.steps)


class Served(OpenEnvScheduler):
    def _create_env(self, env_config):
        return Wrapper()


class Judge(AsyncORM):
    def __init__(self, args, **kwargs):
        super().__init__(args, **kwargs)

    async def __call__(self, completions, **kwargs):
        return [float(len(completion)) for completion in completions]


class Longest:
    def __init__(self, model, template):
        pass

    def __call__(self, inputs, **kwargs):
        return torch.tensor([float(len(one["messages"])) for one in inputs])


class Shared(ORM):
    def __call__(self, completions, **kwargs):
        rewards = []
        for request_id in kwargs.get("request_id"):
            records = kwargs.get("trajectory_inputs")[request_id]
            rewards.append(float(sum(len(record["messages"][-1]["content"]) for record in records)))
        return rewards


multi_turns["hint"] = Hint
multi_turns["forgetful"] = Forgetful
multi_turns["served"] = Served
orms["judge"] = Judge
orms["shared"] = Shared
rm_plugins["longest"] = Longest
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    path = tmp_path_factory.mktemp("plugin") / "upstream.py"
    path.write_text(PLUGIN)
    with pytest.MonkeyPatch.context() as patch:
        keep(patch, REWARDS)
        import_file(str(path))
        yield str(path)
    for names in (multi_turns, orms, rm_plugins):
        for name in ("hint", "forgetful", "served", "judge", "shared", "longest"):
            names.pop(name, None)


def hold(scheduler, answers, row, tokenizer=None):
    """A conversation of a scheduler, closed, and its contexts as text."""
    [trajectory], runner = play(SchedulerSource(scheduler, 4), answers, [row], keep=True, tokenizer=tokenizer)
    asyncio.run(trajectory.environment.close())
    return trajectory, [runner.engine.tokenizer.decode(context) for _, context, _ in runner.engine.requests]


def test_a_response_may_be_cut_off_with_its_log_probs(plugin):
    trajectory, contexts = hold(multi_turns["hint"], ["3 4 5", " 6"], {"answer": "6"})
    assert trajectory.stop_reason is StopReason.ENV_DONE and trajectory.error is None
    assert sum(trajectory.turns[0].mask) == 2 and contexts[1].endswith(" But no,")


@pytest.mark.parametrize("mark", ["think", "thought"])
def test_earlier_thoughts_are_taken_out_of_records(plugin, mark):
    """By the model's template, or by the scheduler itself, which then gives texts for messages."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("think>", f"{mark}>")
    trajectory, _ = hold(multi_turns["forgetful"], ["<think>\nhm</think>A1", "A2"], {}, tokenizer)
    assert trajectory.error is None and len(trajectory.turns) == 2
    messages, _ = trajectory.environment.records[1]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    first = "A1" if mark == "think" else "<think>\nhm</think>A1"
    assert [message["content"] for message in messages[1::2]] == [first, "A2"]


def test_a_server_of_openenv_is_played_and_closed(plugin):
    trajectory, contexts = hold(multi_turns["served"], ["go", '{"move": 1}'], {"env_config": {}})
    assert [turn.reward for turn in trajectory.turns] == [1.0, 1.0]
    assert trajectory.env_rewards == {"total_reward": 2.0} and '{"prompt": "Begin."}' in contexts[0]
    assert import_file(plugin).Wrapper.closed == [[{"message": "go"}, {"move": 1}]]


def test_an_async_reward_may_want_the_arguments_of_the_run(plugin):
    (reward,) = load_rewards(["judge"], "outcome")
    trajectory = Trajectory(user("Q"), session="0")
    assert asyncio.run(reward.score_batch([trajectory], [{"prompt": trajectory.prompt}])) == [0.0]


def test_reward_models_are_plugins_with_a_model(plugin, tmp_path):
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, num_labels=1, pad_token_id=tokenizer.pad_token_id or 0,
    )  # fmt: skip
    Qwen2ForSequenceClassification(config).save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    path = "mt_grpo.integrations.swift.rewards.PluginReward"
    rewards = load_rewards([{"name": name, "model": str(tmp_path / "judge")} for name in ("longest", path)], "outcome")
    trajectories = [Trajectory(user(text), session=text) for text in ("Q", "Q and more")]
    rows = [{"prompt": trajectory.prompt} for trajectory in trajectories]
    first, second = (asyncio.run(reward.score_batch(trajectories, rows)) for reward in rewards)
    assert first == [1.0, 1.0] and len(set(second)) == 2


def test_two_groups_are_trained(plugin, build):
    options = {"multi_turn_scheduler": "hint", "max_turns": 2, "max_turn_length": 8, "max_steps": 1}
    trainer = build(None, rewards=LETTERS, env=None, external_plugins=[plugin], **options)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert any((old != new).any() for old, new in zip(before, trainer.model.parameters(), strict=True))
    assert not any(trajectory.failed for trajectory in trainer.batch.trajectories)


def test_records_of_a_trajectory_share_its_reward(plugin, build):
    def script(session, turn):
        return "ab" * (turn + 1) * (1 + int(session[-1])) + END

    rewards, options = ((), load_rewards([f"{plugin}:Shared"], "outcome")), {"external_plugins": [plugin]}
    trainer = build(script, rewards=rewards, env=None, multi_turn_scheduler=f"{plugin}:Forgetful", **options)
    inputs = batch(trainer)
    assert trainer.batch.rewards.outcome_rewards.tolist() == [6.0, 12.0, 18.0, 24.0]
    for row, trajectory in enumerate(trainer.batch.trajectories):
        trained = (inputs["completion_mask"] * inputs["tool_mask"])[row].bool()
        assert trained.sum() == sum(turn.num_tokens for turn in trajectory.turns)
        assert len(inputs["advantages"][row][trained].unique()) == 1


def test_a_reward_class_is_given_what_its_scheduler_told(plugin, questions):
    MTGRPOConfig(output_dir="run", external_plugins=[plugin], **CPU_RUN)
    (shared,) = load_rewards(["shared"], "outcome")
    assert isinstance(shared, ORM) and shared.name == "shared"
    check_reward_columns([shared], questions, None)
    turns, row = [Turn(0, {"role": "assistant", "content": "A1"})], {"solution": "4"}
    trajectory = Trajectory(user("Q"), turns, session="7", row=row, info={"said": "A1"})
    given = shared.arguments([trajectory], [trajectory.row])
    assert [given[name] for name in ("completions", "solution", "rollout_infos")] == [["A1"], ["4"], [{"said": "A1"}]]
    record = {**row, "request_id": "7", "rollout_infos": {"said": "A1"}, "messages": trajectory.messages}
    assert given["trajectory_inputs"]["7"] == [record]


class Odd(MultiTurnScheduler):
    """Tells and says what has no form in a file."""

    def step(self, infer_request, response_choice, current_turn):
        half = {"content": "\ud800 half", "role": "user"}
        infer_request.messages.append(half if int(infer_request.uuid[-1]) % 2 else {**half, "content": "Q"})
        infos = {("a", 1): {1, 2}, "bytes": b"x", "object": self}
        infos["itself"] = infos
        return {"infer_request": infer_request, "rollout_infos": infos}


def test_what_has_no_form_in_a_file_does_not_end_the_run(build, tmp_path):
    build(lambda session, turn: f"A{END}", rewards=LETTERS, env=SchedulerSource(Odd, 2), max_steps=1).train()
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
        ({"multi_turn_scheduler": "hnt"}, "There is no scheduler 'hnt'; the nearest is 'hint'"),
        ({"multi_turn_scheduler": "mt_grpo.options.values.is_bare"}, "give a subclass of `MultiTurnScheduler`"),
        ({"multi_turn_scheduler": "hint", "tools": ["calculator"]}, "`tools` and `multi_turn_scheduler` are"),
        ({"multi_turn_scheduler": "hint", "env": "a.B"}, "`env` and `multi_turn_scheduler` are both set"),
        ({"multi_turn_scheduler": "hint", "max_turns": 0}, "`max_turns` is 0"),
        ({"multi_turn_scheduler": "hint", "loss_scale": "last"}, "`loss_scale` is 'last'"),
        ({"max_turns": 3}, "`max_turns` has an effect with `multi_turn_scheduler` only"),
        ({"loss_scale": "last_round"}, "`loss_scale` has an effect with `multi_turn_scheduler` only"),
        ({"environments": {"a": {"tools": [], "max_turns": 3}}}, "`max_turns` of `environments: a` has an effect"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, problem, plugin):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        build_env(MTGRPOConfig(output_dir="run", external_plugins=[plugin], **CPU_RUN, **options))


def test_what_is_no_scheduler_or_lacks_its_column_is_refused():
    with pytest.raises(ConfigError, match="no subclass of MultiTurnScheduler"):
        multi_turns["mine"] = Accuracy
    source, rows = SchedulerSource(multi_turns["retry_scheduler"]), Dataset.from_list([{"prompt": "Q", "answer": "4"}])
    source.check(rows.rename_column("answer", "solution"), "training dataset")
    with pytest.raises(ConfigError, match=r"RetryScheduler needs `solution`, which .* its name}`\.$"):
        source.check(rows, "training dataset")
    asks_else = type("AsksElse", (RetryScheduler,), {"check_finished": lambda *_: True})
    SchedulerSource(asks_else).check(rows, "training dataset")


def test_an_environment_among_others_may_be_a_scheduler(plugin):
    doubt = {"multi_turn_scheduler": "hint", "max_turns": 4, "loss_scale": "last_round"}
    options = {"environments": {"doubt": doubt, "tools": {"tools": ["calculator"]}}, "system_prompt": "S"}
    built = build_env(MTGRPOConfig(output_dir="run", external_plugins=[plugin], **options, **CPU_RUN))
    source = built["doubt"]
    assert isinstance(source, SchedulerSource) and built["tools"].tools
    assert (source.max_turns, source.loss_scale, source.system_prompt) == (4, "last_round", "S")
