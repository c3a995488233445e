"""Agents that are functions or programs: their results, what becomes of those that fail, faults in any order."""

import asyncio
import contextlib
import gc
import json
import shlex
import shutil
import sys
import threading
import time

import aiohttp
import httpx
import openai
import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.agents import answers, check_whole, hold, reply, run_agent, web
from support.conversations import user
from support.waiting import until

from mt_grpo.integrations.openai_api import AgentClient, Command, conversation
from mt_grpo.rollout import EngineError
from mt_grpo.runlog.findings import Counts, find
from mt_grpo.runlog.writer import Batch, rollout_lines
from mt_grpo.trajectory import StopReason

ASKED = {"messages": user("Q1")}
ONE = {"reward": 1.0}


def once(result):
    async def agent(row, client):
        await reply(client, user("Q1"))
        return result

    return agent


def blocking(row, client):
    with openai.OpenAI(base_url=client.base_url, api_key=client.api_key) as asking:
        return asking.chat.completions.create(model="m", messages=user("Q1")).choices[0].message.content


async def blocking_in_a_loop(row, client):
    return blocking(row, client)


def script(text: str) -> Command:
    return Command(shlex.join([sys.executable, "-c", text]))


@pytest.mark.parametrize(
    ("result", "rewards", "answer"),
    [
        (0.5, {"reward": 0.5}, None),
        (True, ONE, None),
        ({"exact": 1, "short": 0.5}, {"exact": 1.0, "short": 0.5}, None),
        ({"exact": 1, "answer": "Lima"}, {"exact": 1.0}, "Lima"),
        ("Lima", {}, "Lima"),
        (None, {}, None),
    ],
)
@pytest.mark.parametrize("kind", ["async", "program"])
def test_an_agents_result_is_a_reward_or_the_answer(kind, result, rewards, answer):
    program = "" if result is None else f"print('log'); print({json.dumps(result)!r})"
    trajectory, _ = hold(once(result) if kind == "async" else script(program))
    reason = StopReason.ENV_DONE if answer is None else StopReason.ANSWERED
    assert (trajectory.env_rewards, trajectory.answer, trajectory.stop_reason) == (rewards, answer, reason)


@pytest.mark.parametrize(("agent", "number"), [(blocking, 8), (blocking_in_a_loop, 4)])
def test_an_agent_may_block(agent, number):
    trajectories, _ = run_agent(agent, answers, rows=[{}] * number, idle_timeout=20.0)
    assert [trajectory.answer for trajectory in trajectories] == ["A0"] * number


def test_an_agent_that_blocks_for_good_is_left_behind():
    go = threading.Event()

    async def stuck(row, client):
        await reply(client, user("Q1"))
        go.wait()

    for agent in (stuck, lambda row, client: (blocking(row, client), go.wait())):
        trajectory, _ = hold(agent, idle_timeout=1.5, fails=True)
        assert trajectory.stop_reason is StopReason.ENV_ERROR and len(trajectory.turns) == 1
        assert trajectory.where.startswith(__file__) and trajectory.where.endswith(f", in {agent.__name__}")
    # its loop is given up once it has been silent for long enough
    until(lambda: hold(once(1.0), idle_timeout=1.0, fails=True)[0].env_rewards == ONE, limit=60.0)
    go.set()


def test_an_agent_that_never_began_is_not_warned_of(recwarn):
    """Another one blocked their loop until its conversation was over."""
    go, loops = threading.Event(), []

    async def agent(row, client):
        loops.append(asyncio.get_running_loop())
        go.wait()

    run_agent(agent, answers, rows=[{}] * 3, idle_timeout=0.5)
    go.set()
    for _ in range(3):
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loops[0]).result(60)
    gc.collect()
    assert not [str(each.message) for each in recwarn if "never awaited" in str(each.message)]


async def crashes(row, client):
    await reply(client, user("Q1"))
    raise KeyError("gone")


async def never_ends(row, client):
    while True:
        await reply(client, user("Q1"))


async def never_gives_up(row, client):
    async with web(client) as http:
        while True:
            await http.post("/chat/completions", json=ASKED)


cancelled = threading.Event()


async def hangs(row, client):
    try:
        await reply(client, user("Q1"))
        await asyncio.Event().wait()
    finally:
        cancelled.set()


@pytest.mark.parametrize(
    ("agent", "limits", "reason", "told"),
    [
        *((once(result), {}, "env_error", "") for result in ([1.0], float("nan"), {"answer": 3}, {"reward": "much"})),
        (crashes, {}, "env_error", "gone"),
        (never_ends, {"rollout_timeout": 1.5, "latency": 0.05}, "timeout", "took longer than 1.5 s"),
        (never_gives_up, {"max_completion_tokens": 20}, "token_budget", None),
        (hangs, {"idle_timeout": 1.0}, "env_error", "between two turns"),
    ],
)
def test_an_agent_that_goes_wrong_keeps_its_turns(agent, limits, reason, told):
    cancelled.clear()
    trajectory, runner = hold(agent, fails=told is not None, **limits)
    assert trajectory.stop_reason == reason and trajectory.turns and (told or "") in (trajectory.error or "")
    assert agent is not hangs or cancelled.wait(60.0) and "in hangs" in trajectory.where
    check_whole(trajectory, runner)


async def careless(row, client):
    try:
        await reply(client, user("Q1"))
    except openai.OpenAIError:
        return 0.0


async def patient(row, client):
    await careless(row, client)
    return await once(1.0)(row, client)


def test_a_failing_engine_is_the_cause_whatever_the_agent_does():
    turns = [EngineError("The server is gone."), "A<|im_end|>"]
    trajectory, runner = hold(careless, lambda session, turn: turns[turn], fails=True)
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.ENGINE_ERROR, "The server is gone.")
    assert trajectory.env_rewards == {} and not runner.engine.requests  # the client did not try again
    trajectory, _ = hold(patient, lambda session, turn: turns[turn])
    assert trajectory.env_rewards == ONE and len(trajectory.turns) == 1
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run_agent(careless, [ZeroDivisionError("a bug")] * 3)


# Many requests, large ones, and those that are sent again


def test_a_flood_of_requests_is_sampled_one_by_one_or_refused(monkeypatch):
    monkeypatch.setattr(conversation, "MOST_REQUESTS", 16)
    told = []

    async def agent(row, client):
        async with web(client, limits=httpx.Limits()) as http:

            async def ask(number):
                body, headers = {"messages": user(f"Q{number % 7}")}, {"x-stainless-retry-count": "0"}
                answer = await http.post("/chat/completions", json=body, headers=headers)
                told.append((answer.status_code, answer.headers.get("retry-after")))

            await asyncio.gather(*map(ask, range(40)))

    trajectory, runner = hold(agent, latency=0.02, context_length=100_000)
    assert set(told) == {(200, None), (429, "1")} and len(told) == 40
    assert len(trajectory.turns) == told.count((200, None)) >= 16
    assert [turn.index for turn in trajectory.turns] == list(range(len(trajectory.turns)))
    check_whole(trajectory, runner)


def test_512_conversations_at_once_lose_no_request():
    async def agent(row, client):
        said, messages = [], user("Q1")
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {client.api_key}"}) as http:
            for number in range(2):
                async with http.post(f"{client.base_url}/chat/completions", json={"messages": messages}) as answer:
                    message = (await answer.json())["choices"][0]["message"]
                said.append(message["content"])
                messages = [*messages, message, *user(f"Q{number}")]
        return " ".join(said)

    trajectories, runner = run_agent(agent, answers, rows=[{}] * 512, latency=0.01)
    assert [trajectory.answer for trajectory in trajectories] == ["A0 A1"] * 512
    assert len(runner.engine.requests) == 2 * 512
    assert all(trajectory.tree.num_sequences == 1 for trajectory in trajectories)


# Faults in any order


class Faulty:
    """A client that asks well and badly, and knows how many turns it asked for."""

    def __init__(self, client, web, sampling):
        self.url, self.web, self.sampling = f"{client.base_url}/chat/completions", web, sampling
        self.messages, self.asked, self.told, self.latency = user("Q1"), 0, [], 0.02

    async def post(self, messages, headers, stream=False):
        body = {"messages": messages, "stream": stream}
        async with self.web.post(self.url, json=body, headers=headers) as answer:
            return await answer.text()

    async def fresh(self, messages):
        self.asked += 1
        message = json.loads(await self.post(messages, FIRST))["choices"][0]["message"]
        self.told.append(message["content"])
        return message

    async def go_on(self):
        self.messages = [*self.messages, await self.fresh(self.messages), *user(f"Q{self.asked}")]

    async def rewrite(self):
        self.messages = [*user("Q1"), {"role": "assistant", "content": "summary"}, *user(f"Q{self.asked}")]
        await self.go_on()

    async def flood(self):
        await asyncio.gather(*(self.fresh(user("P")) for _ in range(5)))

    async def retry(self, first, again, times, stream):
        """Drops the first attempt while it is sampled; the next are told the same."""
        self.asked += 1
        first, again = ({name: value.format(self.asked) for name, value in each.items()} for each in (first, again))
        self.sampling.clear()
        self.latency = 0.02 if first else 0.2  # in which it has to be dropped
        dropped = asyncio.ensure_future(self.post(self.messages, first, stream))
        await asyncio.to_thread(self.sampling.wait, 60.0)
        dropped.cancel()
        self.latency = 0.02
        told = {await self.post(self.messages, again, stream) for _ in range(times)}
        assert len(told) == 1 and told.pop().endswith("data: [DONE]\n\n" if stream else "}")

    async def hang_up(self):
        self.asked += 1
        one = {"Idempotency-Key": f"hang up {self.asked}"}
        body = {"messages": self.messages, "stream": True}
        async with self.web.post(self.url, json=body, headers=one) as answer:
            await answer.content.readline()
            answer.close()
        assert (await self.post(self.messages, one, stream=True)).endswith("data: [DONE]\n\n")

    async def nonsense(self):
        for body in (b"{", b"[]", b'{"messages": [{"role": "user", "content": 3}]}', b'{"messages": null}'):
            async with self.web.post(self.url, data=body) as answer:
                assert answer.status == 400 and (await answer.json())["error"]["message"]


FIRST = {"x-stainless-retry-count": "0"}
RETRIES = [(FIRST, {"x-stainless-retry-count": "1"}, 2), ({"Idempotency-Key": "{}"}, {"Idempotency-Key": "{}"}, 2)]
RETRIES += [({}, {}, 1)]  # without a word about it, a delivered answer is not asked for again
ACTS = [(name,) for name in ("go_on", "rewrite", "flood", "hang_up", "nonsense")]
ACTS += [("retry", *headers, stream) for headers in RETRIES for stream in (False, True)]


@settings(max_examples=25, deadline=None)
@example(ACTS, False)
@given(st.lists(st.sampled_from(ACTS), max_size=6), st.booleans())
def test_no_fault_loses_a_turn_or_trains_it_twice(acts, crashes):
    faulty, sampling = [], threading.Event()

    def seconds(session, turn):
        sampling.set()
        return faulty[0].latency

    async def agent(row, client):
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {client.api_key}"}) as web:
            faulty.append(Faulty(client, web, sampling))
            for act, *options in acts:
                await getattr(faulty[0], act)(*options)
        if crashes:
            raise KeyError("crash")

    trajectory, runner = hold(agent, fails=True, latency=seconds, context_length=100_000)
    refused = {act for act, *_ in acts} == {"nonsense"}
    assert trajectory.stop_reason is (StopReason.ENV_ERROR if crashes or refused else StopReason.ENV_DONE)
    assert not crashes or "crash" in trajectory.error
    assert len(trajectory.turns) == len(runner.engine.requests) == faulty[0].asked
    told = faulty[0].told
    assert set(told) <= {turn.text for turn in trajectory.turns} and len(set(told)) == len(told)
    if trajectory.turns:
        check_whole(trajectory, runner)


# Programs and refusals

ASK = """
import json, os, sys, urllib.request
row, env = json.load(sys.stdin), os.environ

def ask(path=env["OPENAI_BASE_URL"] + "/chat/completions", key="Bearer " + env["OPENAI_API_KEY"], **body):
    headers = {"Authorization": key, "Content-Type": "application/json"}
    if key is None:
        headers = {"x-api-key": env["ANTHROPIC_API_KEY"], "Content-Type": "application/json"}
    body = {"messages": [{"role": "user", "content": row["prompt"]}], **body}
    return json.load(urllib.request.urlopen(urllib.request.Request(path, json.dumps(body).encode(), headers)))

def refused():
    try:
        ask(guided_json={"type": "string"})
    except OSError:
        sys.exit(3)
"""
OF_OPENAI = """
answer = {"answer": ask()["choices"][0]["message"]["content"], "n": row["number"]}
print("noise"); print(json.dumps(answer))
"""
OF_ANTHROPIC = """
assert "ANTHROPIC_AUTH_TOKEN" not in env
print(ask(env["ANTHROPIC_BASE_URL"] + "/v1/messages", None, max_tokens=9)["content"][0]["text"])
"""
CURL = """curl -s "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
-d '{"messages": [{"role": "user", "content": "Q1"}]}' | grep -o '"content":"[^"]*"'"""
SHELL = Command(shlex.join(["bash", "-c", CURL]))


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        (script(ASK + OF_OPENAI), "A0"),
        (script(ASK + OF_ANTHROPIC), "A0"),
        pytest.param(SHELL, '"content":"A0"', marks=pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")),
    ],
    ids=["openai", "anthropic", "shell"],
)
def test_a_program_reaches_the_policy(program, answer, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "the user's own")  # Anthropic's clients would send it beside the key
    trajectories, _ = run_agent(program, answers, rows=[{}] * 3)
    assert [(trajectory.answer, len(trajectory.turns)) for trajectory in trajectories] == [(answer, 1)] * 3
    assert [trajectory.env_rewards.get("n", at) for at, trajectory in enumerate(trajectories)] == [0.0, 1.0, 2.0]


def elsewhere(**given):
    def leads_away(row, client):
        openai.OpenAI(max_retries=0, **given).chat.completions.create(model="m", messages=user("Q1"))

    return leads_away


async def refused(row, client):
    with contextlib.suppress(openai.BadRequestError):
        await reply(client, user("Q"), response_format={"type": "x"})
    return 0.5


@pytest.mark.parametrize(
    ("agent", "turns", "error"),
    [
        (script(ASK + "ask(); sys.exit('out of luck')"), 1, "ended with exit code 1: out of luck"),
        (Command("sh -c 'kill -9 $$'"), 0, "CommandError: sh was ended by SIGKILL, and wrote nothing of why"),
        (Command("sh -c 'kill -40 $$'"), 0, "CommandError: sh was ended by signal 40, and wrote nothing of why"),
        (Command("no-such-program at all"), 0, "no-such-program"),
        (refused, 0, "request was refused: `response_format`"),
        (script(ASK + "refused()"), 0, "request was refused: `guided_json`"),
        (script(ASK + "ask(); refused()"), 1, "request was refused: `guided_json`"),
        (elsewhere(), 0, "client.openai()"),
        (elsewhere(api_key="sk-of-a-provider", base_url="http://127.0.0.1:9/v1"), 0, "client.openai()"),
    ],
)
def test_an_agent_that_fails_says_why(agent, turns, error, monkeypatch):
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    trajectory, _ = hold(agent, fails=True)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.ENV_ERROR, turns)
    assert error in trajectory.error and (error != "client.openai()" or "in leads_away" in trajectory.where)


def test_refusals_after_a_turn_are_the_agents_affair_and_kept():
    """Also of a request that was never read: its path is unknown, or it is too large."""

    async def agent(row, client):
        await reply(client, user("Q1"))
        async with web(client) as http:
            await http.post("/embeddings", json={})
            too_large = await http.post("/chat/completions", content=b" " * (9 << 20))
            assert too_large.status_code == 413
            await http.get("/nothing")
            for number in range(20):
                await http.post("/chat/completions", json={"messages": user("Q"), f"field{number}": True})
        return await refused(row, client)

    trajectory, _ = hold(agent)
    assert trajectory.env_rewards == {"reward": 0.5} and sum(trajectory.refusals.values()) == 23
    why = list(trajectory.refusals)
    assert "/v1/embeddings: POST to chat/completions" in why[0] and "bytes" in why[1] and why[2].startswith("`field0`")
    assert len(why) == 17 and trajectory.refusals["other reasons"] == 7
    (line,) = rollout_lines(Batch("train", 0, 0, 1, [0], [trajectory]), 0)
    (finding,) = [each.sentence for each in find(Counts().add([line])) if each.kind == "refused"]
    assert "in 1 of 1 conversation" in finding and "/v1/embeddings" in finding


STUBBORN = "from signal import *; import time; signal(SIGTERM, SIG_IGN); print('up', flush=True); time.sleep(600)"


def running(marker: str) -> list[psutil.Process]:
    """Processes with a marker on their command line; this one may have others, which other tests have begun."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if any(marker in word for word in process.info["cmdline"] or [])]


def until_gone(marker: str) -> None:
    """Waits for the system: it ends a process that is killed in its own time."""
    until(lambda: not running(marker), seen=lambda: running(marker))


@pytest.mark.parametrize(
    ("end", "seconds"),
    [
        ("import time; time.sleep(600)", 3.0),
        ("print(1.0, flush=True)", 60.0),
        ("raise SystemExit(3)", 60.0),
        ("while True: sys.stdout.write('x' * 10_000)", 3.0),
    ],
)
def test_no_process_outlives_its_conversation(end, seconds, tmp_path):
    stubborn = f"{STUBBORN}  # {tmp_path}"  # the same test may run elsewhere on this machine
    # the program waits until the child ignores the signal, and what the child says is no line of the program's own
    start = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {stubborn!r}], stdout=subprocess.PIPE)\n"
        "assert child.stdout.readline() == b'up\\n'\n"
    )
    trajectory, _ = hold(script(start + end), fails=True, idle_timeout=seconds)
    assert (trajectory.stop_reason is StopReason.ENV_DONE) == end.startswith("print")
    until_gone(str(tmp_path))


def test_a_program_cancelled_while_it_starts_leaves_nothing(tmp_path):
    began = tmp_path / "began"
    program = Command(shlex.join(["bash", "-c", f"(exec -a {tmp_path} sleep 600) & touch {began}; wait"]))

    async def cancelled() -> int:
        conversation = asyncio.ensure_future(program({}, AgentClient("http://127.0.0.1:1/v1", "key", "s", print)))
        while not (started := running(str(tmp_path))):
            await asyncio.sleep(0)
        while not began.exists():  # this loop stands still, as one does that other conversations keep busy
            time.sleep(0.01)
        conversation.cancel()
        await asyncio.wait([conversation], timeout=60.0)
        assert conversation.cancelled()
        return started[0].pid

    assert not psutil.pid_exists(asyncio.run(cancelled()))
    until_gone(str(tmp_path))
