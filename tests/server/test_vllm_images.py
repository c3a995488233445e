"""Images on a real vLLM server: a vision-language model sees them in prompts and in replies, and is trained."""

from __future__ import annotations

import asyncio

import pytest
from PIL import Image
from support.images import SERVED, build_processor, build_vision_model, picture, save_for_server
from support.marks import needs_server
from support.models import CPU_RUN
from support.servers import RealServer
from transformers import AutoModelForImageTextToText

from mt_grpo import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.envs import Outcome
from mt_grpo.media import IMAGE
from mt_grpo.rollout import SamplingParams
from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.rollout.engines.vllm.images import name_of
from mt_grpo.rollout.media import MediaEncoder

pytestmark = [needs_server, pytest.mark.server]

COLORS = ("red", "green")
ROWS = [
    {"prompt": [{"role": "user", "content": "What is it?"}], "images": [picture(color, (24, 16 + 8 * number))]}
    for number, color in enumerate(COLORS)
]


class Screen:
    """Shows another image after each turn, whatever the model writes."""

    async def run(self, policy, row):
        messages = list(row["prompt"])
        for number in range(3):
            turn = await policy.reply(messages, max_tokens=8)
            parts = [{"type": "text", "text": "Now"}, picture("blue", (16, 16 + 8 * number))]
            messages += [turn.message, {"role": "user", "content": parts}]
        return Outcome()

    async def close(self):
        pass


def words(completions, **columns):
    return [float(sum(map(ord, str(messages[0]["content"]))) % 7) for messages in completions]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder, processor = tmp_path_factory.mktemp("vision"), build_processor()
    model = build_vision_model(processor.tokenizer, tied=True, **SERVED)
    save_for_server(model, processor, folder / "model")
    server = RealServer(str(folder / "model"), folder / "server.log", "--vllm_max_model_length", "1000")
    try:
        yield server.start(), folder, processor
    finally:
        server.stop()


def test_a_model_is_sampled_and_trained_alike_on_images(served):
    server, folder, processor = served
    args = MTGRPOConfig(
        str(folder / "run"),
        **CPU_RUN,
        use_vllm=True,
        vllm_server_base_url=server.url,
        learning_rate=1e-2,
        max_steps=3,
        max_turn_length=8,
    )
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    before = model.model.visual.patch_embed.proj.weight.detach().clone()
    trainer = MTGRPOEnvTrainer(model, Screen, [], [words], args, ROWS, processing_class=processor)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 3
    for step in steps:  # the second and third sample with a vision tower that was trained
        assert step["sampling/sampling_logp_difference/max"] < 1e-4
    assert (model.model.visual.patch_embed.proj.weight - before).abs().max() > 1e-3
    assert all(len(one.media) == 3 for one in trainer.batch.trajectories)


def test_an_image_of_the_same_size_has_a_prefix_of_its_own(served):
    server, _, processor = served
    encoder = MediaEncoder(processor)
    red, blue = (
        encoder.encode({"type": "image", "image": Image.new("RGB", (64, 64), color)}) for color in ("red", "blue")
    )
    images, sampling = {one.id: one.inputs for one in (red, blue)}, SamplingParams(max_tokens=8)

    async def ask(*shown):
        client = VLLMServerClient(server.url, processor.tokenizer, media_tokens={IMAGE: processor.image_token_id})
        question = processor.tokenizer.encode(" and what is it that you see there? " * 8)
        try:
            return [
                (await client.generate_with_media([*one.tokens, *question], images, sampling, "")).logprobs[0]
                for one in shown
            ]
        finally:
            await client.close()

    hits = server.metric("vllm:prefix_cache_hits_total")
    first, other, again = asyncio.run(ask(red, blue, red))
    assert first != other
    assert again == pytest.approx(first, abs=1e-4)
    assert server.metric("vllm:prefix_cache_hits_total") > hits


def test_an_image_that_a_server_does_not_know_is_sent_again(served):
    server, _, processor = served
    encoder = MediaEncoder(processor)
    shown = encoder.encode({"type": "image", "image": Image.new("RGB", (32, 32), "green")})

    async def ask():
        client = VLLMServerClient(server.url, processor.tokenizer, media_tokens={IMAGE: processor.image_token_id})
        client.servers[0].images.add(name_of(shown.inputs))  # as if it had been sent, and pushed out since
        context, images = [*shown.tokens, *processor.tokenizer.encode("What is it?")], {shown.id: shown.inputs}
        try:
            return await client.generate_with_media(context, images, SamplingParams(max_tokens=4), "")
        finally:
            await client.close()

    assert 0 < len(asyncio.run(ask()).ids) <= 4
