"""`router_replay`: a mixture is trained through the experts that its tokens were sampled by."""

import asyncio
import base64
import io
import logging

import numpy as np
import pytest
from support.mixtures import FlippingEngine, build_mixture
from support.trainers import at, batch, check_log_probs, log_probs, logged, same, trained_tokens, weights

from mt_grpo.rollout import SamplingParams
from mt_grpo.rollout.engines.transformers import TransformersEngine
from mt_grpo.rollout.engines.vllm import _read_sample
from mt_grpo.token_tree import Routes

SAVES = {"save_strategy": "steps", "save_steps": 1}
ROUTES = "router/differing", "router/shared_prefix_differing"


@pytest.fixture
def mixture(tokenizer):
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    return lambda name, **more: build_mixture(name, len(tokenizer), **ids, **more)


@pytest.fixture
def of_mixture(build, mixture):
    """Makes trainers of mixtures that sample themselves, with routers that flip now and then if they are told to."""

    def make(name, seed=0, flips=False, **options):
        options = {"max_turn_length": 12, "router_aux_loss_coef": 0.0, "max_steps": 1, **options}
        trainer = build(None, mixture(name, seed=seed), **options)
        if flips:
            trainer.runner.engine.__class__ = FlippingEngine
            trainer._unproven = None  # which samples from another distribution, as a server may
        return trainer

    return make


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_replay_takes_away_what_other_routes_make_different(of_mixture, name):
    found = {}
    for replay in (True, False):
        trainer = of_mixture(name, flips=True, router_replay=replay)
        trainer.use_vllm = True  # as with a server: the loss is given the engine's log-probs
        inputs = batch(trainer)
        difference = log_probs(trainer, inputs) - inputs["sampling_per_token_logps"]
        found[replay] = difference[trained_tokens(inputs)].abs().max()
    assert found[False] > 0.02 and found[True] < 1e-5


def test_a_run_trains_on_routes_and_says_how_many_differ(of_mixture):
    (trainer := of_mixture("qwen3_moe", flips=True, max_steps=2)).train()
    found = logged(trainer, *ROUTES)
    assert len(found) == 2 and all(0 < differing < 1 for differing, _ in found)
    (own := of_mixture("mixtral")).train()
    assert logged(own, *ROUTES) == [[0, 0]]
    own.use_vllm = True
    check_log_probs(own, batch(own))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_a_mixture_that_asks_for_its_balance_can_be_sampled(of_mixture, mixture, name):
    """As one does that was trained before, or with `model_init_kwargs: {output_router_logits: true}`."""
    trainers = [of_mixture(name, router_aux_loss_coef=0.1, max_steps=2) for _ in range(2)]
    trainers[0].model.config.output_router_logits = True
    for trainer in trainers:
        trainer.train()
    assert same(*map(weights, trainers)) and trainers[0].model.config.output_router_logits


def test_a_run_that_goes_on_without_replay_drops_its_routes(of_mixture, tmp_path):
    of_mixture("mixtral", steps_per_generation=2, **SAVES).train()
    trainer = of_mixture("mixtral", steps_per_generation=2, max_steps=2, router_replay=False, **SAVES)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert trainer.state.global_step == 2 and trainer.model._replayer.take_counts().routed == 0
    (trainer := of_mixture("mixtral", router_replay=False)).train()  # from its beginning
    assert not any(row.routes for row in trainer.batch.token_rows) and not logged(trainer, "router/differing")


def test_an_engine_that_gives_no_routes_is_named_once(of_mixture, caplog):
    trainer = of_mixture("mixtral", max_steps=2)
    trainer.runner.engine.record_routes = False
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert sum("does not say which experts" in record.getMessage() for record in caplog.records) == 1


def test_batched_requests_have_the_routes_that_each_has_alone(mixture, tokenizer):
    engine = TransformersEngine(mixture("qwen3_moe"), tokenizer, record_routes=True)
    contexts = [tokenizer.encode(text) for text in ("What is the capital of Peru", "Lima", "answer the query")]

    async def ask(*numbers):
        async def one(number):
            sampling = SamplingParams(max_tokens=5 + number, seed=number, routes_from=number)
            try:
                return await engine.generate(contexts[number], sampling, f"{number}")
            finally:
                engine.release(f"{number}")

        return await asyncio.gather(*map(one, numbers))

    for number, sample in enumerate(asyncio.run(ask(0, 1, 2))):
        (alone,) = asyncio.run(ask(number))
        assert (sample.ids, sample.routes) == (alone.ids, alone.routes)
        tokens = len(contexts[number]) + len(sample.ids) - 1 - number
        assert sample.routes.first == number and len(sample.routes.data) == tokens * sample.routes.width


def test_routes_of_a_server_are_read_from_its_answer():
    found = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    np.save(file := io.BytesIO(), found)

    def read(routes, *first):
        logprobs = {"tokens": ["token_id:5"], "token_logprobs": [-0.5]}
        choice = {"logprobs": logprobs, "finish_reason": "stop", "routed_experts": routes}
        return _read_sample({"choices": [choice]}, "", *first).routes

    assert read(base64.b64encode(file.getvalue()).decode(), 7) == Routes(7, 6, found.tobytes())
    assert read(None) is None


@pytest.mark.slow
def test_a_resumed_mixture_has_the_experts_of_its_checkpoint(of_mixture, tmp_path):
    (first := of_mixture("qwen3_moe", **SAVES)).train()
    resumed = of_mixture("qwen3_moe", seed=1, **SAVES)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert same(weights(first), weights(resumed))


@pytest.mark.slow
def test_the_best_mixture_has_the_experts_of_its_checkpoint(build, mixture):
    """Every evaluation is as good, so that the first is the best."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 1, "load_best_model_at_end": True}
    options |= {"metric_for_best_model": "eval_reward", "router_aux_loss_coef": 0.0, **SAVES}
    after_steps = []
    keeps = at("on_step_end", lambda **_: after_steps.append(weights(trainer)))
    (trainer := build(model=mixture("qwen3_moe"), callbacks=[keeps], **options)).train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert same(after_steps[0], weights(trainer)) and not same(after_steps[1], weights(trainer))
