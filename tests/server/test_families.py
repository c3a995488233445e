"""Kinds of models from a real vLLM server to a training step: families, mixtures of experts, one that sees images."""

import asyncio
import copy
import random

import pytest
import torch
from datasets import Dataset
from PIL import Image
from support import images
from support.models import build_tokenizer
from support.served import TOLERANCE, Served
from support.servers import needs_server
from support.template_matrix import ASKED, Exchange, tokenizer_of, turns_of, written
from support.trainers import Letters
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma4TextConfig,
    GptOssConfig,
    MixtralConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from mt_grpo.envs import Outcome
from mt_grpo.forward import token_logps
from mt_grpo.media import IMAGE
from mt_grpo.rollout import ChatRenderer, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.rollout.engines.vllm import _name_of
from mt_grpo.rollout.escaped_text import MediaEncoder
from mt_grpo.token_tree import TokenTree

pytestmark = [needs_server, pytest.mark.server]

SIZE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
SMALL = SIZE | {"intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 2048}
SMALL |= {"initializer_range": 0.1}  # learns in half the steps that the usual 0.02 takes
KINDS = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "gptoss": lambda **tokens: GptOssConfig(**SMALL, **KINDS, **tokens, num_local_experts=4, num_experts_per_tok=2),
    "gemma4_v5": lambda **tokens: Gemma4TextConfig(
        **SMALL,
        **KINDS,
        **tokens,
        global_head_dim=32,
        num_global_key_value_heads=1,
        vocab_size_per_layer_input=tokens["vocab_size"],
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=0,
    ),
    "qwen3_5_think": lambda **tokens: Qwen3_5TextConfig(
        **SMALL,
        **tokens,
        **{f"linear_{kind}_head_dim": 128 for kind in ("key", "value")},
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        layer_types=["linear_attention", "full_attention"],
    ),
}


def random_model(config, tokenizer, **tokens):
    torch.manual_seed(0)
    tokens |= {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    return AutoModelForCausalLM.from_config(config(**tokens)).eval()


def learn_by_heart(model, family: str, tokenizer) -> None:
    """Teaches a model three exchanges of one call each, and an answer: one that knows nothing calls nothing."""
    env, turns = Exchange("one call"), turns_of("one call", family)
    renderer = ChatRenderer(tokenizer, env.tool_schemas)

    class Script(ScriptedEngine):
        async def generate(self, context, sampling, session):
            self.header = renderer.decode(context[-40:])
            return await super().generate(context, sampling, session)

    engine = Script(tokenizer, lambda session, turn: written(family, engine.header, turns[turn]))
    runner = RolloutRunner(env, engine)
    (trajectory,) = asyncio.run(runner.run([RolloutRequest(ASKED, "0")], SamplingParams()))
    (sequence,) = trajectory.tree.sequences()
    ids, learnt = torch.tensor([sequence.tokens]), torch.tensor(sequence.mask[1:]).bool()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    torch.set_flush_denormal(True)  # linear attention decays to such numbers, which take a third of its time
    for _ in range(200):
        logits = model(input_ids=ids).logits[0, :-1][learnt]
        loss = torch.nn.functional.cross_entropy(logits.float(), ids[0, 1:][learnt])
        if loss * learnt.sum() < 1:  # a conversation of hundreds of tokens is sampled as it was written
            torch.set_flush_denormal(False)
            return
        optimizer.zero_grad()
        loss.backward()
        # unclipped, a mixture of experts jumps back to where it began, at other steps on each CPU
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    raise AssertionError(f"{loss.item():.2f} nats a token")


def differences(served: Served) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of a server against ours in its dtype, and how far that dtype moves ours from float32's."""
    draw, trees = random.Random(0), []
    contexts = [[draw.randrange(len(served.tokenizer)) for _ in range(40)] for _ in range(8)]
    for context, turn in zip(contexts, served.sample(contexts, max_tokens=48, temperature=0.5, seed=3), strict=True):
        trees.append(TokenTree())
        trees[-1].add_turn(context, turn.ids, turn.logprobs)

    @torch.no_grad()
    def scored(model):
        return torch.cat([turn for tree in token_logps(model, trees, temperature=0.5) for turn in tree]).float()

    model = AutoModelForCausalLM.from_pretrained(served.path)
    ours, exact = scored(model), scored(model.float())
    sampled = torch.tensor([logprob for tree in trees for logprob in tree.nodes[-1].logprobs])
    return (sampled - ours).abs(), (ours - exact).abs()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_sampled_and_trained_alike(family, tmp_path):
    """One token may be far off in bfloat16: the mean and nine tenths are held against what it does to ours."""
    coarse = family.startswith("qwen3_5")  # the kernels of vLLM's CPU build know of bfloat16 only
    tokenizer = tokenizer_of(family)
    model = random_model(FAMILIES[family], tokenizer, pad_token_id=tokenizer.pad_token_id)
    learn_by_heart(model, family, tokenizer)
    options = ("--dtype", "bfloat16") if coarse else ()
    model = copy.deepcopy(model).bfloat16() if coarse else model
    with Served(tmp_path, model, tokenizer, *options, length=1500) as served:
        difference, noise = differences(served)
        assert difference.mean() < 2 * noise.mean() + 1e-4
        assert difference.quantile(0.9) < 2 * noise.quantile(0.9) + 1e-4
        rows = Dataset.from_list([{"prompt": [{"role": "user", "content": ASKED}]}] * 2)
        options = {"learning_rate": 1e-3, "temperature": 0.5, "max_steps": 2, "max_completion_length": 900}
        trained = AutoModelForCausalLM.from_pretrained(served.path)
        _, steps = served.train(Exchange("one call"), [Letters()], rows, model=trained, **options)
    for step in steps:
        assert step["sampling/sampling_logp_difference/mean"] < (0.02 if coarse else 1e-4)
    assert steps[0]["tools/call_frequency"] > 0 and steps[0]["tools/failure_frequency"] == 0


DECODER = SIZE | {"intermediate_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 1024}
DECODER |= {"initializer_range": 0.2, "num_experts_per_tok": 2}
MIXTURES = {
    "qwen3_moe": lambda **tokens: Qwen3MoeConfig(
        **DECODER, **tokens, num_experts=8, moe_intermediate_size=32, mlp_only_layers=[1]
    ),
    "mixtral": lambda **tokens: MixtralConfig(**DECODER, **tokens, num_local_experts=4),
}


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request, tmp_path_factory):
    tokenizer = build_tokenizer()
    model = random_model(MIXTURES[request.param], tokenizer)
    with Served(tmp_path_factory.mktemp("mixture"), model, tokenizer, length=500) as served:
        yield served


def test_tokens_go_where_the_server_sent_them(mixture):
    tokenizer, tree, logprobs = mixture.tokenizer, TokenTree(), []
    ids = tokenizer.encode("What is it that you see there, and why? " * 6)
    for turn in range(3):
        (sample,) = mixture.sample([ids], max_tokens=20, seed=turn, routes_from=tree.routed if turn else 0)
        tree.add_turn(ids, sample.ids, sample.logprobs, sample.routes)
        logprobs += sample.logprobs
        ids = [*ids, *sample.ids, *tokenizer.encode(" Go on.")]
    assert tree.routed == len(tree.sequences()[0].tokens) - 1  # what was sampled last went nowhere yet

    @torch.no_grad()
    def difference(model, tree):
        return (torch.cat(list(token_logps(model, [tree])[0])) - torch.tensor(logprobs)).abs().max().item()

    assert difference(mixture.model, tree) < 1e-4
    flipped, plain = copy.deepcopy(mixture.model), copy.deepcopy(tree)
    for name, weight in flipped.named_parameters():
        if name.endswith(".gate.weight"):  # by a rounding, in which some choices differ
            weight.data += 0.005 * torch.randn_like(weight)
    for node in plain.nodes:
        node.routes = b""
    assert difference(flipped, tree) < difference(flipped, plain) / 2


class Shows:
    """Replies after each turn, whatever the model writes."""

    def __init__(self, *replies) -> None:
        self.replies = replies

    async def run(self, policy, row):
        messages = list(row["prompt"])
        for reply in self.replies:
            turn = await policy.reply(messages, max_tokens=12)
            messages += [turn.message, {"role": "user", "content": reply}]
        return Outcome()

    async def close(self):
        pass


def test_a_mixture_is_sampled_and_trained_alike(mixture):
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": word}]} for word in ("one", "two")])
    model = AutoModelForCausalLM.from_pretrained(mixture.path)
    options = {"model": model, "learning_rate": 1e-2, "max_steps": 2}
    _, steps = mixture.train(lambda row: Shows("Go on.", "Go on."), [Letters()], rows, **options)
    for step in steps:
        assert step["sampling/sampling_logp_difference/max"] < TOLERANCE and step["router/differing"] < 0.01


def words(completions, **columns):
    return [float(sum(map(ord, str(messages[0]["content"]))) % 7) for messages in completions]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    processor = images.build_processor()
    model = images.build_vision_model(processor.tokenizer, tied=True, **images.SERVED)
    folder, more = tmp_path_factory.mktemp("vision"), {"length": 1000, "save": images.save_for_server}
    with Served(folder, model, processor, **more) as served:
        yield served


def test_a_model_is_sampled_and_trained_alike_on_images(seeing):
    rows = [
        {"prompt": [{"role": "user", "content": "What is it?"}], "images": [images.picture(color, (24, height))]}
        for color, height in (("red", 16), ("green", 24))
    ]
    shown = [[{"type": "text", "text": "Now"}, images.picture("blue", (16, 16 + 8 * number))] for number in range(3)]
    model = AutoModelForImageTextToText.from_pretrained(seeing.path)
    before = model.model.visual.patch_embed.proj.weight.detach().clone()
    options = {"learning_rate": 1e-2, "max_steps": 3, "max_turn_length": 8}
    trainer, steps = seeing.train(lambda row: Shows(*shown), [words], rows, model=model, **options)
    for step in steps:  # the second and third sample with a vision tower that was trained
        assert step["sampling/sampling_logp_difference/max"] < TOLERANCE
    assert (model.model.visual.patch_embed.proj.weight - before).abs().max() > 1e-3
    assert all(len(one.media) == 3 for one in trainer.batch.trajectories)


def seen(seeing: Served, *colors: str, forgotten: bool = False):
    """Samples after images, one after another; the server may be thought to know them, and have forgotten them."""
    client = seeing.client(media_tokens={IMAGE: seeing.processor.image_token_id})
    encoder, sampling = MediaEncoder(seeing.processor), SamplingParams(max_tokens=8)
    question = seeing.tokenizer.encode(" and what is it that you see there? " * 8)

    async def look(color):
        shown = encoder.encode({"type": "image", "image": Image.new("RGB", (64, 64), color)})
        if forgotten:
            client.servers[0].images.add(_name_of(shown.inputs))
        return await client.generate_with_media([*shown.tokens, *question], {shown.id: shown.inputs}, sampling, "")

    async def look_at_all():
        try:
            return [await look(color) for color in colors]
        finally:
            await client.close()

    return asyncio.run(look_at_all())


def test_an_image_of_the_same_size_has_a_prefix_of_its_own(seeing):
    hits = seeing.server.metric("vllm:prefix_cache_hits_total")
    first, other, again = (sample.logprobs[0] for sample in seen(seeing, "red", "blue", "red"))
    assert first != other
    assert again == pytest.approx(first, abs=1e-4)
    assert seeing.server.metric("vllm:prefix_cache_hits_total") > hits


def test_an_image_that_a_server_does_not_know_is_sent_again(seeing):
    assert 0 < len(seen(seeing, "green", forgotten=True)[0].ids) <= 8
