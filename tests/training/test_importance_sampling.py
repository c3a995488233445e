"""What the engine computes otherwise is corrected for in TRL's four modes; dropout is in no log-probs compared."""

import math

import pytest
import torch
from peft import LoraConfig
from support.models import build_model, lookup
from support.trainers import LETTERS, Length, Spelling, batch, log_probs, trained_tokens

from mt_grpo.rollout.engines.transformers import TransformersEngine

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
def train(build, tokenizer):
    def train(env_mask=0, **options):
        model = build_model(tokenizer)
        # no call parses, each is replied to
        env = Spelling([lookup], protocol="learnt_tags", max_steps=2, env_mask=env_mask)
        options |= {"vllm_importance_sampling_clip_min": LOW, "vllm_importance_sampling_clip_max": HIGH}
        options |= {"engine": DriftedEngine(model, tokenizer), "rewards": ((), (Length(),)), "env_mask": env_mask}
        trainer = build(model=model, env=env, max_steps=1, use_vllm=True, **options)
        batches, loss = [], trainer.compute_loss
        trainer.compute_loss = lambda model, inputs, **others: batches.append(inputs) or loss(model, inputs, **others)
        trainer.train()
        (inputs,) = batches
        return trainer, inputs, {name: value for row in trainer.state.log_history for name, value in row.items()}

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
    """And the drift of each turn is reported."""
    trainer, inputs, logged = train(vllm_importance_sampling_mode=mode, forward=forward)
    trained, ratios, turns = trained_tokens(inputs), inputs["importance_sampling_ratio"], inputs["turn_ids"]
    assert ratios.shape == (4, 1 if mode.startswith("sequence") else trained.shape[1])
    for row in range(4):
        ids = inputs["completion_ids"][row][trained[row]].tolist()
        found = ratios[row] if mode.startswith("sequence") else ratios[row][trained[row]]
        torch.testing.assert_close(found, torch.tensor(expected(ids, mode)), rtol=1e-4, atol=1e-6)
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    assert turns[trained].max() >= 1
    for turn in turns[trained].unique().tolist():
        off = [abs(drift(token)) for token in inputs["completion_ids"][trained & (turns == turn)].tolist()]
        found = [logged[f"turn_{turn + 1}/sampling_logp_difference/{kind}"] for kind in ("mean", "max")]
        assert found == pytest.approx([sum(off) / len(off), max(off)], abs=1e-4)


def test_trained_tokens_of_the_environment_have_no_ratio(train):
    *_, logged = train(env_mask=1, vllm_importance_sampling_mode="token_truncate")
    assert 0 < logged["turn_1/sampling_logp_difference/mean"] < 0.3


def test_without_the_correction_nothing_is_weighed(train):
    assert "importance_sampling_ratio" not in train(vllm_importance_sampling_correction=False)[1]


# Dropout


@pytest.fixture
def dropping(build, tokenizer):
    """A trainer of an adapter with dropout that is sampled from as from a server: its log-probs are compared."""

    def make(lora_dropout=0.3, attention_dropout=0.0, **options):
        torch.manual_seed(0)
        adapter = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "lora_alpha": 32}
        return build(
            model=build_model(tokenizer, attention_dropout=attention_dropout),
            rewards=LETTERS,
            peft_config=LoraConfig(lora_dropout=lora_dropout, **adapter),
            engine=TransformersEngine(build_model(tokenizer), tokenizer),  # samples from the trainer's model
            **{"max_completion_length": 60, "max_turn_length": 20, "beta": 0.1, "use_vllm": True, **options},
        )

    return make


def scored(trainer):
    """A batch, and how far the trainer's old log-probs, and the loss's own, are from the sampled ones."""
    trainer.model.train()
    inputs = batch(trainer)
    trained, sampled = trained_tokens(inputs), inputs["sampling_per_token_logps"]
    seen, score = [], trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: seen.append(score(*a, **k)) or seen[-1]
    trainer.compute_loss(trainer.model, inputs)
    trainer._get_per_token_logps_and_entropies = score
    return inputs, *((found - sampled)[trained].abs().max() for found in (inputs["old_per_token_logps"], seen[0][0]))


@pytest.mark.parametrize("forward", ["tree", "padded", "turn_by_turn"])
def test_dropout_is_off_or_in_the_loss_alone(dropping, forward):
    """By default all log-probs are those that were sampled."""
    _, old, current = scored(dropping(attention_dropout=0.0 if forward == "tree" else 0.2, forward=forward))
    assert max(old, current) < 5e-6
    trainer = dropping(forward=forward, disable_dropout=False)
    _, old, current = scored(trainer)
    assert old < 5e-6 and current > 1e-2 and all(module.training for module in trainer.model.modules())


def test_reference_log_probs_are_computed_without_dropout(dropping):
    trainer = dropping(lora_dropout=0.0, attention_dropout=0.3, forward="padded", disable_dropout=False)
    inputs, *_ = scored(trainer)
    trainer.model.eval()
    with trainer.model.disable_adapter(), torch.no_grad():
        expected = log_probs(trainer, inputs)
    trained = trained_tokens(inputs)
    torch.testing.assert_close(inputs["ref_per_token_logps"][trained], expected[trained])
