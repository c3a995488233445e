"""Routes of a mixture from a real vLLM server: the trainer's forward sends each token where the server sent it."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch
from datasets import Dataset
from support.marks import needs_server
from support.models import CPU_RUN, build_tokenizer
from support.servers import RealServer
from support.trainers import Letters
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from mt_grpo.envs import Outcome
from mt_grpo.forward import token_logps
from mt_grpo.rollout import SamplingParams
from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.token_tree import TokenTree
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer

pytestmark = [needs_server, pytest.mark.server]


DECODER = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": None,
}


def mixture(tokenizer):
    torch.manual_seed(0)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]}
    config = Qwen3MoeConfig(**DECODER, **experts, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    return Qwen3MoeForCausalLM(config).eval()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("mixture"), build_tokenizer()
    mixture(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    server = RealServer(str(folder / "model"), folder / "server.log", "--vllm_max_model_length", "500")
    try:
        yield server.start(), folder, tokenizer
    finally:
        server.stop()


def test_tokens_go_where_the_server_sent_them(served):
    server, _, tokenizer = served
    context = tokenizer.encode("What is it that you see there, and why? " * 6)

    async def talk():
        client = VLLMServerClient(server.url, tokenizer)
        tree, ids, logprobs = TokenTree(), list(context), []
        try:
            for turn in range(3):
                drawing = SamplingParams(max_tokens=20, seed=turn, routes_from=tree.routed if turn else 0)
                sample = await client.generate(ids, drawing, "")
                tree.add_turn(ids, sample.ids, sample.logprobs, sample.routes)
                logprobs += sample.logprobs
                ids = [*ids, *sample.ids, *tokenizer.encode(" Go on.")]
        finally:
            await client.close()
        return tree, torch.tensor(logprobs)

    tree, sampled = asyncio.run(talk())
    assert tree.routed == len(tree.sequences()[0].tokens) - 1  # what was sampled last went nowhere yet
    model = mixture(tokenizer)

    def difference(model, tree):
        with torch.no_grad():
            return (torch.cat(list(token_logps(model, [tree])[0])) - sampled).abs().max().item()

    assert difference(model, tree) < 1e-4
    flipped = copy.deepcopy(model)
    for name, weight in flipped.named_parameters():
        if name.endswith("mlp.gate.weight"):  # by a rounding, in which some choices differ
            weight.data += 0.005 * torch.randn_like(weight)
    plain = copy.deepcopy(tree)
    for node in plain.nodes:
        node.routes = b""
    with_routes, without = difference(flipped, tree), difference(flipped, plain)
    print(f"largest difference of a token: {with_routes:.2g} nats with its routes, {without:.2g} without")
    assert with_routes < without / 2


class Talk:
    async def run(self, policy, row):
        turn = await policy.reply(row["prompt"], max_tokens=12)
        await policy.reply([*row["prompt"], turn.message, {"role": "user", "content": "Go on."}], max_tokens=12)
        return Outcome()

    async def close(self):
        pass


def test_mixtral_is_sampled_and_trained_alike(tmp_path):
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = MixtralConfig(**DECODER, **experts, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    server = RealServer(str(tmp_path / "model"), tmp_path / "server.log", "--vllm_max_model_length", "500")
    try:
        server.start()
        args = MTGRPOConfig(
            str(tmp_path / "run"),
            **CPU_RUN,
            use_vllm=True,
            vllm_server_base_url=server.url,
            learning_rate=1e-2,
            max_steps=2,
        )
        model = MixtralForCausalLM.from_pretrained(tmp_path / "model")
        rows = Dataset.from_list([{"prompt": [{"role": "user", "content": word}]} for word in ("one", "two")])
        trainer = MTGRPOEnvTrainer(model, Talk, [], [Letters()], args, rows, processing_class=tokenizer)
        trainer.train()
    finally:
        server.stop()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 2
    for step in steps:
        assert step["sampling/sampling_logp_difference/max"] < 1e-4
        assert step["router/differing"] < 0.01
