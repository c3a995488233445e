"""Files that import from ms-swift's own modules, and use what its examples use of them."""

from __future__ import annotations

import asyncio

import pytest
from support.models import build_tokenizer
from support.registered import keep

from mt_grpo.imports import import_file
from mt_grpo.integrations.swift import SchedulerSource, multi_turns, orms, rm_plugins
from mt_grpo.rewards import REWARDS, load_rewards
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.trajectory import StopReason, Trajectory

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
        right = MathAccuracy()([infer_request.messages[-1]["content"]], [infer_request.data_dict["solution"]])[0]
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
    """A server that is over after two steps."""

    closed = []

    def __init__(self):
        self.steps = []

    def reset(self):
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


multi_turns["hint"] = Hint
multi_turns["forgetful"] = Forgetful
multi_turns["served"] = Served
orms["judge"] = Judge
rm_plugins["longest"] = Longest
'''


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    path = tmp_path / "upstream.py"
    path.write_text(PLUGIN)
    keep(monkeypatch, REWARDS)
    yield import_file(str(path))
    for names in (multi_turns, orms, rm_plugins):
        for name in ("hint", "forgetful", "served", "judge", "longest"):
            names.pop(name, None)


def hold(scheduler, answers, row, knows_thoughts=True):
    """A conversation of a scheduler, closed, and its contexts as text."""
    tokenizer = build_tokenizer()
    if not knows_thoughts:
        tokenizer.chat_template = tokenizer.chat_template.replace("think>", "thought>")
    engine = ScriptedEngine(tokenizer, answers)
    runner = RolloutRunner(SchedulerSource(scheduler, 4), engine, RolloutLimits())
    asked = [RolloutRequest("Q1", "000", row)]

    async def run():
        (trajectory,) = await runner.run(asked, SamplingParams(), keep_environments=True)
        await trajectory.environment.close()
        return trajectory

    trajectory = asyncio.run(run())
    return trajectory, [tokenizer.decode(context) for _, context, _ in engine.requests]


def test_a_response_may_be_cut_off_with_its_log_probs(plugin):
    trajectory, contexts = hold(multi_turns["hint"], [f"3 4 5{END}", f" 6{END}"], {"solution": "6"})
    assert trajectory.stop_reason is StopReason.ENV_DONE and trajectory.error is None
    assert sum(trajectory.turns[0].mask) == 2 and contexts[1].endswith(" But no,")


@pytest.mark.parametrize("knows", [True, False])
def test_earlier_thoughts_are_taken_out_of_records(plugin, knows):
    """By the model's template, or by the scheduler itself, which then gives texts for messages."""
    trajectory, _ = hold(multi_turns["forgetful"], [f"<think>\nhm</think>A1{END}", f"A2{END}"], {}, knows)
    assert trajectory.error is None and len(trajectory.turns) == 2
    messages, _ = trajectory.environment.records[1]
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]
    assert messages[1]["content"] == ("A1" if knows else "<think>\nhm</think>A1") and messages[3]["content"] == "A2"


def test_a_server_of_openenv_is_played_and_closed(plugin):
    trajectory, contexts = hold(multi_turns["served"], [f"go{END}", f'{{"move": 1}}{END}'], {"env_config": {}})
    assert [turn.reward for turn in trajectory.turns] == [1.0, 1.0]
    assert trajectory.env_rewards == {"total_reward": 2.0} and '{"prompt": "Begin."}' in contexts[0]
    assert plugin.Wrapper.closed == [[{"message": "go"}, {"move": 1}]]


def test_an_async_reward_may_want_the_arguments_of_the_run(plugin):
    (reward,) = load_rewards(["judge"], "outcome")
    trajectory = Trajectory([{"role": "user", "content": "Q"}], session="0")
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
    trajectories = [Trajectory([{"role": "user", "content": text}], session=text) for text in ("Q", "Q and more")]
    rows = [{"prompt": trajectory.prompt} for trajectory in trajectories]
    first, second = (asyncio.run(reward.score_batch(trajectories, rows)) for reward in rewards)
    assert first == [1.0, 1.0] and len(set(second)) == 2
