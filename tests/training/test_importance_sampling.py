"""What the engine computes otherwise than the trainer is measured, and corrected for in TRL's four modes."""

from __future__ import annotations

import math

import pytest
import torch
from support.models import CPU_RUN, build_model, lookup
from support.trainers import Length, Spelling

from mt_grpo.rollout.engines.transformers import TransformersEngine
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer

LOW, HIGH = 0.8, 1.15


def drift(token: int) -> float:
    """By how much the engine overstates the log-probability of a token: none, too much or too little."""
    return (0.0, 0.3, -0.2)[token % 3]


class DriftedEngine(TransformersEngine):
    """An engine whose log-probabilities are off by a known amount, as those of another implementation are."""

    async def generate(self, context, sampling, session):
        sample = await super().generate(context, sampling, session)
        sample.logprobs = [value + drift(token) for value, token in zip(sample.logprobs, sample.ids, strict=True)]
        return sample


@pytest.fixture
def train(tmp_path, tokenizer, questions):
    def train(**options):
        model = build_model(tokenizer)
        args = MTGRPOConfig(
            str(tmp_path),
            max_completion_length=400,
            max_steps=1,
            use_vllm=True,
            vllm_importance_sampling_clip_min=LOW,
            vllm_importance_sampling_clip_max=HIGH,
            **CPU_RUN,
            **options,
        )
        trainer = MTGRPOEnvTrainer(
            model,
            Spelling(
                [lookup], protocol="learnt_tags", max_steps=2, env_mask=args.env_mask
            ),  # no call parses, each is replied to
            [],
            [Length()],
            args,
            train_dataset=questions,
            engine=DriftedEngine(model, tokenizer),
            processing_class=tokenizer,
        )
        batches = []
        loss = trainer.compute_loss
        trainer.compute_loss = lambda model, inputs, **others: batches.append(inputs) or loss(model, inputs, **others)
        trainer.train()
        (batch,) = batches
        return trainer, batch

    return train


def expected(row: list[int], mode: str) -> list[float]:
    """The weights of a trajectory's trained tokens, by hand; a single one where the mode weighs trajectories."""
    ratios = [math.exp(-drift(token)) for token in row]
    if mode.startswith("sequence"):
        ratios = [math.prod(ratios)]
    if mode.endswith("truncate"):
        return [min(max(ratio, LOW), HIGH) for ratio in ratios]
    return [ratio if LOW <= ratio <= HIGH else 0.0 for ratio in ratios]


@pytest.mark.parametrize("forward", ["tree", "padded"])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_weights_are_those_of_the_known_drift_over_all_turns(train, mode, forward):
    trainer, batch = train(vllm_importance_sampling_mode=mode, forward=forward)
    trained = (batch["completion_mask"] * batch["tool_mask"]).bool()
    assert batch["turn_ids"][trained].max() >= 1
    weights = batch["importance_sampling_ratio"]
    assert weights.shape == (4, 1 if mode.startswith("sequence") else trained.shape[1])
    for row in range(4):
        ids = batch["completion_ids"][row][trained[row]].tolist()
        found = weights[row] if mode.startswith("sequence") else weights[row][trained[row]]
        torch.testing.assert_close(found, torch.tensor(expected(ids, mode)), rtol=1e-4, atol=1e-6)
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_the_difference_is_reported_turn_by_turn(train):
    trainer, batch = train(vllm_importance_sampling_mode="token_truncate")
    trained = (batch["completion_mask"] * batch["tool_mask"]).bool()
    logged = {name: value for row in trainer.state.log_history for name, value in row.items()}
    seen = 0
    for turn in range(int(batch["turn_ids"][trained].max()) + 1):
        ids = batch["completion_ids"][trained & (batch["turn_ids"] == turn)].tolist()
        off = [abs(drift(token)) for token in ids]
        name = f"turn_{turn + 1}/sampling_logp_difference"
        assert logged[f"{name}/mean"] == pytest.approx(sum(off) / len(off), abs=1e-4)
        assert logged[f"{name}/max"] == pytest.approx(max(off), abs=1e-4)
        seen += len(ids)
    assert seen == trained.sum()


def test_trained_tokens_of_the_environment_have_no_ratio(train):
    trainer, _ = train(env_mask=1, vllm_importance_sampling_mode="token_truncate")
    logged = {name: value for row in trainer.state.log_history for name, value in row.items()}
    assert 0 < logged["turn_1/sampling_logp_difference/mean"] < 0.3


def test_without_the_correction_nothing_is_weighed(train):
    _, batch = train(vllm_importance_sampling_correction=False)
    assert "importance_sampling_ratio" not in batch
