"""The embedded engine: what it says it sampled is what it sampled, whoever else is in the batch."""

import asyncio
import contextlib
import copy
import random
import threading
from types import SimpleNamespace

import pytest
import torch
from support.models import build_model, build_tokenizer, lookup
from support.sampling import truncated
from support.waiting import in_loop, until_true
from transformers import GenerationConfig

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.errors import ConfigError
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, Sample, SamplingParams
from mt_grpo.rollout.engines.transformers import TransformersEngine, _Recorder, _Request, _warpers
from mt_grpo.trajectory import StopReason

TOKENIZER = build_tokenizer()
TEXTS = ["What is the capital of Peru", "Lima", "user " * 30, "answer the query", "name"]
CONTEXTS = [TOKENIZER.encode(text) for text in TEXTS]
DRAWINGS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top_p": {"top_p": 0.6},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.2},
    "penalty": {"repetition_penalty": 1.3},
    "min_p and top_p": {"min_p": 0.15, "top_p": 0.7},
    "all": {"temperature": 1.3, "top_p": 0.8, "top_k": 40, "min_p": 0.05},
}


@pytest.fixture(scope="module")
def frozen():
    model = build_model(TOKENIZER).eval()
    with torch.no_grad():  # a padding token is born with a logit of zero, which hides what is done to it
        model.lm_head.weight[TOKENIZER.pad_token_id].normal_(std=0.5)
    return model


@pytest.fixture
def engine(frozen):
    return TransformersEngine(frozen, TOKENIZER, patience=0.05)


async def ask(engine: TransformersEngine, context: list[int], session: str, **sampling) -> Sample:
    try:
        return await engine.generate(context, SamplingParams(**{"max_tokens": 16, **sampling}), session)
    finally:
        engine.release(session)


def within(work, seconds: float = 120):
    return asyncio.run(asyncio.wait_for(work, seconds))


def ask_all(engine: TransformersEngine, asked: list[tuple[list[int], dict]], order: int | None = None) -> list[Sample]:
    """Samples of all of them at once, asked for in this or another order."""
    named = list(enumerate(asked))
    if order is not None:
        random.Random(order).shuffle(named)

    async def main() -> list[Sample]:
        samples = await asyncio.gather(*(ask(engine, each, f"{name:03d}", **more) for name, (each, more) in named))
        return [sample for _, sample in sorted(zip(named, samples, strict=True), key=lambda pair: pair[0][0])]

    return within(main())


@torch.no_grad()
def logits_at(model, context: list[int], ids: list[int]) -> torch.Tensor:
    """Logits that predict each of `ids`, from one forward without cache or padding."""
    return model(torch.tensor([context + ids])).logits[0, len(context) - 1 : -1].float()


# What was sampled


@pytest.mark.parametrize("drawing", DRAWINGS)
def test_log_probs_are_those_of_the_distribution_drawn_from(engine, frozen, drawing):
    options = DRAWINGS[drawing]
    samples = ask_all(engine, [(context, {"seed": i, **options}) for i, context in enumerate(CONTEXTS)])
    for context, sample in zip(CONTEXTS, samples, strict=True):
        logits = logits_at(frozen, context, sample.ids)
        expected = [
            truncated(logits[place], context + sample.ids[:place], **options)[token].log().item()
            for place, token in enumerate(sample.ids)
        ]
        assert sample.logprobs == pytest.approx(expected, abs=1e-5)


def test_generation_settings_of_the_model_have_no_effect(frozen, engine):
    model = copy.deepcopy(frozen)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.3, top_k=3, top_p=0.5, repetition_penalty=1.5, eos_token_id=331, pad_token_id=329
    )
    asked = [(context, {"seed": i}) for i, context in enumerate(CONTEXTS)]
    assert ask_all(TransformersEngine(model, TOKENIZER), asked) == ask_all(engine, asked)


def test_temperature_zero_is_greedy_search(engine, frozen):
    samples = ask_all(engine, [(context, {"temperature": 0.0, "top_p": 0.5}) for context in CONTEXTS])
    for context, sample in zip(CONTEXTS, samples, strict=True):
        expected = frozen.generate(torch.tensor([context]), do_sample=False, max_new_tokens=16)
        assert sample.ids == expected[0, len(context) :].tolist()
        logprobs = logits_at(frozen, context, sample.ids).log_softmax(-1)
        assert sample.logprobs == pytest.approx(logprobs[range(len(sample.ids)), sample.ids].tolist(), abs=1e-5)


def recorder(*requests: _Request) -> _Recorder:
    return _Recorder(list(requests), 1, torch.device("cpu"), greedy=False)


def test_sampled_frequencies_follow_the_distribution():
    number, options = 4000, {"temperature": 0.8, "top_k": 12}
    torch.manual_seed(1)
    logits = torch.randn(50) * 2
    drawn = recorder(*(_Request([0], SamplingParams(1, seed=seed), "", None) for seed in range(number)))
    scores = logits.expand(number, -1).clone()
    for warper in _warpers((options["temperature"], 1.0, options["top_k"], 0.0, 1.0)):
        scores = warper(torch.zeros(number, 1, dtype=torch.long), scores)
    drawn(torch.zeros(number, 1, dtype=torch.long), scores)
    counts = torch.bincount(torch.tensor(drawn.ids), minlength=50)
    expected = truncated(logits, [], **options) * number
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 31.3  # 11 degrees of freedom, one in a thousand


def test_a_request_draws_anew_at_each_position():
    drawing, drawn = recorder(_Request([0], SamplingParams(200, seed=5), "", None)), []
    for step in range(200):
        drawing(torch.zeros(1, 1 + step, dtype=torch.long), torch.zeros(1, 10))
        drawn += drawing.ids
    assert len(set(drawn)) == 10 and len({tuple(drawn[i : i + 3]) for i in range(0, 198, 3)}) > 40


# Random streams


@pytest.mark.parametrize("drawing", ["plain", "penalty", "all"])
def test_a_seed_gives_the_same_ids_in_any_batch_and_order(engine, drawing):
    own = [(context, {"seed": i, **DRAWINGS[drawing]}) for i, context in enumerate(CONTEXTS)]
    company = [(CONTEXTS[i % 5] * (i % 3 + 1), {"seed": 100 + i, "max_tokens": 5 + i}) for i in range(8)]
    alone = [sample.ids for request in own for sample in ask_all(engine, [request])]
    for companions, order in ((0, 0), (3, 1), (8, 2), (8, 3)):
        samples = ask_all(engine, own + company[:companions], order)
        assert [sample.ids for sample in samples[: len(own)]] == alone


def test_different_seeds_give_different_ids(engine):
    samples = ask_all(engine, [(CONTEXTS[0], {"seed": seed}) for seed in range(12)])
    assert len({tuple(sample.ids) for sample in samples}) == 12


# The end of a turn


class Dictated(torch.nn.Module):
    """Stands where the model's output layer is and makes every row say the same ids, step by step."""

    def __init__(self, ids: list[int], size: int) -> None:
        super().__init__()
        self.ids, self.size, self.step = ids, size, 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*hidden.shape[:-1], self.size)
        logits[..., self.ids[min(self.step, len(self.ids) - 1)]] = 50.0
        self.step += 1
        return logits


def dictated(text: str, *asked: tuple[list[int], dict]) -> list[tuple[str, str, int]]:
    """What a model that says a text was stopped at, why, and the number of tokens."""
    model = build_model(TOKENIZER, tie_word_embeddings=False).eval()
    model.lm_head = Dictated(TOKENIZER.encode(text), len(TOKENIZER))
    model.generation_config.eos_token_id = TOKENIZER.convert_tokens_to_ids(["<|endoftext|>"])
    samples = ask_all(TransformersEngine(model, TOKENIZER, patience=0.05), list(asked))
    assert all(len(sample.logprobs) == len(sample.ids) for sample in samples)
    return [(TOKENIZER.decode(sample.ids), sample.finish_reason, len(sample.ids)) for sample in samples]


STOP = {"stop": ("</tool>", "</answer>")}


@pytest.mark.parametrize("end", ["</tool>", "</answer>", "<|im_end|>", "<|endoftext|>"])
def test_a_turn_ends_behind_a_stop_string_or_an_end_token(end):
    said = f"a > b </tol> < {end}"
    size = len(TOKENIZER.encode(said))
    assert len(TOKENIZER.encode("</tool>")) > 1
    for budget in (90, size):  # as the last of the budget, too
        assert dictated(said + " more", (CONTEXTS[0], {**STOP, "max_tokens": budget})) == [(said, "stop", size)]


def test_only_a_sampled_stop_string_of_the_request_ends_it():
    context = TOKENIZER.encode("a</tool")
    first, second = dictated("x</tool>y", (context, {**STOP, "max_tokens": 30}), (context, {"max_tokens": 30}))
    assert first[:2] == ("x</tool>", "stop")
    assert second[0].startswith("x</tool>y") and second[1:] == ("length", 30)
    [closed] = dictated("> y", (context, {**STOP, "max_tokens": 4}))
    assert closed[1] == "length"


def test_each_request_of_a_mixed_batch_has_its_own_budget(engine):
    budgets = [1, 7, 3, 30, 12]
    samples = ask_all(engine, [(context, {"max_tokens": n}) for context, n in zip(CONTEXTS, budgets, strict=True)])
    for sample, budget in zip(samples, budgets, strict=True):
        ended = sample.ids[-1] == TOKENIZER.eos_token_id
        assert sample.finish_reason == ("stop" if ended else "length")
        assert len(sample.ids) == budget or (ended and len(sample.ids) < budget)
    assert [sample.finish_reason for sample in samples].count("length") >= 3


def test_a_stop_token_id_ends_a_request_as_an_end_token_does(engine):
    [free] = ask_all(engine, [(CONTEXTS[0], {"seed": 3})])
    [stopped] = ask_all(engine, [(CONTEXTS[0], {"seed": 3, "stop_token_ids": (free.ids[4],)})])
    assert stopped.ids == free.ids[: free.ids.index(free.ids[4]) + 1] and stopped.finish_reason == "stop"


# Batches


def recorded(engine: TransformersEngine) -> list[list[str]]:
    """Sessions of each batch the engine samples from here on."""
    batches, sample = [], engine._sample
    engine._sample = lambda batch: (batches.append([request.session for request in batch]), sample(batch))[-1]
    return batches


def test_more_requests_than_fit_are_served_in_several_batches(frozen):
    engine = TransformersEngine(frozen, TOKENIZER, max_batch_size=3, patience=0.05)
    batches = recorded(engine)
    samples = ask_all(engine, [(CONTEXTS[i % 5], {"seed": i}) for i in range(8)])
    assert all(sample.ids for sample in samples)
    assert batches == [["000", "001", "002"], ["003", "004", "005"], ["006", "007"]]


@in_loop
async def test_conversations_go_in_lockstep_by_session(frozen):
    engine = TransformersEngine(frozen, TOKENIZER, patience=30)
    batches = recorded(engine)

    async def converse(session: str) -> None:
        for turn in range(3):
            for _ in range(turn * int(session) * 3):  # some dawdle
                await asyncio.sleep(0)
            await engine.generate(CONTEXTS[0], SamplingParams(4, seed=turn), session)
        engine.release(session)

    await asyncio.gather(*map(converse, ("002", "000", "001")))
    assert batches == [["000", "001", "002"]] * 3


@in_loop
async def test_a_slow_tool_holds_others_up_no_longer_than_patience(engine):
    batches = recorded(engine)
    over = asyncio.Event()

    async def slow() -> None:
        await engine.generate(CONTEXTS[0], SamplingParams(4), "000")
        await over.wait()
        await ask(engine, CONTEXTS[0], "000")

    async def quick() -> None:
        for _ in range(4):
            await engine.generate(CONTEXTS[1], SamplingParams(4), "001")
        engine.release("001")
        over.set()

    await asyncio.gather(slow(), quick())
    assert batches == [["000", "001"], ["001"], ["001"], ["001"], ["000"]]


@in_loop
async def test_patience_holds_after_a_conversation_left(engine):
    await engine.generate(CONTEXTS[0], SamplingParams(2), "000")  # lives on, elsewhere
    leaving = asyncio.ensure_future(ask(engine, CONTEXTS[0], "001"))
    await asyncio.sleep(0.01)
    leaving.cancel()
    await asyncio.sleep(0.1)
    await ask(engine, CONTEXTS[1], "002")


@in_loop
async def test_a_model_failure_reaches_all_callers(engine):
    sample, engine._sample = engine._sample, lambda batch: 1 / 0
    failed = await asyncio.gather(*(ask(engine, CONTEXTS[i], f"{i}") for i in range(3)), return_exceptions=True)
    assert [type(error) for error in failed] == [ZeroDivisionError] * 3
    engine._sample = sample
    assert (await ask(engine, CONTEXTS[0], "3")).ids


def test_a_model_that_samples_by_itself_ends_the_run(frozen, engine, monkeypatch):
    monkeypatch.setattr(frozen, "generate", lambda inputs, **options: inputs)
    runner = RolloutRunner(MultiTurnToolEnv(), engine)
    requests = [RolloutRequest("Lima?", f"{number}") for number in range(3)]
    with pytest.raises(ConfigError, match="`generate` of Qwen3ForCausalLM returned before its answers had ended"):
        within(runner.run(requests, SamplingParams(8)))


class Paused:
    """A model's forwards, counted, of which each waits until it may go on, or some seconds."""

    def __init__(self, seconds: float) -> None:
        self.started, self.go, self.steps, self.seconds = threading.Event(), threading.Event(), 0, seconds

    def __call__(self, *_: object) -> None:
        self.started.set()
        self.go.wait(self.seconds)
        self.steps += 1


@contextlib.contextmanager
def paused(model, seconds: float = 120):
    forwards = Paused(seconds)
    hook = model.register_forward_pre_hook(forwards)
    try:
        yield forwards
    finally:
        hook.remove()
        forwards.go.set()


def test_a_conversation_cancelled_in_a_batch_disturbs_nobody(frozen, engine):
    asked = [(CONTEXTS[i], {"seed": i, "max_tokens": 40}) for i in range(3)]
    expected = ask_all(engine, asked)

    async def main() -> list[Sample]:
        tasks = [asyncio.ensure_future(ask(engine, c, f"{i:03d}", **s)) for i, (c, s) in enumerate(asked)]
        await until_true(forwards.started.is_set)
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        forwards.go.set()
        others = [await tasks[0], await tasks[2]]
        assert tasks[1].cancelled()
        return others

    with paused(frozen) as forwards:
        assert within(main()) == [expected[0], expected[2]]
    assert forwards.steps == 40


def test_the_engine_outlives_its_event_loop(frozen, engine):
    asked = [(CONTEXTS[0], {"seed": 1}), (CONTEXTS[1], {"seed": 2})]
    expected = ask_all(engine, asked)
    assert ask_all(engine, asked) == expected

    async def abandon() -> None:
        running = asyncio.ensure_future(ask(engine, CONTEXTS[0], "000"))
        await until_true(forwards.started.is_set)
        running.cancel()

    with paused(frozen) as forwards:
        asyncio.run(abandon())
    assert ask_all(engine, asked) == expected


@in_loop
async def test_closing_waits_for_the_batch_of_conversations_that_left(frozen, engine):
    with paused(frozen, 0.1) as forwards:
        asking = asyncio.ensure_future(ask(engine, CONTEXTS[0], "000", max_tokens=40))
        await until_true(forwards.started.is_set)
        asking.cancel()
        await asyncio.wait([asking])
        await engine.close()
        steps = forwards.steps
    assert engine._batch is None and 1 <= steps < 40


@in_loop
async def test_runs_in_a_row_on_one_event_loop_are_all_served(frozen):
    env = MultiTurnToolEnv([lookup], max_steps=1)
    runner = RolloutRunner(env, TransformersEngine(frozen, TOKENIZER), RolloutLimits(max_turn_tokens=3))
    requests = [RolloutRequest("hi", f"{i}", seed=i) for i in range(3)]
    runs = [await runner.run(requests, SamplingParams()) for _ in range(4)]
    ids = [[trajectory.tree.actions() for trajectory in run] for run in runs]
    assert ids == [ids[0]] * 4
    assert all(trajectory.stop_reason is StopReason.LENGTH for run in runs for trajectory in run)


def test_rollouts_repeat_whatever_time_tools_take(frozen):
    def run(*delays: float) -> list[list[list[int]]]:
        class Env(MultiTurnToolEnv):
            stop = ("a", "e")

            async def step(self, turn):
                await asyncio.sleep(delays[int(self.session)])
                return await super().step(turn)

        engine = TransformersEngine(frozen, TOKENIZER, patience=0.02)
        runner = RolloutRunner(Env(protocol="learnt_tags", max_steps=2), engine, RolloutLimits(max_turn_tokens=80))
        requests = [RolloutRequest(f"What is {i}", f"{i}", seed=i) for i in range(3)]
        trajectories = asyncio.run(runner.run(requests, SamplingParams(temperature=0.7)))
        assert max(len(trajectory.turns) for trajectory in trajectories) == 3
        return [trajectory.tree.actions() for trajectory in trajectories]

    assert run(0, 0, 0) == run(0.06, 0.0, 0.01) == run(0.0, 0.06, 0.03)


@in_loop
async def test_a_late_end_takes_nothing_from_a_session_of_that_name(engine):
    asking = asyncio.ensure_future(engine.generate(CONTEXTS[0], SamplingParams(2), "000"))
    await asyncio.sleep(0)
    engine.release("000")  # of an earlier batch, which was left behind
    assert (await asking).ids


def test_it_samples_on_the_gpu_of_the_model_in_its_own_thread(frozen, monkeypatch):
    """Each thread of CUDA begins with the first GPU. The seam is torch's own context manager."""
    current, sampled = threading.local(), []

    @contextlib.contextmanager
    def on(device):
        current.device = device
        yield
        del current.device

    class Engine(TransformersEngine):
        def _generate(self, batch, drawing):
            sampled.append((current.device, threading.current_thread() is threading.main_thread()))
            for request in batch:
                request.ids, request.logprobs, request.finish_reason = [1], [0.0], "stop"

    monkeypatch.setattr(torch.cuda, "device", on)
    on_second = SimpleNamespace(device=torch.device("cuda", 1), config=frozen.config)
    asyncio.run(ask(Engine(on_second, TOKENIZER), CONTEXTS[0], "000"))
    assert sampled == [(torch.device("cuda", 1), False)]
