"""Agents that are functions or programs: what they return, and what becomes of those that fail."""

from __future__ import annotations

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
from hypothesis import given, settings
from hypothesis import strategies as st
from support.agents import END, LOOKUP, run_agent, sampled
from support.conversations import user
from support.waiting import until

from mt_grpo.envs.protocols import PROTOCOLS
from mt_grpo.integrations.openai_api import AgentClient, Command, conversation
from mt_grpo.rollout import EngineError
from mt_grpo.runlog.findings import Counts, find
from mt_grpo.runlog.rows import Batch, rollout_lines
from mt_grpo.trajectory import StopReason


def once(result):
    """An agent that asks for one turn and returns something."""

    async def agent(row, client):
        await client.openai().chat.completions.create(model="m", messages=user("Q1"))
        return result

    return agent


def script(text: str) -> Command:
    """A program of Python's."""
    return Command(shlex.join([sys.executable, "-c", text]))


def answers(session, turn):
    return f"A{turn}{END}"


def check_whole(trajectory, runner):
    """Every sampled token is in the tree once, and trained once."""
    assert sum(map(len, trajectory.tree.actions())) == sampled(trajectory)
    assert sum(runner.completion(trajectory).mask) == sampled(trajectory)


@pytest.mark.parametrize(
    ("result", "rewards", "answer"),
    [
        (0.5, {"reward": 0.5}, None),
        (True, {"reward": 1.0}, None),
        ({"exact": 1, "short": 0.5}, {"exact": 1.0, "short": 0.5}, None),
        ({"exact": 1, "answer": "Lima"}, {"exact": 1.0}, "Lima"),
        ("Lima", {}, "Lima"),
        (None, {}, None),
    ],
)
@pytest.mark.parametrize("kind", ["async", "program"])
def test_an_agents_result_is_a_reward_or_the_answer(kind, result, rewards, answer):
    agent = once(result) if kind == "async" else script(f"print('log'); print({json.dumps(result)!r})")
    if kind == "program" and result is None:
        agent = script("")
    (trajectory,), _ = run_agent(agent, answers)
    assert (trajectory.env_rewards, trajectory.answer, trajectory.error) == (rewards, answer, None)
    assert trajectory.stop_reason is (StopReason.ENV_DONE if answer is None else StopReason.ANSWERED)


@pytest.mark.parametrize("result", [[1.0], float("nan"), {"answer": 3}, {"reward": "much"}])
def test_a_result_that_means_nothing_ends_the_conversation(result):
    (trajectory,), _ = run_agent(once(result), answers)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and len(trajectory.turns) == 1


@pytest.mark.parametrize("tools", [[LOOKUP], openai.NOT_GIVEN], ids=["tools", "none"])
def test_text_is_no_malformed_call_where_no_tool_is_offered(tools):
    async def agent(row, client):
        await client.openai().chat.completions.create(model="m", messages=user("Q"), tools=tools)

    (trajectory,), _ = run_agent(agent, answers, protocol=PROTOCOLS["tags"]())
    assert trajectory.turns[0].num_failures == (tools == [LOOKUP])


def test_a_plain_function_may_block():
    def agent(row, client):
        with openai.OpenAI(base_url=client.base_url, api_key=client.api_key) as asking:
            return asking.chat.completions.create(model="m", messages=user("Q1")).choices[0].message.content

    trajectories, _ = run_agent(agent, answers, rows=[{}] * 8)
    assert [trajectory.answer for trajectory in trajectories] == ["A0"] * 8


def test_an_async_agent_that_blocks_is_still_served():
    async def agent(row, client):
        with openai.OpenAI(base_url=client.base_url, api_key=client.api_key) as asking:
            return asking.chat.completions.create(model="m", messages=user("Q1")).choices[0].message.content

    trajectories, _ = run_agent(agent, answers, rows=[{}] * 4, idle_timeout=20.0)
    assert [trajectory.answer for trajectory in trajectories] == ["A0"] * 4


def test_an_agent_that_blocks_for_good_is_left_behind():
    go = threading.Event()

    async def stuck(row, client):
        await client.openai().chat.completions.create(model="m", messages=user("Q1"))
        go.wait()

    (trajectory,), _ = run_agent(stuck, answers, idle_timeout=1.5)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and len(trajectory.turns) == 1
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:  # its loop is given up once it has been silent for long enough
        (trajectory,), _ = run_agent(once(1.0), answers, idle_timeout=1.0)
        if trajectory.env_rewards:
            break
    go.set()
    assert trajectory.env_rewards == {"reward": 1.0}


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


def test_an_agent_that_crashes_keeps_its_turns():
    async def agent(row, client):
        await once(None)(row, client)
        raise KeyError("gone")

    (trajectory,), runner = run_agent(agent, answers)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and "gone" in trajectory.error
    check_whole(trajectory, runner)


def test_an_agent_that_hangs_is_ended():
    cancelled = threading.Event()

    async def agent(row, client):
        try:
            await once(None)(row, client)
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    (trajectory,), runner = run_agent(agent, answers, idle_timeout=1.0)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and "between two turns" in trajectory.error
    assert cancelled.wait(60.0)
    check_whole(trajectory, runner)


def test_the_time_of_a_conversation_bounds_its_agent():
    async def agent(row, client):
        while True:
            await once(None)(row, client)

    (trajectory,), runner = run_agent(agent, answers, rollout_timeout=1.5, latency=0.05)
    assert trajectory.stop_reason is StopReason.TIMEOUT and trajectory.turns
    check_whole(trajectory, runner)


def test_an_agent_that_never_gives_up_is_ended_by_its_limit():
    async def agent(row, client):
        while True:
            try:
                await once(None)(row, client)
            except openai.BadRequestError:
                pass

    (trajectory,), runner = run_agent(agent, answers, max_completion_tokens=20)
    assert trajectory.stop_reason is StopReason.TOKEN_BUDGET and trajectory.turns
    check_whole(trajectory, runner)


def test_a_failing_engine_is_the_cause_whatever_the_agent_does():
    async def careless(row, client):
        try:
            await once(None)(row, client)
        except openai.OpenAIError:
            return 0.0

    script = {0: EngineError("The server is gone."), 1: f"A{END}"}
    (trajectory,), runner = run_agent(careless, lambda session, turn: script[turn])
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.ENGINE_ERROR, "The server is gone.")
    assert trajectory.env_rewards == {} and not runner.engine.requests  # the client did not try again

    async def patient(row, client):
        await careless(row, client)
        await once(None)(row, client)
        return 1.0

    (trajectory,), _ = run_agent(patient, lambda session, turn: script[turn])
    assert trajectory.env_rewards == {"reward": 1.0} and len(trajectory.turns) == 1


def test_a_bug_of_the_engine_is_raised():
    async def agent(row, client):
        try:
            await once(None)(row, client)
        except openai.OpenAIError:
            return 0.0

    with pytest.raises(ZeroDivisionError, match="a bug"):
        run_agent(agent, [ZeroDivisionError("a bug")] * 3)


def test_a_flood_of_requests_is_sampled_one_by_one_or_refused():
    statuses = []

    async def agent(row, client):
        headers = {"Authorization": f"Bearer {client.api_key}", "x-stainless-retry-count": "0"}
        async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as web:

            async def ask(number):
                body = {"messages": user(f"Q{number % 7}")}
                async with web.post(f"{client.base_url}/chat/completions", json=body) as answer:
                    statuses.append(answer.status)

            await asyncio.gather(*map(ask, range(400)))
        return 1.0

    (trajectory,), runner = run_agent(agent, answers, latency=0.002, context_length=100_000)
    assert len(statuses) == 400 and set(statuses) <= {200, 429}
    assert len(trajectory.turns) == statuses.count(200) >= 256
    assert [turn.index for turn in trajectory.turns] == list(range(len(trajectory.turns)))
    check_whole(trajectory, runner)


def test_who_asks_too_much_at_once_is_told_to_come_again(monkeypatch):
    monkeypatch.setattr(conversation, "MOST_REQUESTS", 0)
    seen = []

    async def agent(row, client):
        with pytest.raises(openai.RateLimitError) as error:
            await client.openai(max_retries=0).chat.completions.create(model="m", messages=user("Q1"))
        seen.append(error.value.response.headers)

    (trajectory,), _ = run_agent(agent, answers)
    assert (seen[0]["x-should-retry"], seen[0]["retry-after"]) == ("true", "1") and trajectory.error is None


@pytest.mark.parametrize(("size", "status"), [(7 << 20, 400), (9 << 20, 413)])
def test_a_huge_request_is_refused(size, status):
    seen = []

    async def agent(row, client):
        with pytest.raises(openai.APIStatusError) as error:
            await client.openai().chat.completions.create(model="m", messages=user("word " * (size // 5)))
        seen.append(error.value)
        await once(None)(row, client)
        return 1.0

    (trajectory,), _ = run_agent(agent, answers)
    assert seen[0].status_code == status and (status != 400 or seen[0].code == "context_length_exceeded")
    assert trajectory.env_rewards == {"reward": 1.0} and len(trajectory.turns) == 1


HEADERS = [{"x-stainless-retry-count": "1"}, {"Idempotency-Key": "one"}, {}]


@pytest.mark.parametrize("headers", HEADERS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_gets_the_first_answer(headers, stream):
    """The first attempt is dropped while it is sampled; the second and the third are told the same."""
    told, sampling = [], threading.Event()

    def seconds(session, turn):
        sampling.set()
        return 0.3

    async def agent(row, client):
        key = {"Authorization": f"Bearer {client.api_key}"}
        first = {**key, **({"x-stainless-retry-count": "0"} if "x-stainless-retry-count" in headers else headers)}
        body = {"messages": user("Q1"), "stream": stream}
        async with httpx.AsyncClient(base_url=client.base_url, trust_env=False, timeout=60.0) as web:
            dropped = asyncio.ensure_future(web.post("/chat/completions", json=body, headers=first))
            await asyncio.to_thread(sampling.wait)
            dropped.cancel()
            for _ in range(2 if headers else 1):  # without a word about it, a delivered answer is not asked for again
                answer = await web.post("/chat/completions", json=body, headers={**key, **headers})
                told.append(answer.text)

    (trajectory,), runner = run_agent(agent, answers, latency=seconds)
    assert trajectory.error is None and len(trajectory.turns) == 1 and len(set(told)) == 1
    assert "A0" in told[0] and len(runner.engine.requests) == 1


def test_a_client_that_hangs_up_in_a_stream_loses_nothing():
    async def agent(row, client):
        key, body = {"Authorization": f"Bearer {client.api_key}"}, {"messages": user("Q1"), "stream": True}
        async with httpx.AsyncClient(base_url=client.base_url, trust_env=False) as web:
            async with web.stream("POST", "/chat/completions", json=body, headers=key) as answer:
                await anext(answer.aiter_lines())
        await once(None)(row, client)
        return 1.0

    (trajectory,), runner = run_agent(agent, answers)
    assert trajectory.env_rewards == {"reward": 1.0} and len(trajectory.turns) == 2
    check_whole(trajectory, runner)


def test_the_same_question_asked_anew_is_sampled_anew():
    async def agent(row, client):
        asking = client.openai().chat.completions
        await asyncio.gather(*(asking.create(model="m", messages=user("Q1")) for _ in range(3)))

    (trajectory,), _ = run_agent(agent, answers, latency=0.05)
    assert [turn.text for turn in trajectory.turns] == ["A0", "A1", "A2"] and trajectory.tree.num_sequences == 3


def test_512_conversations_at_once_lose_no_request():
    async def agent(row, client):
        said, messages = [], user("Q1")
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {client.api_key}"}) as web:
            for number in range(2):
                async with web.post(f"{client.base_url}/chat/completions", json={"messages": messages}) as answer:
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

    def __init__(self, client, web):
        self.url, self.web = f"{client.base_url}/chat/completions", web
        self.messages, self.asked, self.told = user("Q1"), 0, []

    async def post(self, messages, stream=False, **headers):
        async with self.web.post(self.url, json={"messages": messages, "stream": stream}, headers=headers) as answer:
            return await answer.json()

    async def fresh(self, messages):
        self.asked += 1
        answer = await self.post(messages, **{"x-stainless-retry-count": "0"})
        self.told.append(answer["choices"][0]["message"]["content"])
        return answer["choices"][0]["message"]

    async def go_on(self):
        self.messages = [*self.messages, await self.fresh(self.messages), *user(f"Q{self.asked}")]

    async def rewrite(self):
        self.messages = [*user("Q1"), {"role": "assistant", "content": "summary"}, *user(f"Q{self.asked}")]
        await self.go_on()

    async def flood(self):
        await asyncio.gather(*(self.fresh(user(f"P{number}")) for number in range(5)))

    async def retry(self):
        """Drops the first attempt; the second comes at once, the third with the answer known."""
        self.asked += 1
        first = asyncio.ensure_future(self.post(self.messages, **{"x-stainless-retry-count": "0"}))
        await asyncio.sleep(0.005)
        first.cancel()
        again = [await self.post(self.messages, **{"x-stainless-retry-count": str(count)}) for count in (1, 2)]
        assert again[0] == again[1]
        self.told.append(again[0]["choices"][0]["message"]["content"])

    async def hang_up(self):
        self.asked += 1
        one = {"Idempotency-Key": f"hang up {self.asked}"}
        body = {"messages": self.messages, "stream": True}
        async with self.web.post(self.url, json=body, headers=one) as answer:
            await answer.content.readline()
            answer.close()
        async with self.web.post(self.url, json=body, headers=one) as answer:
            assert (await answer.text()).endswith("data: [DONE]\n\n")
        self.told.append(None)

    async def nonsense(self):
        for body in (b"{", b"[]", b'{"messages": [{"role": "user", "content": 3}]}', b'{"messages": null}'):
            async with self.web.post(self.url, data=body) as answer:
                assert answer.status == 400 and (await answer.json())["error"]["message"]


ACTS = [name for name in vars(Faulty) if name in ("go_on", "rewrite", "flood", "retry", "hang_up", "nonsense")]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(ACTS), max_size=6), st.booleans())
def test_no_fault_loses_a_turn_or_trains_it_twice(acts, crashes):
    faulty = []

    async def agent(row, client):
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {client.api_key}"}) as web:
            faulty.append(Faulty(client, web))
            for act in acts:
                await getattr(faulty[0], act)()
        if crashes:
            raise KeyError("crash")

    (trajectory,), runner = run_agent(agent, answers, latency=0.01, context_length=100_000)
    refused = bool(acts) and set(acts) == {"nonsense"}
    assert trajectory.stop_reason is (StopReason.ENV_ERROR if crashes or refused else StopReason.ENV_DONE)
    assert not crashes or "crash" in trajectory.error
    assert len(trajectory.turns) == len(runner.engine.requests) == faulty[0].asked
    told = [words for words in faulty[0].told if words is not None]
    assert set(told) <= {turn.text for turn in trajectory.turns} and len(set(told)) == len(told)
    if trajectory.turns:
        check_whole(trajectory, runner)


# Programs

ASK = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
body = json.dumps({"messages": [{"role": "user", "content": row["prompt"]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
"""


def test_a_program_reaches_the_policy():
    program = script(ASK + "print('noise'); print(json.dumps({'answer': message['content'], 'n': row['number']}))")
    trajectories, _ = run_agent(program, answers, rows=[{}] * 3)
    assert [trajectory.answer for trajectory in trajectories] == ["A0"] * 3
    assert [trajectory.env_rewards for trajectory in trajectories] == [{"n": float(number)} for number in range(3)]


def test_a_program_finds_anthropics_variables(monkeypatch):
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "the user's own")  # Anthropic's clients would send it beside the key
    program = """
import json, os, urllib.request
assert "ANTHROPIC_AUTH_TOKEN" not in os.environ
body = json.dumps({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Q1"}]}).encode()
headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", body, headers)
print(json.load(urllib.request.urlopen(request))["content"][0]["text"])
"""
    (trajectory,), _ = run_agent(script(program), answers)
    assert trajectory.answer == "A0"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_shell_reaches_the_policy():
    line = (
        'curl -s "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" '
        """-d '{"messages": [{"role": "user", "content": "Q1"}]}' | grep -o '"content":"[^"]*"'"""
    )
    (trajectory,), _ = run_agent(Command(shlex.join(["bash", "-c", line])), answers)
    assert trajectory.answer == '"content":"A0"' and len(trajectory.turns) == 1


def test_a_program_that_fails_says_why():
    (trajectory,), _ = run_agent(script(ASK + "sys.exit('out of luck')"), answers)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and len(trajectory.turns) == 1
    assert "ended with exit code 1: out of luck" in trajectory.error


def test_a_program_that_a_signal_ends_says_which():
    (trajectory,), _ = run_agent(Command("sh -c 'kill -9 $$'"), answers)
    assert trajectory.error == "CommandError: sh was ended by SIGKILL, and wrote nothing of why"


@pytest.mark.parametrize("kind", ["async", "program"])
def test_an_agent_that_ignores_a_refusal_is_told_of(kind):
    async def agent(row, client):
        with contextlib.suppress(openai.BadRequestError):
            await client.openai().chat.completions.create(model="m", messages=user("Q"), response_format={"type": "x"})
        return 0.5

    body = json.dumps({"messages": user("Q"), "response_format": {"type": "x"}})
    program = "import os, sys, httpx; u = os.environ; httpx.post(u['OPENAI_BASE_URL'] + '/chat/completions', "
    program += f"content={body!r}, headers={{'Authorization': 'Bearer ' + u['OPENAI_API_KEY']}}); sys.exit(3)"
    (trajectory,), _ = run_agent(agent if kind == "async" else script(program), answers)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and not trajectory.turns
    assert "request was refused: `response_format`" in trajectory.error


def test_a_refusal_after_a_turn_is_the_agents_affair():
    async def agent(row, client):
        await client.openai().chat.completions.create(model="m", messages=user("Q"))
        with contextlib.suppress(openai.BadRequestError):
            await client.openai().chat.completions.create(model="m", messages=user("Q"), response_format={"type": "x"})
        return 0.5

    (trajectory,), _ = run_agent(agent, answers)
    assert trajectory.error is None and trajectory.env_rewards == {"reward": 0.5}
    ((why, number),) = trajectory.refusals.items()
    assert why.startswith("`response_format`") and number == 1
    (line,) = rollout_lines(Batch("train", 0, 0, 1, [0], [trajectory]), 0)
    (finding,) = [each.sentence for each in find(Counts().add([line])) if each.kind == "refused"]
    assert "in 1 of 1 conversation" in finding and "`response_format`" in finding


def test_a_refusal_is_kept_whatever_was_wrong():
    """Also where a request was never read: its path is unknown, or it is too large."""

    async def agent(row, client):
        await once(None)(row, client)
        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with httpx.AsyncClient(base_url=client.base_url, trust_env=False, headers=headers) as web:
            await web.post("/embeddings", json={})
            await web.post("/chat/completions", content=b" " * (9 << 20))
            await web.get("/nothing")
            for number in range(20):
                await web.post("/chat/completions", json={"messages": user("Q"), f"field{number}": True})

    (trajectory,), _ = run_agent(agent, answers)
    assert trajectory.stop_reason is StopReason.ENV_DONE and sum(trajectory.refusals.values()) == 22
    why = list(trajectory.refusals)
    assert "/v1/embeddings" in why[0] and "bytes" in why[1] and "`field0`" in why[2]
    assert len(why) == 17 and trajectory.refusals["other reasons"] == 6


def test_a_program_that_fails_after_a_refusal_says_it():
    body = json.dumps({"messages": user("Q"), "guided_json": {"type": "string"}})
    program = ASK + (
        "try:\n    urllib.request.urlopen(urllib.request.Request(request.full_url, "
        f"{body.encode()!r}, headers))\nexcept OSError:\n    sys.exit(3)"
    )
    (trajectory,), _ = run_agent(script(program), answers)
    assert len(trajectory.turns) == 1 and "request was refused: `guided_json`" in trajectory.error


@pytest.mark.parametrize("key", [None, "sk-of-a-provider"])
def test_a_client_that_leads_elsewhere_is_told_the_way(key, monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def agent(row, client):
        elsewhere = {} if key is None else {"api_key": key, "base_url": "http://127.0.0.1:9/v1"}
        openai.OpenAI(max_retries=0, **elsewhere).chat.completions.create(model="m", messages=user("Q1"))

    (trajectory,), _ = run_agent(agent, answers)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and "client.openai()" in trajectory.error
    assert "in agent" in trajectory.where


def test_a_program_that_is_not_there_ends_the_conversation():
    (trajectory,), _ = run_agent(Command("no-such-program at all"), answers)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and "no-such-program" in trajectory.error


STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


def running(marker: str) -> list[psutil.Process]:
    """Processes with a marker on their command line; this one may have others, which other tests have begun."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if any(marker in word for word in process.info["cmdline"] or [])]


def until_gone(marker: str) -> None:
    """Waits for the system: it ends a process that is killed in its own time."""
    until(lambda: not running(marker), seen=lambda: running(marker))


@pytest.mark.parametrize("end", ["import time; time.sleep(600)", "print(1.0, flush=True)", "raise SystemExit(3)"])
def test_no_process_outlives_its_conversation(end, tmp_path):
    stubborn = f"{STUBBORN}  # {tmp_path}"  # the same test may run elsewhere on this machine
    # the program waits until the child ignores the signal, and what the child says is no line of the program's own
    start = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {stubborn!r}], stdout=subprocess.PIPE)\n"
        "assert child.stdout.readline() == b'up\\n'\n"
    )
    (trajectory,), _ = run_agent(script(start + end), answers, idle_timeout=5.0 if "sleep" in end else 60.0)
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


def test_a_program_that_writes_without_end_is_read_and_ended(tmp_path):
    program = script(f"import sys  # {tmp_path}\nwhile True: sys.stdout.write('x' * 10000)")
    (trajectory,), _ = run_agent(program, answers, idle_timeout=0.5)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and not running(str(tmp_path))
