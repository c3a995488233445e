"""Turns that wait for room in a server's cache: who goes first, who waits, and when nobody does."""

import asyncio
import threading

import pytest
from support.upstreams import SAMPLING, client_of, completion, play
from support.waiting import until_true

from mt_grpo.servers.cache_scheduler import CacheScheduler, Gate, Pressure


class Scenario:
    """
    Plays a script, whose steps are

    - `NOW: a=500 b=700 -> a`: turns of conversations after so many tokens are asked for, and those begin;
    - `end NOW ab 200`: turns are over, in which so many tokens were sampled; `leave a`; `withdraw a`;
    - `cache 2000`: the server says that it has so many; `look NOW usage=0.5 ...`: it says more of itself;
    - `compute SECONDS`: a busy server was looked at every 3 seconds, and said each time that it had taken so long for
      300 tokens of prefixes;
    - `preempt SECONDS`: five times, after so long each, another request was put off.
    """

    def __init__(self, processes: int) -> None:
        self.subject, self.capacity = CacheScheduler(processes), 0

    def play(self, script: str) -> None:
        for step in script.split("; "):
            asked, arrow, begin = step.partition(" ->")
            if arrow:
                now, *turns = asked.split()
                for session, _, tokens in (turn.partition("=") for turn in turns):
                    self.subject.ask(session, int(tokens), float(now[:-1]))
                assert self.subject.admit(float(now[:-1])) == list(begin.strip()), step
            else:
                name, *words = step.split()
                getattr(self if hasattr(self, name) else self.subject, name)(*words)

    def cache(self, tokens: str) -> None:
        self.capacity = int(tokens)
        self.look("0")

    def look(self, now: str, *words: str) -> None:
        told = {name: float(value) for name, _, value in (word.partition("=") for word in words)}
        self.subject.observe(Pressure(self.capacity, told.pop("usage", 0.0), **told), float(now))

    def end(self, now: str, sessions: str, tokens: str) -> None:
        for session in sessions:
            self.subject.end(session, int(tokens), float(now))

    def compute(self, seconds: str) -> None:
        for n in range(200):
            self.look(f"{3 * n}", f"usage={1 / 3}", f"prefill_seconds={float(seconds) * n}", f"prefilled={300 * n}")

    def preempt(self, seconds: str) -> None:
        for n in range(1, 6):
            self.look(f"{float(seconds) * n}", f"preemptions={n}")


ALONE = {
    "all fit": "cache 10000; 0: a=100 b=100 c=100 -> abc",
    "a server that does not tell its cache": "0: a=1000000 b=1000000 -> ab",
    "those that do not fit wait in their order": "cache 2000; 0: a=500 b=500 c=500 -> ab; 1: ->; leave b; 2: -> c",
    "larger than the cache: alone": "cache 100; 0: a=500 b=500 -> a; end 1 a 10; 1: -> b",
    "a place is kept between two turns": (
        "cache 3000; 0: a=800 b=700 c=100 -> ab; end 1 a 200; 1: ->; 2: a=1100 -> a"
    ),
    "the youngest waits when all outgrow the cache": (
        "cache 3000; 0: a=500 b=500 c=500 -> abc; end 1 abc 200; 2: a=1000 b=900 c=900 -> ab; leave a; 3: -> c"
    ),
    "a long pause gives the place away": "cache 3000; 0: a=800 b=700 c=600 -> ab; end 1 a 200; 5: ->; 60: -> c",
    # at 100 tokens a second, those that run, 1,000 tokens, are computed in ten seconds
    "a pause is long by what it costs to compute again": (
        "cache 3000; compute 3; 600: a=800 b=700 c=600 -> ab; end 600 a 200; 609.5: ->; 610.1: -> c"
    ),
    # each of ten counts the three seconds that all of them took
    "requests computed together take no longer": (
        "cache 3000; compute 30; 600: a=800 b=700 c=600 -> ab; end 600 a 200; 610.1: -> c"
    ),
    "tools outlast a prefix": (
        "cache 3000; compute 3; 600: a=800 b=700 c=600 d=900 -> ab; end 600 ab 200; "
        f"look 660 usage={1 / 3} prefill_seconds=600 prefilled=60000; 660: -> cd"
    ),
    # of ten seconds that its prefix is worth, eight are over
    "a prefix is worth less room the longer its tool takes": (
        "cache 3000; compute 3; 600: a=800 b=700 c=600 -> ab; end 600 a 200; "
        f"look 608 usage={1 / 3} prefill_seconds=600 prefilled=60000; 608: -> c"
    ),
    # 800 tokens for both
    "shared prompts let more in": (
        "cache 2000; 0: a=500 b=500 c=500 -> ab; " + "look 0 usage=0.4 running=2; " * 10 + "1: -> c"
    ),
    "no preemptions": "cache 2000; look 10; look 20; look 30; look 40; look 50; 0: a=500 b=500 -> ab",
    "preemptions let fewer in": "cache 2000; preempt 10; 0: a=500 b=500 -> a",
    # requests under way cannot be withdrawn, so that a crowded server goes on to preempt
    "one burst of preemptions counts once": "cache 2000; preempt 0.5; 3: a=450 b=450 -> ab",
    "a turn that ends after its conversation counts nothing": (
        "cache 2000; 0: a=1500 -> a; leave a; end 1 a 5; withdraw a; 2: b=1500 c=1500 -> b"
    ),
    "agents that ask twice at once have both turns": (
        "cache 1000; 0: a=700 b=700 -> a; 0: a=720 -> a; end 1 a 5; 1: ->; end 1 a 5; leave a; 1: -> b"
    ),
}
OTHERS = "cache 5000; 0: a=1000 b=1000 c=1000 -> a; "
BORROWED = OTHERS + "look 0.5 usage=0.25 running=1; 0.5: -> bc"
SHARED = {
    "alone on a server: all of it, after an even share": BORROWED,
    "what others hold is not taken": OTHERS + "look 0.5 usage=0.6 running=2; 0.5: ->",
    "free room is taken": "cache 8000; 0: a=2500 b=2500 -> a; look 0.5 usage=0.25 running=2; 0.5: -> b",
    "borrowed room is given back as others come": (
        BORROWED + "; end 1 abc 200" + "; look 1 usage=0.5 running=2" * 60 + "; 1: a=1200 b=1200 c=1200 -> a"
    ),
    # between two batches nobody looks, and all processes begin at the same time
    "a batch begins with an even share again": (
        "cache 5000; 0: a=1000 -> a; look 0.5 usage=0.25 running=1; leave a; 9: d=1000 e=1000 -> d"
    ),
    # an agent that asks twice at once has two requests under way
    "requests of one conversation are not taken for others": (
        "cache 5000; 0: a=500 a=500 b=1000 c=1000 -> ab; look 0.5 usage=0.3 running=3; 0.5: -> c"
    ),
}


@pytest.mark.parametrize(
    ("processes", "script"),
    [
        *((1, script) for script in ALONE.values()),
        *((2, script) for script in SHARED.values()),
        # more than a seventh of it, where the conversations of others are smaller
        (
            7,
            "cache 28000; 0: a=1400 b=1400 -> ab; look 0.5 usage=0.7 running=14; end 1 ab 200; 2: a=2000 b=2000 -> ab",
        ),
    ],
    ids=[*ALONE, *SHARED, "shares are told by numbers as well as by tokens"],
)
def test_who_begins_and_who_waits(processes, script):
    Scenario(processes).play(script)


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


def cached(tokens: int) -> dict:
    """What a server with such a cache answers."""
    return {"/metrics": (200, METRICS.format(size=f'kv_cache_size_tokens="{tokens}",'))}


TOLD = 0.25, 3.0, 1.0, 2.0, 8.0, 400.0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (METRICS.format(size=""), Pressure(1600, *TOLD)),
        (METRICS.format(size='kv_cache_size_tokens="800",'), Pressure(800, *TOLD)),
        *((text, None) for text in ("", "{}", "vllm:kv_cache_usage_perc 0.5\n", "no metrics")),
    ],
)
def test_the_cache_is_read_in_vllms_metrics(text, told):
    assert Pressure.read(text) == told


class Busy:
    """Completions that wait until no more are to come."""

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


def turns(client, sessions: str) -> list[asyncio.Future]:
    """A turn of each conversation, asked for at once."""
    return [asyncio.ensure_future(client.generate([1] * 500, SAMPLING, session)) for session in sessions]


@pytest.mark.parametrize(
    ("metrics", "options", "at_once"),
    [
        (cached(2000), {}, 2),
        ({"/metrics": (200, "")}, {}, 6),
        ({"/metrics": (404, {})}, {}, 6),
        (cached(100), {"by_cache": False}, 6),
    ],
)
def test_turns_wait_as_the_servers_metrics_say(tokenizer, start, metrics, options, at_once):
    """Where a fixed number of conversations is wanted, nobody asks for them."""
    busy = Busy()
    server = start(busy, **metrics)
    client = client_of(tokenizer, server, **options)

    async def go():
        tasks = turns(client, "abcdef")
        await until_true(lambda: busy.now == at_once)
        busy.go.set()
        for session, task in zip("abcdef", tasks, strict=True):
            await task
            client.release(session)

    play(client, go, connect=False)
    assert (len(server.asked("/v1/completions")), busy.most) == (6, at_once)
    assert bool(server.asked("/metrics")) != bool(options)


def test_a_turn_that_waits_can_be_cancelled(tokenizer, start):
    busy = Busy()
    server = start(busy, **cached(600))
    client = client_of(tokenizer, server)

    async def go():
        tasks = turns(client, "abc")
        await until_true(lambda: busy.now == 1)
        tasks[1].cancel()
        busy.go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    _, cancelled, last = play(client, go, connect=False)
    assert isinstance(cancelled, asyncio.CancelledError) and last.ids == [9]
    assert len(server.asked("/v1/completions")) == 2


def test_a_turn_cancelled_as_it_begins_leaves_its_room():
    subject = CacheScheduler()

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
    servers = [start(busy, **cached(600)), start(lambda number, body: completion(7))]
    client = client_of(tokenizer, *servers)

    async def go():
        tasks = turns(client, "abc")
        await until_true(lambda: busy.now or all(task.done() for task in tasks))
        servers[0].stop()
        busy.go.set()
        return await asyncio.gather(*tasks)

    _, *waited = play(client, go, connect=False)  # the first one's answer may have been on its way
    assert [sample.ids for sample in waited] == [[7]] * 2
