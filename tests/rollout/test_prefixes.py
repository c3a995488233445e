"""Turns that go on from what the last turn computed, and the proof that the engine samples what is trained."""

import asyncio
import threading
import time
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.architectures import build_random
from support.hybrids import build_hybrid
from support.models import build_model, build_tokenizer
from support.sampling import truncated
from support.waiting import in_loop, until_true
from transformers import AutoModelForCausalLM, DeepseekV4Config

from mt_grpo.errors import ConfigError
from mt_grpo.rollout import SamplingParams
from mt_grpo.rollout.engines.transformers import TransformersEngine, _measure_engine, _probe_contexts, prove_engine

pytestmark = pytest.mark.filterwarnings("error::FutureWarning")  # transformers renames what it is given

TOKENIZER = build_tokenizer()
SIZE = {"vocab_size": len(TOKENIZER)}
WORDS = TOKENIZER.encode("What is the capital of Peru user answer the query name of Lima")


class Counting(TransformersEngine):
    """Counts the places of each forward of its batches."""

    def __init__(self, model):
        super().__init__(model, TOKENIZER, patience=0.02)
        self.keeps_prefixes = True
        self.places: list[int] = []

    def _generate(self, batch, drawing):
        embedding = self.model.get_input_embeddings()
        counted = embedding.register_forward_pre_hook(lambda _, given: self.places.append(given[0].shape[1]))
        super()._generate(batch, drawing)
        counted.remove()

    async def go_on(self, contexts, options=None, **sampling):
        """One turn of these conversations, which is what its model samples of each alone; with it they go on."""
        options = options or {}
        params = SamplingParams(**{"max_tokens": 4, **sampling, **options})
        samples = await asyncio.gather(*(self.generate(context, params, name) for name, context in contexts.items()))
        for context, sample in zip(contexts.values(), samples, strict=True):
            with torch.no_grad():
                logits = self.model(torch.tensor([context + sample.ids])).logits[0, len(context) - 1 : -1].float()
            expected = [
                truncated(logits[place], context + sample.ids[:place], **options)[token].log().item()
                for place, token in enumerate(sample.ids)
            ]
            assert sample.logprobs == pytest.approx(expected, abs=1e-5)
        return {name: contexts[name] + sample.ids for name, sample in zip(contexts, samples, strict=True)}


@pytest.fixture
def engine(model):
    return Counting(model.eval())


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3, "temperature": 0.7}], ids=["plain", "penalty"])
@in_loop
async def test_a_turn_computes_only_what_was_added_to_the_last(engine, options):
    contexts = {"a": WORDS * 3, "b": WORDS[:4]}
    for added in ({"a": WORDS[:2], "b": WORDS[:5]}, {"a": WORDS[:6], "b": WORDS[:1]}, {"a": [], "b": []}):
        said = await engine.go_on(contexts, options)
        contexts = {name: said[name] + more for name, more in added.items()}
    first, second, third = len(WORDS) * 3, 1 + 5, 1 + 6  # the last token sampled is computed with what follows it
    assert engine.places == [first, 1, 1, 1, second, 1, 1, 1, third, 1, 1, 1]


@pytest.mark.parametrize("change", ["weights", "version", "history", "cut", "company", "model"])
@in_loop
async def test_what_is_changed_is_computed_again(engine, change):
    contexts = await engine.go_on({"a": list(WORDS), "b": WORDS[:4]})
    contexts = {name: said + WORDS[:2] for name, said in contexts.items()}
    match change:
        case "weights":
            with torch.no_grad():
                engine.model.model.layers[0].mlp.down_proj.weight.mul_(3.0)
        case "version":
            engine.weight_version = 2
        case "history":
            contexts["b"] = WORDS[1:5] + contexts["b"][4:]
        case "cut":
            contexts["b"] = contexts["b"][:7]  # to what is computed, after which nothing is added
        case "company":
            contexts["c"] = WORDS[:3]
        case "model":
            engine.use_model(build_model(TOKENIZER).eval())
    await engine.go_on(contexts)
    assert engine.places[4] == max(map(len, contexts.values()))


@in_loop
async def test_a_recorder_of_routes_that_finds_none_is_no_hindrance(engine):
    engine.record_routes = True
    said = await engine.go_on({"a": WORDS})
    await engine.go_on({"a": said["a"] + WORDS[:2]})
    assert engine.places[4] == 3


@in_loop
async def test_windows_are_computed_whole():
    engine = Counting(build_random("gemma 2", **SIZE).float().eval())
    said = await engine.go_on({"a": WORDS})
    await engine.go_on({"a": said["a"] + WORDS[:2]})
    assert len(said["a"]) + 2 in engine.places


@in_loop
async def test_nothing_is_kept_when_no_conversation_is_left(engine):
    await engine.go_on({"a": WORDS, "b": WORDS[:4]})
    engine.release("a")
    assert engine._prefixes is not None
    engine.release("b")
    assert engine._prefixes is None


@in_loop
async def test_rows_with_more_padding_than_tokens_are_computed_again(engine):
    contexts = {name: WORDS[:4] for name in "abc"}
    for turn in range(6):
        said = await engine.go_on(contexts)  # a long result for each in turns
        contexts = {name: said[name] + (WORDS * 3 if name == "abc"[turn % 3] else WORDS[:1]) for name in "abc"}
    begun, long = [places for places in engine.places if places > 1], len(WORDS) * 3 + 1
    assert begun[1] == long and any(places > long + 5 for places in begun[2:])


@cache
def shared_model():
    return build_model(TOKENIZER).eval()


turn = st.lists(
    st.tuples(st.sampled_from("0123"), st.integers(1, 9), st.sampled_from([0, 0, 2])),
    min_size=1,
    max_size=4,
    unique_by=lambda asked: asked[0],
)


@given(turns=st.lists(turn, min_size=1, max_size=5), budget=st.integers(1, 4))
@settings(max_examples=25, deadline=None)
@in_loop
async def test_any_conversations_sample_what_rows_alone_do(turns, budget):
    engine = Counting(shared_model())
    contexts = {name: WORDS[: 3 + 2 * int(name)] for name in "0123"}
    for number, asked in enumerate(turns):
        # some have lost their beginning
        now = {name: contexts[name][lost:] + WORDS[:length] for name, length, lost in asked}
        for name in set(contexts) - set(now):  # others are elsewhere, and not waited for
            engine.release(name)
        contexts |= await engine.go_on(now, max_tokens=budget, seed=number, stop=("a",))


# The proof

COMPRESSED = {
    **{**SIZE, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "q_lora_rank": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8, "qk_rope_head_dim": 8, "head_dim": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def deepseek_v4():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(DeepseekV4Config(**COMPRESSED)).eval()


def engine_of(model) -> TransformersEngine:
    return TransformersEngine(model.eval(), TOKENIZER)


WRONG = {
    "keys compressed by their place in the row": deepseek_v4,
    "queries scaled by their place in the row": lambda: build_random("llama 4", **SIZE),
    "a cache that goes on otherwise": lambda: build_hybrid("minimax", **SIZE),
}
RIGHT = {
    "windows": lambda: build_random("gpt-oss", **SIZE),
    "a table of positions": lambda: build_random("gpt-2", **SIZE, n_positions=64),
    "biases by distance": lambda: build_random("bloom", **SIZE),
    "states": lambda: build_hybrid("mamba 2", **SIZE),
    "a step that is clamped in rows alone": lambda: build_hybrid("zamba 2", **SIZE),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_model_that_padding_or_its_cache_changes_is_refused(kind):
    with pytest.raises(ConfigError, match="several lengths is sampled .* nats away .* explains 1.0e-03: set `use_vll"):
        asyncio.run(prove_engine(engine_of(WRONG[kind]().float())))


def test_coarser_precisions_hide_no_wrong_engine():
    with pytest.raises(ConfigError, match="set `use_vllm: true`"):
        asyncio.run(prove_engine(engine_of(deepseek_v4().bfloat16())))


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_samples_what_is_trained_is_accepted(kind, dtype):
    asyncio.run(prove_engine(engine_of(RIGHT[kind]().to(dtype))))


@pytest.mark.parametrize(
    ("kind", "keeps"), [("gpt-2", True), ("bloom", True), ("mpt", False)], ids=["table", "biases", "by place"]
)
def test_an_engine_keeps_prefixes_where_its_proof_shows_it(kind, keeps):
    """MPT's biases go by the place in the cache, which padding between turns moves."""
    engine = engine_of(build_random(kind, **SIZE).float())
    asyncio.run(prove_engine(engine))
    assert engine.keeps_prefixes is keeps


def test_contexts_are_longer_than_small_windows_and_padded_oddly():
    long, short = (
        [len(context) for context in _probe_contexts(engine_of(model))]
        for model in (build_random("gpt-oss", sliding_window=400), build_random("gpt-2", n_positions=20))
    )
    assert long[0] > 400 and (long[0] - long[1]) % 2 and long[2] == 5
    assert short == [4, 3, 4]


def test_spoilt_weights_are_not_blamed_on_the_engine():
    model = build_model(TOKENIZER)
    model.model.norm.weight.data.fill_(float("nan"))
    assert asyncio.run(_measure_engine(engine_of(model))).holds


@in_loop
async def test_a_measurement_that_is_cancelled_leaves_no_batch_behind():
    engine, begun = engine_of(build_model(TOKENIZER)), threading.Event()
    engine.model.register_forward_pre_hook(lambda *_: (begun.set(), time.sleep(0.05))[1])
    measuring = asyncio.ensure_future(_measure_engine(engine))
    await until_true(begun.is_set)
    measuring.cancel()
    await asyncio.wait([measuring])
    assert engine._batch is None
