"""Routes of a mixture from a real vLLM server: the trainer's forward sends each token where the server sent it."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch
from support.marks import needs_server
from support.models import build_tokenizer
from support.servers import RealServer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mt_grpo.forward import token_logps
from mt_grpo.rollout import SamplingParams
from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.token_tree import TokenTree

pytestmark = [needs_server, pytest.mark.server]


def mixture(tokenizer):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
        max_position_embeddings=1024,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
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
