"""Models of every family that hears: ids as the processor gives them, sampled and scored as the model alone would."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import pytest
import torch
from support.audio import RATE, SOUND_FAMILIES, granite, tone
from support.vision import Family
from torch import Tensor

from mt_grpo.envs import Outcome
from mt_grpo.errors import UnsupportedModelError
from mt_grpo.forward import token_logps
from mt_grpo.forward.media import media_tokens, real_ids
from mt_grpo.forward.model import enable_trees
from mt_grpo.forward.packing import flatten
from mt_grpo.forward.plan import ForwardPlan
from mt_grpo.forward.probe import prove_media
from mt_grpo.media import SOUND
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams
from mt_grpo.rollout.engines.transformers import TransformersEngine
from mt_grpo.rollout.media import MediaEncoder
from mt_grpo.rollout.rendering import ChatRenderer
from mt_grpo.sounds import read_part
from mt_grpo.trajectory import Trajectory

TONES = {"low": (30.0, 1.0), "high": (90.0, 1.7), "long": (50.0, 2.5)}
PARTS = {name: read_part({"type": "audio", "audio": tone(*made)}) for name, made in TONES.items()}


@cache
def family(name: str) -> Family:
    return SOUND_FAMILIES[name]()


def encoder_of(processor: Any, model: Any) -> MediaEncoder:
    return MediaEncoder(processor, media_tokens(model.config))


def asked(words: str, *sounds: str) -> dict[str, Any]:
    return {"role": "user", "content": [*(PARTS[name] for name in sounds), {"type": "text", "text": words}]}


def inputs_of(processor: Any, texts: list[str], names: list[str]) -> dict[str, Tensor]:
    """What the processor makes of texts that play sounds."""
    sounds = [PARTS[name]["audio"].samples.copy() for name in names]
    audio = {"audio": sounds, "audio_kwargs": {"sampling_rate": RATE}} if sounds else {}
    return dict(
        processor(text=texts, return_tensors="pt", text_kwargs={"padding": True}, add_special_tokens=False, **audio)
    )


@pytest.mark.parametrize("name", SOUND_FAMILIES)
def test_a_conversation_has_the_ids_of_its_processor(name):
    processor, model = family(name)
    answer = {"role": "assistant", "content": [{"type": "text", "text": "It is a tone."}]}
    messages = [asked("What is it?", "low"), answer, asked("Now?", "high")]
    ids = torch.tensor(ChatRenderer(processor.tokenizer, images=encoder_of(processor, model)).prompt_ids(messages))
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, between, after = (
        processor.tokenizer.encode(piece, add_special_tokens=False) for piece in text.split(processor.audio_token)
    )
    # some processors take one sound to a text
    low, high = (inputs_of(processor, [processor.audio_token], [name])["input_ids"][0] for name in ("low", "high"))
    expected = [*before, *low.tolist(), *between, *high.tolist(), *after]
    assert real_ids(ids, model.config).tolist() == expected
    assert int((ids < 0).sum()) == expected.count(media_tokens(model.config)[SOUND]) > 4


class Player:
    """Three turns with a sound each. The last one has forgotten the first answer."""

    async def run(self, policy: Any, row: dict[str, Any]) -> Outcome:
        messages = list(row["prompt"])
        for number, name in enumerate(("high", "long", "low")):
            turn = await policy.reply(messages, max_tokens=4)
            messages += [turn.message, asked("Now", name)]
            if number == 1:
                del messages[1:3]
        return Outcome()

    async def close(self) -> None:
        pass


def own_logps(processor: Any, model: Any, trajectory: Trajectory) -> Tensor:
    """Log-probs of all sampled tokens, by the model's own forward over what its processor makes of the sounds."""
    encoder, shown = encoder_of(processor, model), trajectory.images
    names = {encoder.encode(PARTS[name]).id: name for name in PARTS}
    found = []
    for turn, action in enumerate(trajectory.tree.actions()):
        path = trajectory.tree.path_of_turn(turn)
        order, rest = [], [token for token in path if token < 0]
        while rest:
            order.append(rest[0])
            rest = rest[shown[rest[0]].inputs.size :]
        played = [names[each] for each in order]
        made = inputs_of(processor, [processor.audio_token] * len(order), played) if played else {}
        features = {key: value for key, value in made.items() if key not in ("input_ids", "attention_mask")}
        features = {key: value for key, value in features.items() if not key.endswith("token_type_ids")}
        ids = real_ids(torch.tensor([path]), model.config)
        mask = torch.ones_like(ids)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **features).logits[
            0, -len(action) - 1 : -1
        ]
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(action)[:, None])[:, 0])
    return torch.cat(found)


def gradients(model: Any, logps: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (logps * torch.linspace(-1, 1, len(logps))).sum().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("name", SOUND_FAMILIES)
def test_it_samples_and_scores_as_the_model_alone_does(name):
    processor, model = family(name)
    engine = TransformersEngine(model, processor.tokenizer)
    runner = RolloutRunner(Player, engine, images=encoder_of(processor, model))
    prompts = [[asked("What is it?", "low")], [asked("What is it?")]]
    requests = [RolloutRequest(prompt, str(number), {}, number) for number, prompt in enumerate(prompts)]
    trajectories = asyncio.run(runner.run(requests, SamplingParams(temperature=1.0)))
    assert [each.error for each in trajectories] == [None, None]
    images = {number: image.inputs for each in trajectories for number, image in each.images.items()}
    trees = [each.tree for each in trajectories]
    assert [tree.num_sequences for tree in trees] == [2, 2]

    expected = torch.cat([own_logps(processor, model, each) for each in trajectories])
    sampled = [
        value
        for tree in trees
        for turn in range(tree.num_turns)
        for node in tree.nodes
        if node.turn == turn
        for value in node.logprobs
    ]
    torch.testing.assert_close(torch.tensor(sampled), expected.detach(), rtol=1e-5, atol=1e-5)

    theirs = gradients(model, expected)
    heard = [value.abs().max() for part, value in theirs.items() if "audio" in part or "encoder" in part]
    assert max(heard) > 1e-3
    for forward in ("tree", "padded"):
        logps = torch.cat(
            [each for turns in token_logps(model, trees, forward=forward, images=images) for each in turns]
        )
        torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)
        for part, value in gradients(model, logps).items():
            # a norm of few numbers makes much of rounding
            assert (value - theirs[part]).abs().max() <= 5e-5 * theirs[part].abs().max() + 1e-7, (forward, part)


class Once:
    """One turn."""

    async def run(self, policy: Any, row: dict[str, Any]) -> Outcome:
        await policy.reply(row["prompt"], max_tokens=4)
        return Outcome()

    async def close(self) -> None:
        pass


def test_a_model_that_hears_padding_is_refused_in_batches():
    """Sampled and scored turn by turn it is exact: nothing longer is beside a sound there."""
    processor, model = granite()
    runner = RolloutRunner(Once, TransformersEngine(model, processor.tokenizer), images=encoder_of(processor, model))
    requests = [RolloutRequest([asked("What?", name)], name, {}, 0) for name in ("low", "long")]
    trajectories = asyncio.run(runner.run(requests, SamplingParams(temperature=1.0)))
    images = {number: image.inputs for each in trajectories for number, image in each.images.items()}
    trees = [each.tree for each in trajectories]
    expected = torch.cat([own_logps(processor, model, each) for each in trajectories])
    sampled = [value for tree in trees for node in tree.nodes if node.turn >= 0 for value in node.logprobs]
    torch.testing.assert_close(torch.tensor(sampled), expected.detach(), rtol=1e-5, atol=1e-5)
    found = [each for turns in token_logps(model, trees, forward="turn_by_turn", images=images) for each in turns]
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-5)
    enable_trees(model)
    problems = {"tree": "packed trees with sounds", "padded": "padded rows .* set `forward: turn_by_turn`"}
    for forward, problem in problems.items():
        with pytest.raises(UnsupportedModelError, match=problem):
            prove_media(model, ForwardPlan([*map(flatten, trees)], media=images, forward=forward))
        prove_media(model, ForwardPlan([flatten(trees[0])], media=images, forward=forward))
