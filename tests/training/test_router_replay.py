"""`router_replay`: a mixture is trained through the experts that its tokens were sampled by."""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import logging

import numpy as np
import pytest
from support.mixtures import FlippingEngine, build_mixture
from support.trainers import batch, check_log_probs, log_probs, logged, same, trained_tokens, weights
from transformers import TrainerCallback

from mt_grpo.rollout import SamplingParams
from mt_grpo.rollout.engines.transformers import TransformersEngine
from mt_grpo.rollout.engines.vllm.client import read_sample
from mt_grpo.token_tree import Routes

OPTIONS = {"max_turn_length": 12, "router_aux_loss_coef": 0.0, "max_steps": 1}
SAVES = {"save_strategy": "steps", "save_steps": 1}


def mixture(name, tokenizer, **more):
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    return build_mixture(name, len(tokenizer), **ids, **more)


def flip(trainer) -> None:
    """Has the trainer's engine sample with routers that flip now and then."""
    trainer.runner.engine.__class__ = FlippingEngine
    trainer._unproven = None  # which samples from another distribution, as a server may


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_replay_takes_away_what_other_routes_make_different(name, build, tokenizer):
    found = {}
    for replay in (True, False):
        trainer = build(None, mixture(name, tokenizer), router_replay=replay, **OPTIONS)
        trainer.use_vllm = True  # as with a server: the loss is given the engine's log-probs
        flip(trainer)
        inputs = batch(trainer)
        difference = log_probs(trainer, inputs) - inputs["sampling_per_token_logps"]
        found[replay] = difference[trained_tokens(inputs)].abs().max()
    assert found[False] > 0.02 and found[True] < 1e-5


def test_a_run_trains_on_routes_and_says_how_many_differ(build, tokenizer):
    trainer = build(None, mixture("qwen3_moe", tokenizer), **OPTIONS | {"max_steps": 2})
    flip(trainer)
    trainer.train()
    found = logged(trainer, "router/differing", "router/shared_prefix_differing")
    assert len(found) == 2 and all(0 < differing < 1 for differing, _ in found)


def test_the_trainers_own_engine_differs_in_no_route(build, tokenizer):
    (trainer := build(None, mixture("mixtral", tokenizer), **OPTIONS)).train()
    assert logged(trainer, "router/differing", "router/shared_prefix_differing") == [[0, 0]]
    trainer.use_vllm = True
    check_log_probs(trainer, batch(trainer))


def test_without_replay_no_route_is_kept(build, tokenizer):
    (trainer := build(None, mixture("mixtral", tokenizer), router_replay=False, **OPTIONS)).train()
    assert not any(row.routes for row in trainer.batch.token_rows) and not logged(trainer, "router/differing")


def test_a_run_that_goes_on_without_replay_drops_its_routes(build, tokenizer, tmp_path):
    options = {**OPTIONS, "steps_per_generation": 2, **SAVES}
    build(None, mixture("mixtral", tokenizer), **options).train()
    trainer = build(None, mixture("mixtral", tokenizer), **options | {"max_steps": 2, "router_replay": False})
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert trainer.state.global_step == 2 and trainer.model._replayer.take_counts().routed == 0


def test_an_engine_that_gives_no_routes_is_named_once(build, tokenizer, caplog):
    trainer = build(None, mixture("mixtral", tokenizer), **OPTIONS | {"max_steps": 2})
    trainer.runner.engine.record_routes = False
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert sum("does not say which experts" in record.getMessage() for record in caplog.records) == 1


def test_batched_requests_have_the_routes_that_each_has_alone(tokenizer):
    model = mixture("qwen3_moe", tokenizer)
    engine = TransformersEngine(model, tokenizer, record_routes=True)
    contexts = [tokenizer.encode(text) for text in ("What is the capital of Peru", "Lima", "answer the query")]

    async def ask(numbers):
        async def one(number):
            sampling = SamplingParams(max_tokens=5 + number, seed=number, routes_from=number)
            try:
                return await engine.generate(contexts[number], sampling, f"{number}")
            finally:
                engine.release(f"{number}")

        return await asyncio.gather(*map(one, numbers))

    together = asyncio.run(ask([0, 1, 2]))
    for number, sample in enumerate(together):
        (alone,) = asyncio.run(ask([number]))
        assert sample.ids == alone.ids and sample.routes == alone.routes
        tokens = len(contexts[number]) + len(sample.ids) - 1 - number
        assert sample.routes.first == number and len(sample.routes.data) == tokens * sample.routes.width


def test_routes_of_a_server_are_read_from_its_answer():
    found = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    file = io.BytesIO()
    np.save(file, found)
    choice = {
        "logprobs": {"tokens": ["token_id:5"], "token_logprobs": [-0.5]},
        "finish_reason": "stop",
        "routed_experts": base64.b64encode(file.getvalue()).decode(),
    }
    assert read_sample({"choices": [choice]}, "", 7).routes == Routes(7, 6, found.tobytes())
    assert read_sample({"choices": [copy.deepcopy(choice) | {"routed_experts": None}]}, "").routes is None


@pytest.mark.slow
def test_a_resumed_mixture_has_the_experts_of_its_checkpoint(build, tokenizer, tmp_path):
    (first := build(None, mixture("qwen3_moe", tokenizer), **OPTIONS, **SAVES)).train()
    resumed = build(None, mixture("qwen3_moe", tokenizer, seed=1), **OPTIONS, **SAVES)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert same(weights(first), weights(resumed))


@pytest.mark.slow
def test_the_best_mixture_has_the_experts_of_its_checkpoint(build, tokenizer):
    """Every evaluation is as good, so that the first is the best."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 1, "load_best_model_at_end": True}
    options |= {"metric_for_best_model": "eval_reward", "router_aux_loss_coef": 0.0, **SAVES}
    trainer, after_steps, keep = build(model=mixture("qwen3_moe", tokenizer), **options), [], TrainerCallback()
    keep.on_step_end = lambda *given, **more: after_steps.append(weights(trainer))
    trainer.add_callback(keep)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert same(after_steps[0], weights(trainer)) and not same(after_steps[1], weights(trainer))
