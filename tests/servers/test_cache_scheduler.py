"""Turns that wait for room in a server's cache: who goes first, who waits, and when nobody does."""

from __future__ import annotations

import asyncio
import threading

import pytest
from support.upstreams import SAMPLING, client_of, completion
from support.waiting import until_true

from mt_grpo.servers.cache_scheduler import CacheScheduler, Gate, Pressure, read_pressure

METRICS = """\
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.25
vllm:num_requests_running{{engine="0",model_name="m"}} 3.0
vllm:num_requests_waiting{{engine="0",model_name="m"}} 1.0
vllm:num_preemptions_total{{engine="0",model_name="m"}} 2.0
vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} 900.0
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} 500.0
vllm:request_prefill_time_seconds_sum{{engine="0",model_name="m"}} 8.0
vllm:cache_config_info{{block_size="16",{size}num_gpu_blocks="100",num_gpu_blocks_override="None"}} 1.0
"""


def admission(capacity: float = 1000, **told) -> CacheScheduler:
    found = CacheScheduler()
    found.observe(Pressure(capacity, 0.0, **told), 0)
    return found


def turns(subject: CacheScheduler, now: float, **tokens: int) -> list[str]:
    for session, number in tokens.items():
        subject.ask(session, number, now)
    return subject.admit(now)


def test_all_begin_where_all_fit():
    assert turns(admission(10_000), 0, a=100, b=100, c=100) == ["a", "b", "c"]


def test_all_begin_where_a_server_does_not_tell_its_cache():
    assert turns(CacheScheduler(), 0, a=10**6, b=10**6) == ["a", "b"]


def test_those_that_do_not_fit_wait_in_their_order():
    subject = admission(2000)
    assert turns(subject, 0, a=500, b=500, c=500) == ["a", "b"] and subject.admit(1) == []
    subject.leave("b")
    assert subject.admit(2) == ["c"]


def test_a_conversation_larger_than_the_cache_goes_alone():
    subject = admission(100)
    assert turns(subject, 0, a=500, b=500) == ["a"]
    subject.end("a", 10, 1)
    assert subject.admit(1) == ["b"]


def test_a_place_is_kept_between_two_turns():
    subject = admission(3000)
    assert turns(subject, 0, a=800, b=700, c=100) == ["a", "b"]
    subject.end("a", 200, 1)
    assert subject.admit(1) == []
    assert turns(subject, 2, a=1100) == ["a"]


def test_the_youngest_waits_when_all_outgrow_the_cache():
    subject = admission(3000)
    assert turns(subject, 0, a=500, b=500, c=500) == ["a", "b", "c"]
    for session in "abc":
        subject.end(session, 200, 1)
    assert turns(subject, 2, a=1000, b=900, c=900) == ["a", "b"]
    subject.leave("a")
    assert subject.admit(3) == ["c"]


def test_a_long_pause_gives_the_place_away():
    subject = admission(3000)
    assert turns(subject, 0, a=800, b=700, c=600) == ["a", "b"]
    subject.end("a", 200, 1)
    assert subject.admit(5) == [] and subject.admit(60) == ["c"]


def test_a_pause_is_long_by_what_it_costs_to_compute_again():
    """At 100 tokens a second, those that run, 1,000 tokens, are computed in ten seconds."""
    subject = admission(3000)
    for look in range(200):  # the server was busy, and computed prefixes, long enough to be told
        subject.observe(Pressure(3000, 1 / 3, prefill_seconds=3.0 * look, prefilled=300 * look), 3 * look)
    assert turns(subject, 600, a=800, b=700, c=600) == ["a", "b"]
    subject.end("a", 200, 600)
    assert subject.admit(609.5) == [] and subject.admit(610.1) == ["c"]


def test_requests_computed_together_take_no_longer():
    """Each of ten counts the three seconds that all of them took."""
    subject = admission(3000)
    for look in range(200):
        subject.observe(Pressure(3000, 1 / 3, prefill_seconds=30.0 * look, prefilled=300 * look), 3 * look)
    assert turns(subject, 600, a=800, b=700, c=600) == ["a", "b"]
    subject.end("a", 200, 600)
    assert subject.admit(610.1) == ["c"]


def test_all_turns_begin_where_tools_outlast_a_prefix():
    subject = admission(3000)
    for look in range(200):
        subject.observe(Pressure(3000, 1 / 3, prefill_seconds=3.0 * look, prefilled=300 * look), 3 * look)
    assert turns(subject, 600, a=800, b=700, c=600, d=900) == ["a", "b"]
    for session in "ab":
        subject.end(session, 200, 600)
    subject.observe(Pressure(3000, 1 / 3, prefill_seconds=600.0, prefilled=60000), 660)
    assert subject.admit(660) == ["c", "d"]


def test_shared_prompts_let_more_in():
    subject = admission(2000)
    assert turns(subject, 0, a=500, b=500, c=500) == ["a", "b"]
    for _ in range(10):
        subject.observe(Pressure(2000, 0.4, running=2), 0)  # 800 tokens for both
    assert subject.admit(1) == ["c"]


def test_preemptions_let_fewer_in():
    calm, crowded = admission(2000), admission(2000)
    for number in range(1, 6):
        calm.observe(Pressure(2000, 0.0), 10 * number)
        crowded.observe(Pressure(2000, 0.0, preemptions=number), 10 * number)
    assert turns(calm, 0, a=500, b=500) == ["a", "b"] and turns(crowded, 0, a=500, b=500) == ["a"]


def test_one_burst_of_preemptions_counts_once():
    """Requests under way cannot be withdrawn, so that a crowded server goes on to preempt."""
    subject = admission(2000)
    for number in range(1, 6):
        subject.observe(Pressure(2000, 0.0, preemptions=number), 0.5 * number)
    assert turns(subject, 3, a=450, b=450) == ["a", "b"]


@pytest.fixture
def shared():
    """One of two processes."""
    subject = CacheScheduler(processes=2)
    subject.observe(Pressure(5000, 0.0), 0)
    return subject


def test_processes_begin_with_even_shares_of_a_cache(shared):
    assert turns(shared, 0, a=1000, b=1000, c=1000) == ["a"]


def test_a_process_alone_on_a_server_has_its_whole_cache(shared):
    turns(shared, 0, a=1000, b=1000, c=1000)
    shared.observe(Pressure(5000, 0.25, running=1), 0.5)
    assert shared.admit(0.5) == ["b", "c"]


def test_what_others_hold_is_not_taken(shared):
    turns(shared, 0, a=1000, b=1000, c=1000)
    shared.observe(Pressure(5000, 0.5, running=2), 0.5)
    assert shared.admit(0.5) == []


def test_a_process_takes_free_room_by_and_by():
    """Half of it at the first look, and all of it once the other process has left it."""
    subject = CacheScheduler(processes=2)
    subject.observe(Pressure(8000, 0.0), 0)
    assert turns(subject, 0, a=2500, b=2500) == ["a"]
    subject.observe(Pressure(8000, 0.3, running=2), 0.5)
    assert subject.admit(0.5) == []
    subject.observe(Pressure(8000, 0.3, running=2), 1)
    assert subject.admit(1) == ["b"]


def test_borrowed_room_is_given_back_as_others_come(shared):
    turns(shared, 0, a=1000, b=1000, c=1000)
    shared.observe(Pressure(5000, 0.25, running=1), 0.5)
    assert shared.admit(0.5) == ["b", "c"]
    for session in "abc":
        shared.end(session, 200, 1)
    for _ in range(60):
        shared.observe(Pressure(5000, 0.5, running=2), 1)
    assert turns(shared, 1, a=1200, b=1200, c=1200) == ["a"]


def test_a_batch_begins_with_an_even_share_again(shared):
    """Between two batches nobody looks, and all processes begin at the same time."""
    turns(shared, 0, a=1000)
    shared.observe(Pressure(5000, 0.25, running=1), 0.5)
    shared.leave("a")
    assert turns(shared, 9, d=1000, e=1000) == ["d"]


def test_requests_of_one_conversation_are_not_taken_for_others(shared):
    """An agent that asks twice at once has two requests under way."""
    shared.ask("a", 500, 0)
    assert turns(shared, 0, a=500, b=1000, c=1000) == ["a", "b"]
    shared.observe(Pressure(5000, 0.3, running=3), 0.5)
    assert shared.admit(0.5) == ["c"]


def test_a_turn_that_ends_after_its_conversation_counts_nothing():
    subject = admission(2000)
    turns(subject, 0, a=1500)
    subject.leave("a")
    subject.end("a", 5, 1)
    subject.withdraw("a")
    assert turns(subject, 2, b=1500, c=1500) == ["b"]


def test_agents_that_ask_twice_at_once_have_both_turns():
    subject = admission(1000)
    assert turns(subject, 0, a=700, b=700) == ["a"]
    assert turns(subject, 0, a=720) == ["a"]
    subject.end("a", 5, 1)
    assert subject.admit(1) == []
    subject.end("a", 5, 1)
    subject.leave("a")
    assert subject.admit(1) == ["b"]


@pytest.mark.parametrize(("size", "capacity"), [("", 1600), ('kv_cache_size_tokens="800",', 800)])
def test_the_cache_is_read_in_vllms_metrics(size, capacity):
    told = read_pressure(METRICS.format(size=size))
    assert told == Pressure(capacity, 0.25, 3.0, 1.0, 2.0, 8.0, 400.0)


@pytest.mark.parametrize("text", ["", "{}", "vllm:kv_cache_usage_perc 0.5\n", "no metrics"])
def test_metrics_without_a_cache_tell_nothing(text):
    assert read_pressure(text) is None


class Busy:
    """Completions that wait until `number` are asked for, or until it is told that no more come."""

    def __init__(self) -> None:
        self.go, self.most, self.now, self.lock = threading.Event(), 0, 0, threading.Lock()

    def __call__(self, number, body):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.go.wait(30)
        with self.lock:
            self.now -= 1
        return completion(9)


def cached(tokens: int):
    return METRICS.format(size=f'kv_cache_size_tokens="{tokens}",')


async def held(client, sessions, until, busy):
    """Asks for a turn of each conversation at once."""
    tasks = [asyncio.ensure_future(client.generate(list(range(500)), SAMPLING, session)) for session in sessions]
    await until_true(until)
    busy.go.set()
    samples = []
    for session, task in zip(sessions, tasks, strict=True):
        samples.append(await task)
        client.release(session)
    await client.close()
    return samples


@pytest.mark.parametrize(("metrics", "at_once"), [(cached(2000), 2), ("", 6), (None, 6)])
def test_turns_wait_as_the_servers_metrics_say(tokenizer, start, metrics, at_once):
    busy = Busy()
    answer = (404, {}) if metrics is None else (200, metrics)
    server = start(busy, **{"/metrics": answer})
    client = client_of(tokenizer, server)
    sessions = [str(number) for number in range(6)]
    asyncio.run(asyncio.wait_for(held(client, sessions, lambda: busy.now == at_once, busy), 60))
    assert len(server.asked("/v1/completions")) == 6
    assert busy.most == at_once


def test_a_fixed_number_of_conversations_asks_for_no_metrics(tokenizer, start):
    busy = Busy()
    server = start(busy, **{"/metrics": (200, cached(100))})
    client = client_of(tokenizer, server, by_cache=False)
    asyncio.run(asyncio.wait_for(held(client, "abc", lambda: busy.now == 3, busy), 60))
    assert not server.asked("/metrics")


def test_a_turn_that_waits_can_be_cancelled(tokenizer, start):
    busy = Busy()
    server = start(busy, **{"/metrics": (200, cached(600))})
    client = client_of(tokenizer, server)

    async def go():
        tasks = [asyncio.ensure_future(client.generate([1] * 500, SAMPLING, session)) for session in "abc"]
        await until_true(lambda: busy.now == 1)
        tasks[1].cancel()
        busy.go.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for session in "abc":
            client.release(session)
        await client.close()
        return results

    results = asyncio.run(asyncio.wait_for(go(), 60))
    assert isinstance(results[1], asyncio.CancelledError) and results[2].ids == [9]
    assert len(server.asked("/v1/completions")) == 2


def test_a_turn_cancelled_as_it_begins_leaves_its_room():
    subject = admission(600)

    async def look():
        return Pressure(600, 0.0)

    async def go():
        gate = Gate(subject, look, lambda: True)

        async def turn(session):
            async with gate.turn(session, 500):
                pass

        async with gate.turn("a", 500):
            waits = asyncio.ensure_future(turn("b"))
            await until_true(lambda: len(subject.conversations) == 2)
            gate.leave("a")  # from here on it may begin
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
        await turn("c")
        await gate.close()

    asyncio.run(asyncio.wait_for(go(), 30))


def test_turns_that_wait_for_a_dead_server_go_elsewhere(tokenizer, start):
    busy = Busy()
    servers = [start(busy, **{"/metrics": (200, cached(600))}), start(lambda number, body: completion(7))]
    client = client_of(tokenizer, *servers)

    async def go():
        tasks = [asyncio.ensure_future(client.generate([1] * 500, SAMPLING, session)) for session in "abc"]
        await until_true(lambda: busy.now or all(task.done() for task in tasks))
        servers[0].stop()
        busy.go.set()
        results = await asyncio.gather(*tasks)
        await client.close()
        return results

    _, *waited = asyncio.run(asyncio.wait_for(go(), 60))  # the first one's answer may have been on its way
    assert [sample.ids for sample in waited] == [[7]] * 2
