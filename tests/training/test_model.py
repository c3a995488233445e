"""Dropout: off by default, and never in what the trained log-probs are compared with."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from support.models import CPU_RUN, build_model, lookup
from support.trainers import Letters

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rollout.engines.transformers import TransformersEngine
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer


@pytest.fixture
def build(tmp_path, tokenizer, questions):
    """A trainer of an adapter with dropout that is sampled from as from a server: its log-probs are compared."""

    def build(lora_dropout=0.3, attention_dropout=0.0, **options):
        torch.manual_seed(0)
        adapter = LoraConfig(
            target_modules=["q_proj", "v_proj"], lora_dropout=lora_dropout, init_lora_weights=False, lora_alpha=32
        )
        trainer = MTGRPOEnvTrainer(
            build_model(tokenizer, attention_dropout=attention_dropout),
            MultiTurnToolEnv([lookup], protocol="learnt_tags", max_steps=2),
            [],
            [Letters()],
            MTGRPOConfig(
                str(tmp_path),
                **CPU_RUN,
                use_vllm=True,
                max_completion_length=60,
                max_turn_length=20,
                beta=0.1,
                **options,
            ),
            train_dataset=questions,
            engine=TransformersEngine(build_model(tokenizer), tokenizer),  # samples from the trainer's model
            processing_class=tokenizer,
            peft_config=adapter,
        )
        trainer.current_gradient_accumulation_steps = 1
        return trainer

    return build


def scored(trainer):
    """A batch, and how far the trainer's old log-probs, and the loss's own, are from the sampled ones."""
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([trainer.train_dataset[0]] * 4)
    trained = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    difference = (inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"])[trained].abs().max()
    seen, score = [], trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: seen.append(score(*a, **k)) or seen[-1]
    trainer.compute_loss(trainer.model, inputs)
    current = (seen[0][0] - inputs["sampling_per_token_logps"])[trained].abs().max()
    return inputs, difference.item(), current.item()


@pytest.mark.parametrize("forward", ["tree", "padded", "turn_by_turn"])
def test_by_default_all_log_probs_are_those_that_were_sampled(build, forward):
    _, difference, current = scored(build(attention_dropout=0.0 if forward == "tree" else 0.2, forward=forward))
    assert max(difference, current) < 5e-6


@pytest.mark.parametrize("forward", ["tree", "padded", "turn_by_turn"])
def test_dropout_that_is_asked_for_is_in_the_loss_alone(build, forward):
    trainer = build(forward=forward, disable_dropout=False)
    inputs, difference, current = scored(trainer)
    assert difference < 5e-6 and current > 1e-2
    assert all(module.training for module in trainer.model.modules())


def test_reference_log_probs_are_computed_without_dropout(build):
    trainer = build(lora_dropout=0.0, attention_dropout=0.3, forward="padded", disable_dropout=False)
    inputs, _, _ = scored(trainer)
    trainer.model.eval()
    whole = [torch.cat([inputs[f"prompt_{kind}"], inputs[f"completion_{kind}"]], dim=1) for kind in ("ids", "mask")]
    with trainer.model.disable_adapter(), torch.no_grad():
        expected, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, *whole, inputs["completion_ids"].shape[1]
        )
    trained = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    torch.testing.assert_close(inputs["ref_per_token_logps"][trained], expected[trained])
