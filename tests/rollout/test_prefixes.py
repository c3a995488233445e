"""Turns that go on from what the last turn computed: the same distribution, and only what was added is computed."""

from __future__ import annotations

import asyncio

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.architectures import build_random
from support.models import build_model, build_tokenizer
from support.sampling import truncated

from mt_grpo.rollout import SamplingParams
from mt_grpo.rollout.engines.proof import prove_engine
from mt_grpo.rollout.engines.transformers import TransformersEngine

pytestmark = pytest.mark.filterwarnings("error::FutureWarning")  # transformers renames what it is given

TOKENIZER = build_tokenizer()
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


@pytest.fixture
def frozen(model):
    return model.eval()


async def ask(engine, contexts, **sampling):
    """One turn of the conversations named."""
    options = SamplingParams(**{"max_tokens": 4, **sampling})
    return dict(
        zip(
            contexts, await asyncio.gather(*(engine.generate(c, options, s) for s, c in contexts.items())), strict=True
        )
    )


@torch.no_grad()
def assert_is_of(model, context, sample, **options):
    logits = model(torch.tensor([context + sample.ids])).logits[0, len(context) - 1 : -1].float()
    for place, (token, logprob) in enumerate(zip(sample.ids, sample.logprobs, strict=True)):
        expected = truncated(logits[place], context + sample.ids[:place], **options)[token].log()
        assert logprob == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3, "temperature": 0.7}], ids=["plain", "penalty"])
def test_a_turn_computes_only_what_was_added_to_the_last(frozen, options):
    engine = Counting(frozen)

    async def converse():
        contexts = {"a": WORDS * 3, "b": WORDS[:4]}
        for added in ({"a": WORDS[:2], "b": WORDS[:5]}, {"a": WORDS[:6], "b": WORDS[:1]}, {}):
            samples = await ask(engine, contexts, **options)
            for session, sample in samples.items():
                assert_is_of(frozen, contexts[session], sample, **options)
            contexts = {name: contexts[name] + samples[name].ids + more for name, more in added.items()}

    asyncio.run(converse())
    first, second, third = len(WORDS) * 3, 1 + 5, 1 + 6  # the last token sampled is computed with what follows it
    assert engine.places == [first, 1, 1, 1, second, 1, 1, 1, third, 1, 1, 1]


@pytest.mark.parametrize("change", ["weights", "version", "history", "cut", "company", "model"])
def test_what_is_changed_is_computed_again(frozen, change):
    engine = Counting(frozen)

    async def converse():
        contexts = {"a": list(WORDS), "b": WORDS[:4]}
        samples = await ask(engine, contexts)
        contexts = {name: contexts[name] + samples[name].ids + WORDS[:2] for name in contexts}
        if change == "weights":
            with torch.no_grad():
                frozen.model.layers[0].mlp.down_proj.weight.mul_(3.0)
        elif change == "version":
            engine.weight_version = 2
        elif change == "history":
            contexts["b"] = WORDS[1:5] + contexts["b"][4:]
        elif change == "cut":
            contexts["b"] = contexts["b"][:7]  # to what is computed, after which nothing is added
        elif change == "company":
            contexts["c"] = WORDS[:3]
        else:
            engine.use_model(build_model(TOKENIZER).eval())
        samples = await ask(engine, contexts)
        for session, sample in samples.items():
            assert_is_of(engine.model, contexts[session], sample)
        return max(map(len, contexts.values()))

    longest = asyncio.run(converse())
    assert engine.places[4] == longest


def test_a_recorder_of_routes_that_finds_none_is_no_hindrance(frozen):
    engine = Counting(frozen)
    engine.record_routes = True

    async def converse():
        first = await ask(engine, {"a": WORDS})
        await ask(engine, {"a": WORDS + first["a"].ids + WORDS[:2]})

    asyncio.run(converse())
    assert engine.places[4] == 3


def test_nothing_is_kept_when_no_conversation_is_left(frozen):
    engine = Counting(frozen)

    async def converse():
        await ask(engine, {"a": WORDS, "b": WORDS[:4]})
        engine.release("a")
        assert engine._prefixes is not None
        engine.release("b")

    asyncio.run(converse())
    assert engine._prefixes is None


def test_rows_with_more_padding_than_tokens_are_computed_again(frozen):
    engine = Counting(frozen)

    async def converse():
        contexts = {"a": WORDS[:4], "b": WORDS[:4], "c": WORDS[:4]}
        for turn in range(6):
            samples = await ask(engine, contexts)
            for number, (name, sample) in enumerate(samples.items()):
                assert_is_of(frozen, contexts[name], sample)
                result = WORDS * 3 if turn % 3 == number else WORDS[:1]  # a long one for each in turns
                contexts[name] = contexts[name] + sample.ids + result

    asyncio.run(converse())
    begun, long = [places for places in engine.places if places > 1], len(WORDS) * 3 + 1
    assert begun[1] == long and any(places > long + 5 for places in begun[2:])


turn = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 9), st.sampled_from(["goes on", "goes on", "is rewritten"])),
    min_size=1,
    max_size=4,
    unique_by=lambda asked: asked[0],
)


@given(st.lists(turn, min_size=1, max_size=5), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_any_conversations_sample_what_rows_alone_do(turns, budget):
    model = build_model(TOKENIZER).eval()
    engine = Counting(model)

    async def converse():
        contexts = {str(number): WORDS[: 3 + 2 * number] for number in range(4)}
        for number, asked in enumerate(turns):
            now = {}
            for name, length, how in asked:
                before = contexts[str(name)]
                now[str(name)] = (before[2:] if how == "is rewritten" else before) + WORDS[:length]
            for name in contexts:  # others are elsewhere, and not waited for
                if name not in now:
                    engine.release(name)
            samples = await ask(engine, now, max_tokens=budget, seed=number, stop=("a",))
            for name, sample in samples.items():
                assert_is_of(model, now[name], sample)
                contexts[name] = now[name] + sample.ids

    asyncio.run(converse())


@pytest.mark.parametrize(
    ("kind", "keeps"), [("gpt-2", True), ("bloom", True), ("mpt", False)], ids=["table", "biases", "by place"]
)
def test_an_engine_keeps_prefixes_where_its_proof_shows_it(kind, keeps):
    """MPT's biases go by the place in the cache, which padding between turns moves."""
    engine = TransformersEngine(build_random(kind, vocab_size=len(TOKENIZER)).float().eval(), TOKENIZER)
    asyncio.run(prove_engine(engine))
    assert engine.keeps_prefixes is keeps


def test_windows_are_computed_whole():
    model = build_random("gemma 2", vocab_size=len(TOKENIZER)).float().eval()
    engine = Counting(model)

    async def converse():
        first = await ask(engine, {"a": WORDS})
        context = WORDS + first["a"].ids + WORDS[:2]
        assert_is_of(model, context, (await ask(engine, {"a": context}))["a"])
        return len(context)

    assert asyncio.run(converse()) in engine.places
