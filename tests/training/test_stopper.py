"""Through the whole trainer, the gradient of many groups is the one that enumeration gives, for a known process."""

import copy
import math

import pytest
import torch
from datasets import Dataset
from support.decision_processes import stopper
from support.exact_gradients import measure, measure_branching
from support.models import build_model
from support.trainers import at

from mt_grpo.envs import Step, StepEnv
from mt_grpo.rewards import EnvReward, step_reward
from mt_grpo.trajectory import ToolCall

ROWS = 256
"""Conversations of a step."""
GO, STOP = "g", "s"
pytestmark = pytest.mark.slow


class Stopper(StepEnv):
    """`support.decision_processes.stopper`: up to three times the model goes on, which earns .3, or stops."""

    stop = (GO, STOP)

    def fork(self):
        return copy.copy(self)

    async def reset(self, row):
        return row["prompt"]

    async def step(self, turn):
        if turn.text == STOP:
            return Step(done=True, rewards={"outcome": 0.0})
        turn.tool_calls = [ToolCall("go", executed=True)]
        return Step("on", reward=0.3, done=turn.index == 2, rewards={"outcome": 0.0})


def one_parameter(tokenizer):
    """Writes `GO` with the probability sigmoid(θ), else `STOP`; θ is in the first column of its head."""
    model = build_model(tokenizer, num_hidden_layers=1, tie_word_embeddings=False)
    head, (layer,) = model.lm_head.weight, model.model.layers
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(1.0)
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.zero_()[0] = 1.0
        head[:, 0] = -50.0
        head[tokenizer.convert_tokens_to_ids([GO, STOP]), 0] = 0.0
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is head)
    return model


@pytest.fixture
def estimate(build, tokenizer):
    """The mean gradient of the expected rewards in θ, as training computes it."""

    def measured(steps, **options):
        model, seen, place = one_parameter(tokenizer), [], (tokenizer.convert_tokens_to_ids(GO), 0)
        keeps = at("on_pre_optimizer_step", lambda **_: seen.append(model.lm_head.weight.grad[place].item()))
        options = {
            "per_device_train_batch_size": ROWS // 2,
            "gradient_accumulation_steps": 2,
            "max_completion_length": 100,
            "max_steps": steps,
            "learning_rate": 0.0,  # the policy stays what it is
            "max_grad_norm": 0.0,
            "loss_type": "dr_grpo",  # a sum over tokens, divided by a constant
            "scale_rewards": "none",
            "tokenization_sanity_check_mode": "disable",
            **options,
        }
        given = {"env": Stopper, "train_dataset": Dataset.from_dict({"prompt": ["What is"] * ROWS})}
        rewards = ([step_reward], [EnvReward()])
        build(None, model, rewards, callbacks=[keeps], eval_dataset=None, **given, **options).train()
        return -options["max_completion_length"] * sum(seen) / steps

    return measured


# with the expected estimate, and whether a rule's means include the member itself; the true gradient is .20625
@pytest.mark.parametrize(
    ("rule", "expected", "own", "steps"),
    [("reward_to_go", 0.20625, True, 6), ("leave_one_out", 0.20625, False, 2), ("mt_grpo", 0.098437, False, 2)],
)
def test_the_trainer_estimates_the_exact_gradient(estimate, rule, expected, own, steps):
    factor = 4 / 3 if own else 1.0
    exact = measure(rule, stopper, group_size=4, factor=factor)
    assert exact.mean.item() == pytest.approx(expected, abs=1e-6)
    gradient = factor * estimate(steps, advantage_estimator=rule)
    assert abs(gradient - expected) < 3 * exact.std / math.sqrt(steps * ROWS / 4)


def test_conversations_that_branch_have_the_same_gradient(estimate):
    exact = measure_branching("branch_to_go", stopper, branch_at=1, num_branches=4)
    options = {"advantage_estimator": "branch_to_go", "branch_at": 1, "num_branches": 4, "num_generations": 8}
    assert abs(estimate(3, **options) - 0.20625) < 3 * exact.std / math.sqrt(3 * ROWS / 8)
