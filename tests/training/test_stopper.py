"""Through the whole trainer, the gradient of many groups is the one that enumeration gives, for a known process."""

from __future__ import annotations

import math

import pytest
import torch
from datasets import Dataset
from support.models import CPU_RUN, build_model
from transformers import TrainerCallback

from mt_grpo.credit.exact import measure
from mt_grpo.credit.processes import stopper
from mt_grpo.envs import Step, StepEnv
from mt_grpo.rewards import EnvReward
from mt_grpo.rewards.step import StepReward
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.trajectory import ToolCall

GROUP, GROUPS_PER_STEP = 4, 64
GO, STOP = "g", "s"


class Stopper(StepEnv):
    """`mt_grpo.credit.processes.stopper`: up to three times the model goes on, which earns .3, or stops."""

    stop = (GO, STOP)

    async def reset(self, row):
        return row["prompt"]

    async def step(self, turn):
        if turn.text == STOP:
            return Step(done=True, rewards={"outcome": 0.0})
        turn.tool_calls = [ToolCall("go", executed=True)]
        return Step("on", reward=0.3, done=turn.index == 2, rewards={"outcome": 0.0})


class Gradients(TrainerCallback):
    """Keeps the gradient of one parameter at each step."""

    def __init__(self, weights, row):
        self.weights, self.row, self.seen = weights, row, []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.seen.append(self.weights.grad[self.row, 0].item())


def one_parameter(tokenizer):
    """
    A model that writes `GO` with the probability sigmoid(θ), and else `STOP`, after any context: all that it computes
    is the same vector, so that the first column of its head are the logits. θ is the one of `GO`, and 0.
    """
    model = build_model(tokenizer, num_hidden_layers=1, tie_word_embeddings=False)
    head = model.lm_head.weight
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(1.0)
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.norm.weight.zero_()[0] = 1.0
        head[:, 0] = -50.0
        head[tokenizer.convert_tokens_to_ids([GO, STOP]), 0] = 0.0
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is head)
    return model


# with the expected estimate, and whether a rule's means include the member itself; the true gradient is .20625
@pytest.mark.parametrize(
    ("rule", "expected", "own", "steps"),
    [("reward_to_go", 0.20625, True, 8), ("leave_one_out", 0.20625, False, 4), ("mt_grpo", 0.098437, False, 4)],
)
def test_the_trainer_estimates_the_exact_gradient(tmp_path, tokenizer, rule, expected, own, steps):
    model = one_parameter(tokenizer)
    gradients = Gradients(model.lm_head.weight, tokenizer.convert_tokens_to_ids(GO))
    options = {
        **CPU_RUN,
        "per_device_train_batch_size": GROUP * GROUPS_PER_STEP // 2,
        "gradient_accumulation_steps": 2,
        "num_generations": GROUP,
        "max_completion_length": 100,
        "max_steps": steps,
        "learning_rate": 0.0,  # the policy stays what it is
        "max_grad_norm": 0.0,
        "loss_type": "dr_grpo",  # a sum over tokens, divided by a constant
        "scale_rewards": "none",
        "advantage_estimator": rule,
        "tokenization_sanity_check_mode": "disable",
    }
    MTGRPOEnvTrainer(
        model,
        Stopper,
        [StepReward()],
        [EnvReward()],
        MTGRPOConfig(str(tmp_path), **options),
        train_dataset=Dataset.from_dict({"prompt": ["What is"] * GROUPS_PER_STEP}),
        processing_class=tokenizer,
        callbacks=[gradients],
    ).train()
    factor = GROUP / (GROUP - 1) if own else 1.0
    estimate = -factor * options["max_completion_length"] * sum(gradients.seen) / steps
    exact = measure(rule, stopper, group_size=GROUP, factor=factor)
    assert exact.mean.item() == pytest.approx(expected, abs=1e-6)
    assert abs(estimate - expected) < 3 * exact.std / math.sqrt(GROUPS_PER_STEP * steps)
