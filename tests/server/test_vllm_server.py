"""Everything that depends on how vLLM behaves, against a real server on this machine's CPU."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import re
import signal
import threading
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from support.forked import run_processes
from support.models import CPU_RUN, build_model, build_tokenizer
from support.served import LENGTH, TOLERANCE, Served, difference, differences, tiny_model
from support.servers import START_LIMIT, RealServer, needs_server
from support.trainers import Letters
from support.waiting import until, until_true

from mt_grpo.concurrency import BackgroundTask
from mt_grpo.doctor.memory import Shape
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.errors import ServerGoneError, WeightSyncError
from mt_grpo.forward.lm_head import Truncation
from mt_grpo.rewards import InformationGain
from mt_grpo.rollout import SamplingParams, ScriptedEngine
from mt_grpo.rollout.engines.vllm import VLLMServerClient
from mt_grpo.runlog import open_run, read_trajectories
from mt_grpo.servers.http import RequestFailed, Server, find_key
from mt_grpo.token_tree import TokenTree
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer, token_logps
from mt_grpo.weights.files import LoraTransport, SafetensorsTransport
from mt_grpo.weights.network import DeltaTransport, HttpTransport
from mt_grpo.weights.sync import WeightSync

pytestmark = [needs_server, pytest.mark.server]


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    with Served(tmp_path_factory.mktemp("tied")) as served:
        yield served


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """Its server also takes adapters."""
    tokenizer, options = build_tokenizer(), ("--use_peft", "true", "--lora_r", "4")
    model = tiny_model(tokenizer, tie_word_embeddings=False)
    with Served(tmp_path_factory.mktemp("untied"), model, tokenizer, *options, transport="lora") as served:
        yield served


def sync_of(served, client, kind=SafetensorsTransport, model=None, **options):
    return WeightSync(kind, client, lambda: model or served.model, Accelerator(cpu=True), **options)


@pytest.fixture
def synced():
    """Makes a client and what sends it weights. After the test the server has its first weights again."""
    made, before = [], {}

    def make(served, *kind, **options):
        before.setdefault(served, copy.deepcopy(served.model.state_dict()))
        client = served.client(max_retries=0)
        made.append(sync_of(served, client, *kind, **options))
        return client, made[-1]

    yield make
    for one in made:
        one.close()
    for served, weights in before.items():
        served.model.load_state_dict(weights)
        with contextlib.closing(sync_of(served, served.client())) as last:
            last.sync(0)


def check_samples(served, client, version, model=None):
    """Samples have a model's log-probs and its weights' version, also of a context cached with earlier weights."""
    contexts = [*served.prompts(), served.tokenizer.encode("capital of Peru number " * 40)[:300]]
    samples = served.sample(contexts, client, max_tokens=40, seed=3)
    assert difference(model or served.model, contexts, samples) < TOLERANCE
    assert {sample.weight_version for sample in samples} == {version}


def train_a_little(model) -> None:
    """An optimiser step that moves every parameter."""
    tokens = torch.randint(model.config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(0))
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.zero_grad()


def lookup_nothing(query: str) -> str:
    """
    Looks nothing up.

    Args:
        query: What to look for.
    """
    return query


class Vowels(MultiTurnToolEnv):
    """A turn ends with its first vowel, so that a model that knows nothing takes several."""

    stop = tuple("aeio")  # a server takes four

    def __init__(self, max_steps: int) -> None:
        super().__init__([lookup_nothing], system_prompt="user", protocol="learnt_tags", max_steps=max_steps)


@pytest.mark.parametrize(
    ("temperature", "options"),
    [
        (1.0, {}),
        (0.7, {}),
        (0.8, {"top_k": 5}),
        (0.8, {"top_p": 0.9}),
        (0.8, {"min_p": 0.1}),
        (0.8, {"min_p": 0.3, "top_p": 0.7}),
        (0.8, {"top_k": 20, "top_p": 0.8, "min_p": 0.05}),
    ],
)
def test_sampled_log_probs_are_those_of_training(tied, temperature, options):
    contexts, trees = tied.prompts(), []
    samples = tied.sample(contexts, max_tokens=40, temperature=temperature, seed=11, **options)
    for context, sample in zip(contexts, samples, strict=True):
        trees.append(TokenTree())
        trees[-1].add_turn(context, sample.ids, sample.logprobs)
    with torch.no_grad():
        trained = token_logps(tied.model, trees, temperature=temperature, truncation=Truncation(**options))
    served = torch.cat([torch.tensor(sample.logprobs) for sample in samples])
    assert (torch.cat([turn for tree in trained for turn in tree]) - served).abs().max() <= TOLERANCE


def test_greedy_tokens_are_those_of_the_model(tied):
    (ids,) = tied.prompts(1)
    (sample,) = tied.sample([ids], max_tokens=12, temperature=0.0)
    for token in sample.ids:
        assert token == tied.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()
        ids.append(token)


@pytest.mark.parametrize("kind", ["string", "token"])
def test_a_stop_ends_the_turn_and_stays_in_it(tied, kind):
    contexts, said = tied.prompts(8), tied.tokenizer.decode
    free = tied.sample(contexts, max_tokens=60, seed=4)
    if kind == "string":
        letter = max("aeiost", key=lambda one: sum(one in said(sample.ids) for sample in free))
        options, ends = {"stop": (letter,)}, lambda ids: letter in said(ids)
    else:
        options, ends = {"stop_token_ids": (free[0].ids[6],)}, lambda ids: free[0].ids[6] in ids
    stopped = tied.sample(contexts, max_tokens=60, seed=4, **options)
    for one, other in zip(stopped, free, strict=True):
        assert one.ids == other.ids[: len(one.ids)] and not ends(one.ids[:-1])
        assert len(one.ids) == len(other.ids) or (one.finish_reason == "stop" and ends(one.ids))
    assert any(ends(one.ids) for one in stopped)
    assert difference(tied.model, contexts, stopped) < TOLERANCE


def test_the_same_seed_draws_the_same_tokens(tied):
    first, second, other = (
        [sample.ids for sample in tied.sample(tied.prompts(), max_tokens=30, seed=seed)] for seed in (5, 5, 6)
    )
    assert first == second != other


def test_a_server_keeps_no_core_to_itself(tied):
    """Two servers bound to one core, where their threads spin, can keep a third process off it for ever."""
    seen = 0
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it ended meanwhile
            for task in os.listdir(f"/proc/{process}/task") if os.getpgid(int(process)) == tied.server.pid else ():
                assert os.sched_getaffinity(int(task)) == os.sched_getaffinity(0)
                seen += 1
    assert seen > 3


def test_cancelling_a_request_aborts_it_on_the_server(tied):
    client, contexts = tied.client(), tied.prompts(16)
    control, sampling = Server(tied.server.url), SamplingParams(max_tokens=400, temperature=2.0)
    finished = tied.server.metric("vllm:request_success_total")
    started, returned = 0, 0

    async def ask_on(index):
        nonlocal started, returned
        while True:
            started += 1
            await client.generate(contexts[index], sampling, str(index))
            returned += 1

    async def go():
        jobs = [asyncio.ensure_future(ask_on(index)) for index in range(16)]
        await until_true(lambda: returned >= 3 or any(job.done() for job in jobs), limit=120)
        # a paused server finishes nothing between the cancelling and the news of it, however busy the machine
        await asyncio.to_thread(control.post, "/pause", mode="keep")
        for job in jobs:
            job.cancel()
        results = await asyncio.gather(*jobs, return_exceptions=True)
        await asyncio.to_thread(control.post, "/resume")
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        for number in range(8):  # as long as what was cancelled: whatever still ran would be finished afterwards
            await client.generate(contexts[0], sampling, f"after-{number}")
        await client.close()

    asyncio.run(go())
    assert returned < started
    assert tied.server.metric("vllm:request_success_total") < finished + started + 8


def test_later_turns_of_a_group_come_from_the_prefix_cache(tied):
    context = tied.tokenizer.encode("capital of Peru number " * 40)[:300]
    tied.sample([context], max_tokens=1)
    hits = tied.server.metric("vllm:prefix_cache_hits_total")
    tied.sample([context + [7, 8, 9]] * 3, max_tokens=1)
    assert tied.server.metric("vllm:prefix_cache_hits_total") - hits >= 3 * (len(context) - 128)


def test_the_cache_has_the_tokens_that_the_doctor_plans(tied):
    """`benchmarks/doctor.py` does the same for larger models."""
    facts = re.search(r"cache_config_info\{([^}]*)\}", tied.server.get("/metrics").text)[1]
    blocks, size = (int(re.search(rf'{name}="(\d+)"', facts)[1]) for name in ("num_gpu_blocks", "block_size"))
    space = int(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) * 2**30
    assert space / Shape.of(tied.model.config).kv_bytes(4) == pytest.approx(blocks * size, rel=0.05)


def test_right_answers_are_scored_as_by_the_trainer(tied, tmp_path):
    """And what was sampled before them comes from the prefix cache."""
    questions = Dataset.from_list([{"prompt": "capital of Peru number " * 56, "answer": "Lima of Peru"}])
    args, found = MTGRPOConfig(str(tmp_path), max_completion_length=200, **CPU_RUN), {}

    def cache():
        return [tied.server.metric(f"vllm:prefix_cache_{name}_total") for name in ("queries", "hits")]

    for scorer in ("trainer", "server"):
        rest = {"train_dataset": questions, "engine": tied.client(), "processing_class": tied.tokenizer}
        gain = [InformationGain(scorer=scorer)]
        trainer = MTGRPOEnvTrainer(tied.model, Vowels(3), gain, [Letters()], args, **rest)
        before = cache()
        (trajectory,) = trainer.rollout(1)
        assert trajectory.error is None and len(trajectory.turns) > 1
        found[scorer] = trajectory.answer_logprobs["information_gain"]
    asked, hit = (new - old for new, old in zip(cache(), before, strict=True))
    assert hit > 0.3 * asked  # whole blocks of 128 tokens
    assert found["server"] == pytest.approx(found["trainer"], abs=1e-3)


def test_more_prompt_tokens_than_one_step_holds_are_served(tied):
    """vLLM's CPU build ends where a seeded prompt is split over two steps."""
    contexts = [[10 + index] * (LENGTH - 8) for index in range(8)]
    assert all(sample.ids for sample in tied.sample(contexts, max_tokens=2, seed=1))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("tied", SafetensorsTransport), ("untied", SafetensorsTransport), ("tied", HttpTransport)],
)
def test_after_a_sync_the_server_samples_with_trained_weights(request, synced, name, kind):
    served = request.getfixturevalue(name)
    client, sync = synced(served, kind, verify_every=1)
    sync.sync(0)
    check_samples(served, client, 0)
    for step in range(1, 4):  # two files take turns
        train_a_little(served.model)
        sync.sync(step)
    check_samples(served, client, 3)
    assert Server(served.server.url).get("/weight_info") == {"weight_version": f"{sync.run}:3"}
    train_a_little(served.model)
    with pytest.raises(WeightSyncError, match=r"is -\d+\.\d{4} on the server and -\d+\.\d{4} in the trainer"):
        sync.verify()
    (file,) = sync.transport.folder.glob("*.safetensors")
    assert file.name == "weights-00000003.safetensors"
    sync.close()
    assert not file.parent.exists()


def test_a_change_of_weights_reaches_the_server(tied, synced):
    """Only words that changed are sent: few, so that they go as places and values, and then a tenth."""
    client, sync = synced(tied, DeltaTransport, verify_every=1)
    sync.sync(0)
    for step, rows in enumerate((40, 4), 1):
        tied.model.get_input_embeddings().weight.data[::rows] *= 1.5
        sync.sync(step)
        (change,) = sync.transport.folder.glob("change-*")
        assert change.stat().st_size < 0.3 * sync.fleet.payload.size
        check_samples(tied, client, step)


def test_each_token_of_requests_in_flight_has_one_version(tied, synced):
    """Updates in mid-request drop none; a token has the log-prob of one version, and versions never go back."""
    client, sync = synced(tied, verify_every=2)
    sync.send_in_flight()
    sync.sync(0)
    versions, sent = [copy.deepcopy(tied.model.state_dict())], threading.Event()
    sampling = SamplingParams(max_tokens=400, seed=5, stop_token_ids=())

    async def ask_on(session, context):
        """One request after another until both updates are sent, so that the server is never idle."""
        asked = []
        while not asked or not sent.is_set():
            asked.append((context, await client.generate(context, sampling, session)))
        return asked

    async def sample():
        try:
            asked = await asyncio.gather(*(ask_on(f"s{n}", context) for n, context in enumerate(tied.prompts())))
            return [each for session in asked for each in session]
        finally:
            await client.close()

    def generated() -> float:
        return tied.server.metric("vllm:generation_tokens_total")

    begun = BackgroundTask(sample()).start()
    try:
        for step in (1, 2):
            before = generated()
            until(lambda least=before + 200: generated() >= least, seen=lambda: f"{generated()} tokens")
            train_a_little(tied.model)
            versions.append(copy.deepcopy(tied.model.state_dict()))
            sync.sync(step)
    finally:
        sent.set()
        asked = begun.result()
    scores = []
    for weights in versions:
        tied.model.load_state_dict(weights)
        scores.append([differences(tied.model, context, sample) < TOLERANCE for context, sample in asked])
    crossed = 0
    for (_, sample), *fits in zip(asked, *scores, strict=True):
        assert torch.stack(fits).any(dim=0).all()
        at = sample.weight_version
        for token in range(len(sample.ids)):
            while not fits[at][token]:  # weights are never older than those of the token before
                at += 1
        assert at <= sample.last_weight_version <= 2
        crossed += at > sample.weight_version
    assert crossed  # an update came in the middle


@pytest.mark.slow
def test_staleness_on_a_server_changes_no_conversation(tied, synced, tmp_path):
    """With learning rate 0; with another, turns say which weights they had, no older than they may be."""
    questions = Dataset.from_list([{"prompt": f"What is {number} of Peru"} for number in range(8)])

    def train(staleness, learning_rate):
        _, sync = synced(tied)
        sync.sync(0)
        sync.close()
        folder = tmp_path / f"{staleness}-{learning_rate}"
        options = {"learning_rate": learning_rate, "max_staleness": staleness, "max_steps": 4}
        tied.train(Vowels(2), [Letters()], questions, folder, **options)
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


def test_a_failed_update_leaves_the_server_its_old_weights(tied, synced, tmp_path):
    client, sync = synced(tied)
    sync.sync(3)
    broken, control = tmp_path / "broken.safetensors", Server(tied.server.url)
    broken.write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{broken}")
    for bad in (broken, tmp_path / "missing.safetensors"):
        with pytest.raises(RequestFailed, match="HTTP 500"):
            sync.transport.deliver(sync._update(control, 4), replace(sync.fleet.payload, path=bad))
    assert control.get("/is_paused") == {"is_paused": False}
    assert control.get("/weight_info") == {"weight_version": f"{sync.run}:3"}
    check_samples(tied, client, 3)
    sync.sync(4)


def test_two_ranks_learn_from_the_server_what_one_learns(tied, synced, tmp_path):
    """Each rank drives conversations of its own; ranks differ in the number of turns they take."""
    synced(tied)  # what they train goes away again
    steps, weights, sampled = {}, {}, {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        program = ["-m", "support.ranks_vllm", str(folder), str(processes), tied.server.url, tied.path]
        run_processes(program, processes, tmp_path / "log", {})
        result = torch.load(folder / "result.pt")
        steps[processes], weights[processes] = torch.tensor(result["steps"]), result["weights"]
        records, turns = list(read_trajectories(folder)), torch.zeros(3, processes)
        sampled[processes] = {each["session"]: TokenTree.from_dict(each["tree"]).path() for each in records}
        for each, rank in zip(records, open_run(folder).column("rank"), strict=True):
            turns[each["step"], rank] += len(each["turns"])
        assert turns.all()
    assert (turns[:, 0] != turns[:, 1]).all()
    assert sampled[1] == sampled[2] and len(sampled[1]) == 3 * 8
    torch.testing.assert_close(steps[1][:, :2], steps[2][:, :2], rtol=1e-4, atol=1e-6)
    assert max(steps[1][:, 2].max(), steps[2][:, 2].max()) < TOLERANCE
    torch.testing.assert_close(weights[2], weights[1], rtol=1e-4, atol=1e-5)


@pytest.fixture
def adapted():
    """The model of `untied` with an adapter that does something."""
    torch.manual_seed(1)
    base = tiny_model(build_tokenizer(), tie_word_embeddings=False)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_a_merged_adapter_is_unmerged_after_its_sync(untied, synced, adapted, monkeypatch):
    """And where the disk is full."""
    client, sync = synced(untied, model=adapted, verify_every=1)
    before = copy.deepcopy(dict(adapted.state_dict()))

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "posix_fallocate", full)
        with pytest.raises(WeightSyncError, match="No space left on device"):
            sync.sync(1)
    assert not any(layer.merged for layer in adapted.modules() if hasattr(layer, "merged"))
    assert not list(sync.transport.folder.iterdir())
    sync.sync(2)
    check_samples(untied, client, 2, adapted)
    torch.testing.assert_close(dict(adapted.state_dict()), before, atol=1e-6, rtol=0)


def test_an_adapter_is_loaded_under_a_name_of_its_own(untied, synced, adapted):
    client, sync = synced(untied, LoraTransport, model=adapted, verify_every=1)
    for step in (1, 2):
        sync.sync(step)
        check_samples(untied, client, step, adapted)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data.mul_(1.5)
    served = {entry["id"] for entry in Server(untied.server.url).get("/v1/models")["data"]}
    assert served == {untied.path, "adapter-00000002"}


def test_a_server_without_lora_is_sent_no_adapter(tied, synced, adapted):
    _, sync = synced(tied, LoraTransport, model=adapted)
    with pytest.raises(WeightSyncError, match="was started without LoRA.* start it again with `mt-grpo serve`"):
        sync.begin()


def test_a_served_model_plays_the_user(tied, tmp_path, monkeypatch):
    monkeypatch.setenv("USER_KEY", find_key(tied.server.url))
    partner = {"base_url": f"{tied.server.url}/v1", "model": tied.path, "system_prompt": "You want {goal}."}
    partner |= {"api_key_env": "USER_KEY", "request": {"max_tokens": 8, "min_tokens": 8}}
    options = {**CPU_RUN, "max_steps": 1, "max_env_steps": 1, "max_completion_length": 300}
    args = MTGRPOConfig(str(tmp_path), **options, simulated_user=partner)
    rows = Dataset.from_list([{"prompt": "Hi", "goal": goal} for goal in ("pears", "apples")])
    engine = ScriptedEngine(tied.tokenizer, lambda session, turn: "a" * (1 + int(session[-1])) + "<|im_end|>")
    rest = {"engine": engine, "processing_class": tied.tokenizer}
    MTGRPOEnvTrainer(build_model(tied.tokenizer), None, [], [Letters()], args, rows, **rest).train()
    # a random model may say nothing at all
    whole = [line for line in read_trajectories(tmp_path) if line["stop_reason"] != "env_error"]
    assert whole
    for line in whole:
        replies = [reply for turn in line["turns"] for reply in turn["replies"]]
        assert len(replies) == 2 and all(reply["role"] == "user" and reply["content"] for reply in replies)
        assert (line["stop_reason"], line["error"], line["render_mismatch"]) == ("max_steps", None, None)


def test_a_teacher_on_a_server_reads_as_its_model_does(tied, tmp_path):
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "What is the capital of Peru"}]}])
    options = {**CPU_RUN, "distillation_coef": 1.0, "distillation_topk": 5, "history": "strip_thinking"}
    options |= {"max_completion_length": 300, "max_steps": 1}
    read = []
    for teacher in ({"model": tied.path}, {"model": tied.path, "server": tied.server.url}):
        args = MTGRPOConfig(str(tmp_path), **options, teacher=teacher)
        engine = ScriptedEngine(tied.tokenizer, lambda session, turn: "<think>well</think>" + "a " * (turn + 4))
        env = MultiTurnToolEnv([], protocol="learnt_tags", max_steps=2)
        rest = {"engine": engine, "processing_class": tied.tokenizer}
        trainer = MTGRPOEnvTrainer(build_model(tied.tokenizer), env, [], [Letters()], args, rows, **rest)
        trainer.train()
        taught = trainer.batch.trajectories
        read.append([torch.tensor(turn) for each in taught for turn in each.teacher_logprobs])
        read[-1] += [turn[:, 1] for each in taught for turn in each.teacher_top]  # the likeliest, in order
        assert all(each.tree.num_sequences > 1 for each in taught)
    assert len(read[0]) > 8
    torch.testing.assert_close(*read, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def late(tied):
    """A second server of the same model, which is not started yet."""
    server = RealServer(tied.path, tied.folder / "late.log", "--vllm_max_model_length", str(LENGTH))
    yield server
    server.stop()


def test_a_late_server_takes_over_from_one_that_is_killed(tied, late):
    """It ends the first server in the middle of a batch: tests after this one have the late one."""
    client = tied.client(late.url, server_timeout=START_LIMIT, min_servers=1)
    up, sync = client.servers, sync_of(tied, client, verify_every=1)
    sync.sync(0)
    late.start()
    turns, spread, killed = [], [], asyncio.Event()
    sampling = SamplingParams(max_tokens=60, seed=3)

    async def hear():
        while not up[1].context_length:
            await client.generate([1, 2], sampling, "listens")
        client.release("listens")
        await client.close()

    asyncio.run(asyncio.wait_for(hear(), START_LIMIT))
    assert not up[1].up  # its weights are not the run's yet
    sync.sync(1)
    assert up[0].up and up[1].up

    def kill() -> None:
        spread.extend(len(server.sessions) for server in up)
        tied.server.stop(signal.SIGKILL)
        killed.set()

    async def converse(group: int, member: int) -> None:
        context = tied.tokenizer.encode(f"user What is {group} about")
        for turn in range(3):
            if turn == 2:
                await killed.wait()
            sample = await client.generate(context, sampling, f"{group}-{member}")
            turns.append((context, sample))
            if len(turns) == 2 * 12:
                asyncio.get_running_loop().call_soon(kill)
            context = context + sample.ids + tied.tokenizer.encode("about that")

    async def play():
        await asyncio.gather(*(converse(group, member) for group in range(4) for member in range(3)))
        await client.close()

    asyncio.run(asyncio.wait_for(play(), START_LIMIT))
    sync.close()
    assert all(spread) and sum(spread) == 12
    contexts, samples = zip(*turns, strict=True)
    assert len(samples) == 3 * 12 and {sample.weight_version for sample in samples} == {1}
    assert difference(tied.model, contexts, samples) < TOLERANCE


def test_a_stopped_server_leaves_no_process(tied, late):
    if late.pid is None:  # this test alone
        late.start()
    client = VLLMServerClient(late.url, tied.tokenizer, server_timeout=1.0)
    asyncio.run(client.connect())
    os.kill(late.pid, signal.SIGTERM)
    late.wait_gone()
    with pytest.raises(ServerGoneError, match="mt-grpo serve"):
        tied.sample(tied.prompts(1), client, max_tokens=2)
