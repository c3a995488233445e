"""Everything that depends on how vLLM behaves, against a real server on this machine's CPU."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from support.forked import run_processes
from support.marks import needs_server
from support.models import CPU_RUN, build_model, build_tokenizer
from support.servers import RealServer
from support.trainers import Letters, batch
from support.waiting import until, until_true
from transformers import AutoTokenizer

from mt_grpo.concurrency import BackgroundTask
from mt_grpo.doctor.memory import read_shape
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.errors import ServerGoneError, WeightSyncError
from mt_grpo.forward.lm_head import Truncation
from mt_grpo.integrations.openai_api import AgentSource
from mt_grpo.rewards import InformationGain
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.runlog import open_run, read_trajectories
from mt_grpo.servers.http import RequestFailed, ServerControl, ServerSetupError, find_key
from mt_grpo.token_tree import TokenTree
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer, token_logps
from mt_grpo.trajectory import StopReason, Trajectory
from mt_grpo.weights.files import LoraTransport, SafetensorsTransport
from mt_grpo.weights.network import DeltaTransport, HttpTransport
from mt_grpo.weights.sync import WeightSync

pytestmark = [needs_server, pytest.mark.server]
LENGTH = 512
TOLERANCE = 1e-4
HEAD = 32  # the smallest head that vLLM's CPU attention knows


class Served:
    """A tiny model, its tokenizer, and the server that holds it."""

    def __init__(self, folder: Path, tied: bool, *options: str, transport: str = "auto") -> None:
        self.tokenizer = build_tokenizer()
        self.model = build_model(self.tokenizer, tie_word_embeddings=tied, head_dim=HEAD).eval()
        self.path = str(folder / ("tied" if tied else "untied"))
        self.model.save_pretrained(self.path)
        self.tokenizer.save_pretrained(self.path)
        options = ("--vllm_max_model_length", str(LENGTH), *options)
        self.server = RealServer(self.path, folder / "server.log", *options, transport=transport)
        self.server.start()

    def copy(self):
        """The model with weights of its own. A deep copy would call what a trainer has put around the first one."""
        model = build_model(self.tokenizer, tie_word_embeddings=self.model.config.tie_word_embeddings, head_dim=HEAD)
        model.load_state_dict(self.model.state_dict())
        return model.eval()

    def client(self, **options) -> VLLMServerClient:
        client = VLLMServerClient(
            self.server.url, self.tokenizer, model=self.path, **{"server_timeout": 20.0, **options}
        )
        asyncio.run(client.connect())
        return client

    def sync(self, client, model=None, kind=SafetensorsTransport, **options) -> WeightSync:
        return WeightSync(kind, client, lambda: model or self.model, Accelerator(cpu=True), **options)

    def prompts(self, number: int = 6) -> list[list[int]]:
        texts = [f"user What is the capital of Peru {index}" for index in range(number)]
        return [self.tokenizer.encode(text) for text in texts]


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    served = Served(tmp_path_factory.mktemp("tied"), True)
    yield served
    served.server.stop()


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """Its server also takes adapters."""
    options = ("--use_peft", "true", "--lora_r", "4")
    served = Served(tmp_path_factory.mktemp("untied"), False, *options, transport="lora")
    yield served
    served.server.stop()


def generate(client, contexts, sampling, prefix="s"):
    async def go():
        try:
            jobs = (client.generate(ids, sampling, f"{prefix}{index}") for index, ids in enumerate(contexts))
            return await asyncio.gather(*jobs)
        finally:
            for index in range(len(contexts)):
                client.release(f"{prefix}{index}")
            await client.close()

    return asyncio.run(go())


@torch.no_grad()
def score(model, context: list[int], action: list[int], temperature: float = 1.0) -> list[float]:
    logits = model(input_ids=torch.tensor([context + action])).logits[0, len(context) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, torch.tensor(action).unsqueeze(1))[:, 0].tolist()


def largest_difference(model, contexts, samples, temperature=1.0) -> float:
    return max(
        abs(one - other)
        for context, sample in zip(contexts, samples, strict=True)
        for one, other in zip(sample.logprobs, score(model, context, sample.ids, temperature), strict=True)
    )


def train_a_little(model, steps: int = 1) -> None:
    """Optimiser steps that move every parameter."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        tokens = torch.randint(model.config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def trained(request):
    """Gives a served model back as it was on the server, whatever a test made of it."""
    served = request.getfixturevalue(request.param)
    before = {name: value.clone() for name, value in served.model.state_dict().items()}
    yield served
    served.model.load_state_dict(before)
    client = served.client()
    sync = served.sync(client)
    sync.sync(0)
    sync.close()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_tokens_and_log_probs_are_those_of_the_model(tied, temperature):
    client, contexts = tied.client(), tied.prompts()
    samples = generate(client, contexts, SamplingParams(max_tokens=40, temperature=temperature, seed=11))
    assert largest_difference(tied.model, contexts, samples, temperature) < TOLERANCE
    assert len({tuple(sample.ids) for sample in samples}) > 1


async def openai_loop(row, client):
    """Three turns of a plain loop over an OpenAI client."""
    asking, messages = client.openai().chat.completions, list(row["prompt"])
    for number in range(3):
        said = await asking.create(model="policy", messages=messages, stop=["e", "a", "i"], max_tokens=12)
        messages += [said.choices[0].message, {"role": "user", "content": f"More {number}"}]


def test_an_openai_loop_is_trained_with_the_servers_log_probs(tied, tmp_path):
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"What is {number}"}]} for number in range(2)])
    args = MTGRPOConfig(str(tmp_path), max_completion_length=300, **CPU_RUN)
    rest = {"train_dataset": rows, "engine": tied.client(), "processing_class": tied.tokenizer}
    trainer = MTGRPOEnvTrainer(copy.deepcopy(tied.model), AgentSource(openai_loop), [], [Letters()], args, **rest)
    inputs = batch(trainer)
    trajectories = trainer.batch.trajectories
    assert [trajectory.error for trajectory in trajectories] == [None] * 4
    assert all(len(trajectory.turns) == 3 and trajectory.tree.num_sequences == 1 for trajectory in trajectories)
    logps, _, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        inputs["completion_ids"].shape[1],
    )
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    assert mask.sum() == sum(turn.num_tokens for trajectory in trajectories for turn in trajectory.turns)
    assert (logps - inputs["sampling_per_token_logps"])[mask].abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"min_p": 0.3, "top_p": 0.7},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_truncated_log_probs_equal_those_of_training(tied, options):
    client, contexts = tied.client(), tied.prompts()
    samples = generate(client, contexts, SamplingParams(max_tokens=40, temperature=0.8, seed=11, **options))
    trees = [TokenTree() for _ in contexts]
    for tree, context, sample in zip(trees, contexts, samples, strict=True):
        tree.add_turn(context, sample.ids, sample.logprobs)
    with torch.no_grad():
        trained = token_logps(tied.model, trees, temperature=0.8, truncation=Truncation(**options))
    served = torch.cat([torch.tensor(sample.logprobs) for sample in samples])
    assert (torch.cat([turn for tree in trained for turn in tree]) - served).abs().max() <= TOLERANCE


def test_greedy_tokens_are_those_of_the_model(tied):
    (context,) = tied.prompts(1)
    (sample,) = generate(tied.client(), [context], SamplingParams(max_tokens=12, temperature=0.0))
    ids = list(context)
    for token in sample.ids:
        assert token == tied.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()
        ids.append(token)


def test_a_stop_string_ends_the_turn_and_stays_in_it(tied):
    client, contexts = tied.client(), tied.prompts(8)
    free = generate(client, contexts, SamplingParams(max_tokens=60, seed=4))
    letter = max("aeiost", key=lambda one: sum(one in tied.tokenizer.decode(sample.ids) for sample in free))
    stopped = generate(client, contexts, SamplingParams(max_tokens=60, seed=4, stop=(letter,)))
    ended = 0
    for one, other in zip(stopped, free, strict=True):
        assert one.ids == other.ids[: len(one.ids)]
        text = tied.tokenizer.decode(one.ids)
        assert letter not in tied.tokenizer.decode(one.ids[:-1])
        ended += one.finish_reason == "stop" and letter in text
    assert ended


def test_a_stop_token_ends_the_turn_and_stays_in_it(tied):
    client, (context,) = tied.client(), tied.prompts(1)
    (free,) = generate(client, [context], SamplingParams(max_tokens=20, seed=2))
    token = free.ids[6]
    (sample,) = generate(client, [context], SamplingParams(max_tokens=20, seed=2, stop_token_ids=(token,)))
    assert sample.finish_reason == "stop" and sample.ids == free.ids[: free.ids.index(token) + 1]


def test_the_same_seed_draws_the_same_tokens(tied):
    client, contexts = tied.client(), tied.prompts()
    first, second, other = (
        [sample.ids for sample in generate(client, contexts, SamplingParams(max_tokens=30, seed=seed))]
        for seed in (5, 5, 6)
    )
    assert first == second != other


def test_a_full_context_stops_before_the_server_refuses_it(tied):
    client = tied.client()
    env = MultiTurnToolEnv(tools=[lookup_nothing], system_prompt="user", protocol="learnt_tags", max_steps=2)
    runner = RolloutRunner(env, client, RolloutLimits())
    before = tied.server.metric("http_requests_total", status="4xx")
    prompts = ["What is " * 2 * LENGTH, "What is the capital of Peru"]
    requests = [RolloutRequest(prompt, session=str(index)) for index, prompt in enumerate(prompts)]

    async def go():
        try:
            return await runner.run(requests, SamplingParams(temperature=1.5))
        finally:
            await client.close()

    full, other = asyncio.run(go())
    assert client.context_length == LENGTH
    assert full.stop_reason is StopReason.CONTEXT_FULL and not full.turns
    assert other.turns and other.stop_reason is not StopReason.ENGINE_ERROR
    assert tied.server.metric("http_requests_total", status="4xx") == before


def lookup_nothing(query: str) -> str:
    """
    Looks nothing up.

    Args:
        query: What to look for.
    """
    return query


def test_a_server_keeps_no_core_to_itself(tied):
    """Two servers bound to one core, where their threads spin, can keep a third process off it for ever."""
    group, seen = tied.server._process.pid, 0
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it ended meanwhile
            for task in os.listdir(f"/proc/{process}/task") if os.getpgid(int(process)) == group else ():
                assert os.sched_getaffinity(int(task)) == os.sched_getaffinity(0)
                seen += 1
    assert seen > 3


def test_cancelling_a_request_aborts_it_on_the_server(tied):
    client, contexts = tied.client(), tied.prompts(16)
    finished = tied.server.metric("vllm:request_success_total")
    sampling = SamplingParams(max_tokens=400, temperature=2.0)
    started, returned = 0, 0

    async def ask_on(index):
        nonlocal started, returned
        while True:
            started += 1
            await client.generate(contexts[index], sampling, str(index))
            returned += 1

    async def some_returned(jobs):
        await until_true(lambda: returned >= 3 or any(job.done() for job in jobs))

    async def go():
        jobs = [asyncio.ensure_future(ask_on(index)) for index in range(16)]
        await asyncio.wait_for(some_returned(jobs), 120)
        # a paused server finishes nothing between the cancelling and the news of it, however busy the machine
        control = ServerControl(tied.server.url)
        await asyncio.to_thread(control.post, "/pause", mode="keep")
        for job in jobs:
            job.cancel()
        results = await asyncio.gather(*jobs, return_exceptions=True)
        await asyncio.to_thread(control.post, "/resume")
        assert not [result for result in results if not isinstance(result, asyncio.CancelledError)]
        for number in range(8):  # as long as what was cancelled: whatever still ran would be finished afterwards
            await client.generate(contexts[0], sampling, f"after-{number}")
        await client.close()

    asyncio.run(go())
    assert returned < started
    assert tied.server.metric("vllm:request_success_total") < finished + started + 8


def test_later_turns_of_a_group_come_from_the_prefix_cache(tied):
    client = tied.client()
    context = tied.tokenizer.encode("capital of Peru number " * 40)[:300]
    generate(client, [context], SamplingParams(max_tokens=1))
    hits = tied.server.metric("vllm:prefix_cache_hits_total")
    generate(client, [context + [7, 8, 9]] * 3, SamplingParams(max_tokens=1))
    assert tied.server.metric("vllm:prefix_cache_hits_total") - hits >= 3 * (len(context) - 128)


class Vowels(MultiTurnToolEnv):
    """A turn ends with its first vowel, so that a model that knows nothing takes several."""

    stop = tuple("aeio")  # a server takes four


def test_the_cache_has_the_tokens_that_the_doctor_plans(tied):
    """`benchmarks/doctor.py` does the same for larger models."""
    facts = re.search(r"cache_config_info\{([^}]*)\}", tied.server.get("/metrics").text)[1]
    blocks, size = (int(re.search(rf'{name}="(\d+)"', facts)[1]) for name in ("num_gpu_blocks", "block_size"))
    space = int(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) * 2**30
    assert space / read_shape(tied.model.config).kv_bytes(4) == pytest.approx(blocks * size, rel=0.05)


def test_right_answers_are_scored_as_by_the_trainer(tied, tmp_path):
    """And what was sampled before them comes from the prefix cache."""
    options = {**CPU_RUN, "max_completion_length": 200}
    questions = Dataset.from_list([{"prompt": "capital of Peru number " * 56, "answer": "Lima of Peru"}])
    found = {}
    for scorer in ("server", "trainer"):
        trainer = MTGRPOEnvTrainer(
            tied.model,
            Vowels([lookup_nothing], system_prompt="user", protocol="learnt_tags", max_steps=3),
            [InformationGain(scorer=scorer)],
            [Letters()],
            MTGRPOConfig(str(tmp_path), **options),
            questions,
            engine=tied.client(),
            processing_class=tied.tokenizer,
        )
        before = [tied.server.metric(f"vllm:prefix_cache_{name}_total") for name in ("queries", "hits")]
        (trajectory,) = trainer.rollout(1)
        assert trajectory.error is None and len(trajectory.turns) > 1
        found[scorer] = trajectory.answer_logprobs["information_gain"]
        after = [tied.server.metric(f"vllm:prefix_cache_{name}_total") for name in ("queries", "hits")]
        if scorer == "server":
            asked, hit = (new - old for new, old in zip(after, before, strict=True))
            assert hit > 0.3 * asked  # whole blocks of 128 tokens
    assert found["server"] == pytest.approx(found["trainer"], abs=1e-3)


def test_more_prompt_tokens_than_one_step_holds_are_served(tied):
    """vLLM's CPU build ends where a seeded prompt is split over two steps."""
    contexts = [[10 + index] * (LENGTH - 8) for index in range(8)]
    samples = generate(tied.client(), contexts, SamplingParams(max_tokens=2, seed=1))
    assert all(sample.ids for sample in samples)


@pytest.mark.parametrize("trained", ["tied", "untied"], indirect=True)
def test_after_a_sync_the_server_samples_with_trained_weights(trained):
    client, contexts = trained.client(), trained.prompts()
    sync = trained.sync(client, verify_every=1)
    sync.sync(0)
    assert generate(client, contexts[:1], SamplingParams(max_tokens=4))[0].weight_version == 0
    for step in range(1, 6):
        train_a_little(trained.model)
        sync.sync(step)
    samples = generate(client, contexts, SamplingParams(max_tokens=40, seed=3))
    assert largest_difference(trained.model, contexts, samples) < TOLERANCE
    assert {sample.weight_version for sample in samples} == {5}
    assert ServerControl(trained.server.url).get("/weight_info") == {"weight_version": f"{sync.run}:5"}
    (file,) = sync.transport.folder.glob("*.safetensors")
    assert file.name == "weights-00000005.safetensors"
    sync.close()
    assert not file.parent.exists()


@pytest.mark.parametrize("trained", ["tied"], indirect=True)
def test_weights_come_over_the_network_as_by_file(trained):
    client, contexts = trained.client(), trained.prompts()
    sync = trained.sync(client, kind=HttpTransport, verify_every=1)
    sync.sync(0)
    train_a_little(trained.model)
    sync.sync(1)
    samples = generate(client, contexts, SamplingParams(max_tokens=40, seed=3))
    assert largest_difference(trained.model, contexts, samples) < TOLERANCE
    assert {sample.weight_version for sample in samples} == {1}
    sync.close()


@pytest.mark.parametrize("trained", ["tied"], indirect=True)
def test_a_change_of_weights_reaches_the_server(trained):
    """Only words that changed are sent: few, so that they go as places and values, and then a tenth."""
    client, contexts = trained.client(), trained.prompts()
    sync = trained.sync(client, kind=DeltaTransport, verify_every=1)
    sync.sync(0)
    weights = trained.model.get_input_embeddings().weight.data
    for step, rows in enumerate((40, 4), 1):
        weights[::rows] *= 1.5
        sync.sync(step)
        (change,) = sync.transport.folder.glob("change-*")
        assert change.stat().st_size < 0.3 * sync.fleet.payload.size
        samples = generate(client, contexts, SamplingParams(max_tokens=40, seed=3))
        assert largest_difference(trained.model, contexts, samples) < TOLERANCE
        assert {sample.weight_version for sample in samples} == {step}
    sync.close()


def test_each_token_of_requests_in_flight_has_one_version(tied):
    """Updates in mid-request drop none; a token has the log-prob of one version, and versions never go back."""
    client, contexts = tied.client(), tied.prompts()
    sync = tied.sync(client, verify_every=2)
    sync.send_in_flight()
    sync.sync(0)
    versions, sent = [tied.copy()], threading.Event()
    sampling = SamplingParams(max_tokens=400, seed=5, stop_token_ids=())

    async def ask_on(index):
        """One request after another until both updates are sent, so that the server is never idle."""
        samples = [await client.generate(contexts[index], sampling, f"s{index}")]
        while not sent.is_set():
            samples.append(await client.generate(contexts[index], sampling, f"s{index}"))
        return [(contexts[index], sample) for sample in samples]

    async def sample():
        return await asyncio.gather(*map(ask_on, range(len(contexts))))

    def generated() -> float:
        return tied.server.metric("vllm:generation_tokens_total")

    begun = BackgroundTask(sample()).start()
    try:
        for step in (1, 2):
            before = generated()
            until(lambda least=before + 200: generated() >= least, seen=lambda: f"{generated()} tokens")
            train_a_little(tied.model)
            versions.append(tied.copy())
            sync.sync(step)
    finally:
        sent.set()
        asked = [each for session in begun.result() for each in session]
    crossed = 0
    for context, sample in asked:
        scores = torch.tensor([score(model, context, sample.ids) for model in versions])
        differences = (scores - torch.tensor(sample.logprobs)).abs()
        assert (differences.min(dim=0).values < TOLERANCE).all()
        fits = differences < TOLERANCE
        at = sample.weight_version
        for token in range(len(sample.ids)):
            while not fits[at, token]:  # weights are never older than those of the token before
                at += 1
        assert at <= sample.last_weight_version <= 2
        crossed += at > sample.weight_version
    assert crossed  # an update came in the middle
    client.salted = False
    sync.close()


@pytest.mark.slow
def test_staleness_on_a_server_changes_no_conversation(tied, tmp_path):
    """With learning rate 0; with another, turns say which weights they had, no older than they may be."""

    def train(staleness, learning_rate):
        folder = tmp_path / f"{staleness}-{learning_rate}"
        restore(tied)
        options = {**CPU_RUN, "use_vllm": True, "vllm_server_base_url": tied.server.url, "max_steps": 4}
        trainer = MTGRPOEnvTrainer(
            tied.path,
            Vowels([lookup_nothing], system_prompt="user", protocol="learnt_tags", max_steps=2),
            [],
            [Letters()],
            MTGRPOConfig(str(folder), learning_rate=learning_rate, max_staleness=staleness, **options),
            Dataset.from_list([{"prompt": f"What is {number} of Peru"} for number in range(8)]),
        )
        trainer.train()
        trainer.weight_sync.close()
        return list(read_trajectories(folder))

    expected = {each["session"]: each["tree"] for each in train(0, 0.0)}
    assert {each["session"]: each["tree"] for each in train(2, 0.0)} == expected
    lags = set()
    for each in train(2, 1e-3):
        step = int(each["session"].split("-")[1])
        for turn in each["turns"]:
            assert step - 2 <= turn["weight_version"] <= turn["last_weight_version"] <= step
            lags.add(step - turn["weight_version"])
    assert max(lags) > 0


@pytest.mark.parametrize("trained", ["tied"], indirect=True)
def test_cached_prefixes_end_with_their_weights(trained):
    client = trained.client()
    context = trained.tokenizer.encode("capital of Peru number " * 40)[:300]
    sync = trained.sync(client)
    sync.sync(0)
    generate(client, [context], SamplingParams(max_tokens=1))
    train_a_little(trained.model, 3)
    sync.sync(1)
    samples = generate(client, [context], SamplingParams(max_tokens=8))
    assert largest_difference(trained.model, [context], samples) < TOLERANCE
    sync.close()


@pytest.mark.parametrize("trained", ["tied"], indirect=True)
def test_requests_under_way_during_a_sync_are_finished(trained):
    client, contexts = trained.client(max_retries=0), trained.prompts(8)
    sync = trained.sync(client)
    times, moments, done, push = [], {}, asyncio.Event(), sync.transport.deliver

    def timed(update, payload):
        post = update.server.post

        def noted(path, *args, **params):
            answer = post(path, *args, **params)
            moments[path] = time.monotonic()
            return answer

        update.server.post = noted
        push(update, payload)

    sync.transport.deliver = timed

    async def ask_on(index):
        while not done.is_set():
            begin = time.monotonic()
            sample = await client.generate(
                contexts[index], SamplingParams(max_tokens=200, temperature=2.0), str(index)
            )
            assert sample.finish_reason in ("stop", "length") and len(sample.ids) == len(sample.logprobs)
            times.append((begin, time.monotonic()))

    async def go():
        jobs = [asyncio.ensure_future(ask_on(index)) for index in range(8)]
        await until_true(lambda: times or any(job.done() for job in jobs))
        await asyncio.to_thread(sync.sync, 1)
        done.set()
        await asyncio.gather(*jobs)
        await client.close()

    asyncio.run(go())
    paused, updated = moments["/sleep"], moments["/finish_weight_update"]
    assert any(first < paused and last > updated for first, last in times)
    sync.close()


@pytest.mark.parametrize("trained", ["tied"], indirect=True)
def test_weights_that_did_not_arrive_end_the_run(trained):
    client = trained.client()
    sync = trained.sync(client, verify_every=2)
    sync.sync(0)
    train_a_little(trained.model)
    with pytest.raises(WeightSyncError, match=r"is -\d+\.\d{4} on the server and -\d+\.\d{4} in the trainer"):
        sync.verify()
    sync.sync(1)  # not verified: the second of every two
    sync.transport.deliver = lambda update, payload: None  # weights that never leave, as where a sync is forgotten
    train_a_little(trained.model)
    with pytest.raises(WeightSyncError, match="Likely causes"):
        sync.sync(2)
    sync.close()


@pytest.mark.parametrize("trained", ["tied"], indirect=True)
def test_a_failed_update_leaves_the_server_its_old_weights(trained, tmp_path):
    client, contexts = trained.client(), trained.prompts()
    sync = trained.sync(client)
    sync.sync(3)
    broken = tmp_path / "broken.safetensors"
    control = ServerControl(trained.server.url)
    broken.write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{broken}")
    for bad in (broken, tmp_path / "missing.safetensors"):
        with pytest.raises(RequestFailed, match="HTTP 500"):
            sync.transport.deliver(sync._update(control, 4), replace(sync.fleet.payload, path=bad))
    assert control.get("/is_paused") == {"is_paused": False}
    assert control.get("/weight_info") == {"weight_version": f"{sync.run}:3"}
    samples = generate(client, contexts, SamplingParams(max_tokens=20))
    assert largest_difference(trained.model, contexts, samples) < TOLERANCE
    sync.sync(4)
    sync.close()


@pytest.mark.parametrize("trained", ["tied"], indirect=True)
def test_two_ranks_learn_from_the_server_what_one_learns(trained, tmp_path):
    """Each rank drives conversations of its own; ranks differ in the number of turns they take."""
    steps, weights, sampled, turns = {}, {}, {}, {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        program = ["-m", "support.ranks_vllm", str(folder), str(processes), trained.server.url, trained.path]
        run_processes(program, processes, tmp_path / "log", {})
        result = torch.load(folder / "result.pt")
        steps[processes], weights[processes] = torch.tensor(result["steps"]), result["weights"]
        records = list(read_trajectories(folder))
        wrote = open_run(folder).column("rank")
        assert set(wrote) == set(range(processes))
        trees = {record["session"]: TokenTree.from_dict(record["tree"]) for record in records}
        sampled[processes] = {session: tree.path() for session, tree in trees.items()}
        turns[processes] = [
            [
                sum(len(each["turns"]) for each, by in zip(records, wrote, strict=True) if (each["step"], by) == which)
                for which in ((step, rank) for rank in range(processes))
            ]
            for step in range(3)
        ]
    assert all(first != second for first, second in turns[2])
    assert sampled[1] == sampled[2] and len(sampled[1]) == 3 * 8
    torch.testing.assert_close(steps[1][:, :2], steps[2][:, :2], rtol=1e-4, atol=1e-6)
    assert max(steps[1][:, 2].max(), steps[2][:, 2].max()) < TOLERANCE
    for name, weight in weights[1].items():
        torch.testing.assert_close(weights[2][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("trained", ["tied"], indirect=True)
def test_an_update_that_a_killed_trainer_left_open_is_ended(trained):
    control = ServerControl(trained.server.url)
    control.post("/pause", mode="keep")
    control.post("/start_weight_update", {})
    client, contexts = trained.client(), trained.prompts(1)
    sync = trained.sync(client, verify_every=1)
    sync.sync(0)
    assert generate(client, contexts, SamplingParams(max_tokens=4))[0].ids
    sync.close()


def test_a_merged_adapter_is_synced_and_unmerged_again(untied):
    model = adapted(untied)
    client, contexts = untied.client(), untied.prompts()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sync = untied.sync(client, model, verify_every=1)
    sync.sync(1)
    samples = generate(client, contexts, SamplingParams(max_tokens=20))
    assert largest_difference(model, contexts, samples) < TOLERANCE
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], atol=1e-6, rtol=0)
    sync.close()
    restore(untied)


def test_an_adapter_is_taken_out_again_when_the_disk_is_full(untied, monkeypatch):
    model = adapted(untied)
    sync = untied.sync(untied.client(), model)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightSyncError, match="No space left on device"):
        sync.sync(1)
    assert not any(layer.merged for layer in model.modules() if hasattr(layer, "merged"))
    assert not list(sync.transport.folder.iterdir())
    sync.close()


def test_an_adapter_is_loaded_under_a_name_of_its_own(untied):
    model = adapted(untied)
    client, contexts = untied.client(), untied.prompts()
    sync = WeightSync(LoraTransport, client, lambda: model, Accelerator(cpu=True), verify_every=1)
    for step in (1, 2):
        sync.sync(step)
        samples = generate(client, contexts, SamplingParams(max_tokens=20))
        assert largest_difference(model, contexts, samples) < TOLERANCE
        assert {sample.weight_version for sample in samples} == {step}
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.mul_(1.5)
    served = {entry["id"] for entry in ServerControl(untied.server.url).get("/v1/models")["data"]}
    assert served == {untied.path, "adapter-00000002"}
    sync.close()


def test_a_server_without_lora_is_sent_no_adapter(tied):
    model = adapted(tied)
    sync = WeightSync(LoraTransport, tied.client(), lambda: model, Accelerator(cpu=True))
    with pytest.raises(WeightSyncError, match="was started without LoRA.* start it again with `mt-grpo serve`"):
        sync.begin()
    sync.close()


def adapted(served):
    """The served model with an adapter that does something."""
    torch.manual_seed(1)
    base = build_model(served.tokenizer, tie_word_embeddings=False, head_dim=HEAD)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def restore(served):
    sync = served.sync(served.client())
    sync.sync(0)
    sync.close()


def test_a_server_with_another_model_is_refused(tied, tmp_path):
    with pytest.raises(ServerSetupError, match="serves .*tied"):
        asyncio.run(VLLMServerClient(tied.server.url, tied.tokenizer, model="Qwen/Qwen3-4B").connect())
    other = AutoTokenizer.from_pretrained("mt_grpo/data/embedded/model")
    with pytest.raises(ServerSetupError, match="encodes text differently"):
        asyncio.run(VLLMServerClient(tied.server.url, other, model=tied.path).connect())


def test_a_server_killed_in_rollouts_comes_back_with_its_weights(tied):
    """The last test but one: it ends the server of this module."""
    client = tied.client(server_timeout=240.0)
    sync = tied.sync(client)
    train_a_little(tied.model, 2)
    sync.sync(2)
    contexts = tied.prompts(4)
    killed = asyncio.Event()

    async def go():
        async def converse(index):
            context, samples = list(contexts[index]), []
            for turn in range(6):
                if turn == 3 and index == 0:
                    await asyncio.to_thread(tied.server.stop, signal.SIGKILL)
                    tied.server.start(wait=False)
                    killed.set()
                sample = await client.generate(list(context), SamplingParams(max_tokens=16, seed=turn), f"k{index}")
                samples.append((list(context), sample))
                context += sample.ids
                if turn == 2 and index:
                    await killed.wait()
            return samples

        try:
            return await asyncio.gather(*(converse(index) for index in range(4)))
        finally:
            await client.close()

    conversations = asyncio.run(go())
    for samples in conversations:
        contexts, answers = zip(*samples, strict=True)
        assert largest_difference(tied.model, contexts, answers) < TOLERANCE
        assert {answer.weight_version for answer in answers} == {2}
    sync.verify()
    sync.close()


def test_a_served_model_plays_the_user(tied, tmp_path, monkeypatch):
    """Its words are what the server sampled; they are logged, and no token of them is trained."""
    monkeypatch.setenv("USER_KEY", find_key(tied.server.url))
    partner = {"base_url": f"{tied.server.url}/v1", "model": tied.path, "system_prompt": "You want {goal}."}
    partner |= {"api_key_env": "USER_KEY", "request": {"max_tokens": 8, "min_tokens": 8}}
    options = {**CPU_RUN, "max_steps": 1, "max_env_steps": 1, "max_completion_length": 300}
    trainer = MTGRPOEnvTrainer(
        build_model(tied.tokenizer),
        None,
        [],
        [Letters()],
        MTGRPOConfig(str(tmp_path), **options, simulated_user=partner),
        Dataset.from_list([{"prompt": "Hi", "goal": goal} for goal in ("pears", "apples")]),
        engine=ScriptedEngine(tied.tokenizer, lambda session, turn: "a" * (1 + int(session[-1])) + "<|im_end|>"),
        processing_class=tied.tokenizer,
    )
    trainer.train()
    lines = list(read_trajectories(tmp_path))
    whole = [line for line in lines if line["stop_reason"] != "env_error"]  # a random model may say nothing at all
    assert whole
    for line in whole:
        replies = [reply for turn in line["turns"] for reply in turn["replies"]]
        assert len(replies) == 2 and all(reply["role"] == "user" and reply["content"] for reply in replies)
        fields = {name: value for name, value in line.items() if name not in ("step", "mode")}
        completion = trainer.runner.completion(Trajectory.from_dict(fields))
        trained = [token for token, mask in zip(completion.ids, completion.mask, strict=True) if mask]
        assert tied.tokenizer.decode(trained) == "".join(
            turn["message"]["content"] + "<|im_end|>" for turn in line["turns"]
        )
        assert replies[0]["content"] in tied.tokenizer.decode(completion.ids)
        assert (line["stop_reason"], line["error"], line["render_mismatch"]) == ("max_steps", None, None)


def test_a_stopped_server_leaves_no_process(tied):
    client = tied.client(server_timeout=1.0)
    group = tied.server._process.pid
    os.kill(group, signal.SIGTERM)
    tied.server._process.wait(60)
    with pytest.raises(ServerGoneError, match="mt-grpo serve"):
        generate(client, tied.prompts(1), SamplingParams(max_tokens=2))
    with pytest.raises(ProcessLookupError):
        until(lambda: os.killpg(group, 0))
