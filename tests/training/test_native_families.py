"""Small random models of today's families with their own templates and native tools, from rollout to update."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset
from support import template_matrix
from support.models import CPU_RUN
from support.template_matrix import Said, tokenizer_of, written
from support.trainers import Calls, Length, batch, check_log_probs
from transformers import AutoModelForCausalLM, Gemma4TextConfig, GptOssConfig, Qwen3_5TextConfig

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rollout import ScriptedEngine
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer

SIZE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}
CONFIGS = {
    "qwen3_5_think": lambda **tokens: Qwen3_5TextConfig(
        **SIZE,
        **tokens,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "gptoss": lambda **tokens: GptOssConfig(
        **SIZE,
        **tokens,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        router_aux_loss_coef=0.0,
    ),
    "gemma4": lambda **tokens: Gemma4TextConfig(
        **SIZE,
        **tokens,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=64,
        vocab_size_per_layer_input=tokens["vocab_size"],
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=0,
        global_head_dim=8,
    ),
}


def model_of(family: str):
    torch.manual_seed(0)
    tokenizer = tokenizer_of(family)
    tokens = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return AutoModelForCausalLM.from_config(CONFIGS[family](**tokens))


def trainer_of(family: str, folder, model, script, **options) -> MTGRPOEnvTrainer:
    tokenizer = tokenizer_of(family)
    options = {**CPU_RUN, "max_completion_length": 600, "learning_rate": 1e-2, "max_steps": 1, **options}
    return MTGRPOEnvTrainer(
        model,
        MultiTurnToolEnv([template_matrix.look, template_matrix.find], protocol="native", max_steps=3),
        (Calls(),),
        (Length(),),
        MTGRPOConfig(output_dir=str(folder), **options),
        train_dataset=Dataset.from_list([{"prompt": "What is the weather?"}] * 4),
        engine=ScriptedEngine(tokenizer, script) if script else None,
        processing_class=tokenizer,
    )


@pytest.mark.slow
@pytest.mark.parametrize("history", ["keep", "template"])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_step_on_native_calls_is_that_of_a_forward_a_turn(family, history, tmp_path):
    header = "<think>\n" if family == "qwen3_5_think" else ""

    def script(session: str, turn: int) -> str:
        member = int(session.rsplit("-", 1)[1]) % 4
        calls = (("look", {"city": f"Lima {member}", "days": turn}),) if turn < member else ()
        return written(family, header, Said(f"Answer {member}." if not calls else "", "I think.", calls))

    model, losses, trained = model_of(family), {}, {}
    for forward in ("tree", "turn_by_turn"):
        own = copy.deepcopy(model)
        trainer = trainer_of(family, tmp_path / forward, own, script, forward=forward, history=history)
        trainer.train()
        losses[forward] = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        trained[forward] = torch.cat([parameter.detach().flatten() for parameter in own.parameters()])
        (trajectory,) = [each for each in trainer.batch.trajectories if len(each.turns) == 4][:1]
        assert [len(turn.tool_calls) for turn in trajectory.turns] == [1, 1, 1, 0]
        assert [call.error for turn in trajectory.turns for call in turn.tool_calls] == [None] * 3
    assert losses["tree"] == pytest.approx(losses["turn_by_turn"], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(trained["tree"], trained["turn_by_turn"], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_is_trained_on_what_it_sampled_natively(family, tmp_path):
    trainer = trainer_of(family, tmp_path, model_of(family), None, max_completion_length=24, temperature=1.0)
    check_log_probs(trainer, batch(trainer))
