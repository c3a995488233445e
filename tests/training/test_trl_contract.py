"""What this package relies on in TRL. A failure here means: read TRL's change before touching anything else."""

from __future__ import annotations

import inspect

import pytest
import torch
from support.models import CPU_RUN
from trl import GRPOConfig, GRPOTrainer

from mt_grpo.training.config import KEEPS_TURNS

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


def test_the_overridden_methods_keep_their_signatures():
    parameters = {
        "_generate": ["self", "prompts"],
        "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
        "_generate_and_score_completions": ["self", "inputs"],
        "_compute_loss": ["self", "model", "inputs"],
        "_save_checkpoint": ["self", "model", "trial"],
        "_load_optimizer_and_scheduler": ["self", "checkpoint"],
        "_init_training_state": [
            "self",
            "max_steps",
            "num_update_steps_per_epoch",
            "num_train_epochs",
            "resume_from_checkpoint",
            "trial",
        ],
        "get_eval_dataloader": ["self", "eval_dataset"],
        "log": ["self", "logs", "start_time"],
        "train": ["self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
        "_get_grad_norm": ["self", "model", "grad_norm"],
        "save_model": ["self", "output_dir", "_internal_call"],
    }
    for name, expected in parameters.items():
        assert list(inspect.signature(getattr(GRPOTrainer, name)).parameters) == expected


def test_generate_returns_eight_things():
    source = inspect.getsource(GRPOTrainer._generate)
    returned = source.rsplit("return ", 1)[1].strip()
    assert [name.strip() for name in returned.split(",")] == [
        "prompt_ids",
        "completion_ids",
        "tool_mask",
        "completions",
        "logprobs",
        "extra_fields",
        "images",
        "tool_images",
    ]


@pytest.fixture
def stock(tmp_path, model, tokenizer, questions):
    def rollout(prompts, trainer):
        ids = [tokenizer.encode(f"Lima {index}") for index in range(len(prompts))]
        prompt_ids = [tokenizer.apply_chat_template(p, add_generation_prompt=True)["input_ids"] for p in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": [[-1.0] * len(row) for row in ids]}

    def build(**options):
        args = GRPOConfig(
            str(tmp_path),
            **CPU_RUN,
            **options,
        )
        reward = lambda completions, **kwargs: [float(index) for index in range(len(completions))]  # noqa: E731
        return GRPOTrainer(model, reward, args, questions, processing_class=tokenizer, rollout_func=rollout)

    return build


def test_the_scored_batch_has_the_keys_and_shapes_we_build_on(stock, questions):
    trainer = stock()
    output = trainer._generate_and_score_completions([questions[0]] * 4)
    width = output["completion_ids"].shape[1]
    assert output["prompt_ids"].shape == output["prompt_mask"].shape
    assert output["completion_mask"].shape == output["sampling_per_token_logps"].shape == (4, width)
    assert output["advantages"].shape == (4,)
    assert output["num_items_in_batch"].dim() == 0


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_constant_advantages_per_token_change_nothing(stock, questions, loss_type):
    trainer = stock(loss_type=loss_type)
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._generate_and_score_completions([questions[0]] * 4)
    expected = trainer._compute_loss(trainer.model, inputs)
    advantages = inputs["advantages"].unsqueeze(1).expand_as(inputs["completion_ids"])
    loss = trainer._compute_loss(trainer.model, {**inputs, "advantages": advantages})
    assert torch.isfinite(loss)
    torch.testing.assert_close(loss, expected)


def gradient(trainer, inputs, advantages):
    trainer.model.zero_grad()
    trainer._compute_loss(trainer.model, {**inputs, "advantages": advantages}).backward()
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_where_an_advantage_a_turn_survives_in_the_gradient(stock, questions, loss_type, level):
    """`MTGRPOConfig.check_credit` refuses the losses in which it does not."""
    trainer = stock(loss_type=loss_type, importance_sampling_level=level)
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._generate_and_score_completions([questions[0]] * 4)
    mask = inputs["completion_mask"]
    split = torch.where(torch.arange(mask.shape[1]) < 2, 1.5, -0.5).expand_as(mask) * mask
    mean = (split.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True)).expand_as(mask)
    by_turn, by_mean = gradient(trainer, inputs, split), gradient(trainer, inputs, mean)
    change = ((by_turn - by_mean).norm() / by_turn.norm()).item()
    lost = level == "sequence" and loss_type not in KEEPS_TURNS
    assert change < 1e-5 if lost else change > 0.1
