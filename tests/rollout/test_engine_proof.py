"""The engine in the trainer's process is used where it samples from the distribution that is trained."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch
from support.architectures import build_random
from support.hybrids import build_hybrid
from support.models import build_model, build_tokenizer
from transformers import AutoModelForCausalLM, DeepseekV4Config

from mt_grpo.errors import ConfigError
from mt_grpo.rollout.engines.proof import measure_engine, probe_contexts, prove_engine
from mt_grpo.rollout.engines.transformers import TransformersEngine

TOKENIZER = build_tokenizer()
COMPRESSED = {
    **{"vocab_size": len(TOKENIZER), "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "q_lora_rank": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8, "qk_rope_head_dim": 8, "head_dim": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def deepseek_v4():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(DeepseekV4Config(**COMPRESSED)).eval()


def prove(model, dtype=torch.float32, **options):
    asyncio.run(prove_engine(TransformersEngine(model.to(dtype), TOKENIZER), **options))


WRONG = {
    "keys compressed by their place in the row": deepseek_v4,
    "queries scaled by their place in the row": lambda: build_random("llama 4", vocab_size=len(TOKENIZER)),
    "a cache that goes on otherwise": lambda: build_hybrid("minimax", vocab_size=len(TOKENIZER)),
}
RIGHT = {
    "windows": lambda: build_random("gpt-oss", vocab_size=len(TOKENIZER)),
    "a table of positions": lambda: build_random("gpt-2", vocab_size=len(TOKENIZER), n_positions=64),
    "biases by distance": lambda: build_random("bloom", vocab_size=len(TOKENIZER)),
    "states": lambda: build_hybrid("mamba 2", vocab_size=len(TOKENIZER)),
    "a step that is clamped in rows alone": lambda: build_hybrid("zamba 2", vocab_size=len(TOKENIZER)),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_model_that_padding_or_its_cache_changes_is_refused(kind):
    with pytest.raises(
        ConfigError, match="several lengths is sampled .* nats away .* explains 1.0e-03: set `use_vllm"
    ):
        prove(WRONG[kind]())


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_samples_what_is_trained_is_accepted(kind, dtype):
    prove(RIGHT[kind](), dtype)


def test_coarser_precisions_hide_no_wrong_engine():
    with pytest.raises(ConfigError, match="set `use_vllm: true`"):
        prove(deepseek_v4(), torch.bfloat16)


def test_contexts_are_longer_than_small_windows_and_padded_oddly():
    model = build_random("gpt-oss", sliding_window=400)
    lengths = [len(context) for context in probe_contexts(TransformersEngine(model, TOKENIZER))]
    assert lengths[0] > 400 and (lengths[0] - lengths[1]) % 2 and lengths[2] == 5
    short = build_random("gpt-2", n_positions=20)
    assert [len(context) for context in probe_contexts(TransformersEngine(short, TOKENIZER))] == [4, 3, 4]


def test_spoilt_weights_are_not_blamed_on_the_engine():
    model = build_model(TOKENIZER).eval()
    model.model.norm.weight.data.fill_(float("nan"))
    assert asyncio.run(measure_engine(TransformersEngine(model, TOKENIZER))).holds


def test_a_measurement_that_is_cancelled_leaves_no_batch_behind():
    async def cancelled() -> None:
        engine, begun = TransformersEngine(build_model(TOKENIZER), TOKENIZER), threading.Event()

        def hold(*_: object) -> None:
            begun.set()
            time.sleep(0.05)

        engine.model.register_forward_pre_hook(hold)
        measuring = asyncio.ensure_future(measure_engine(engine))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        measuring.cancel()
        await asyncio.wait([measuring])
        assert engine._batch is None

    asyncio.run(cancelled())
