"""Tools and environments that do what they should not, each with what must become of its conversation."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from types import SimpleNamespace

from mt_grpo.envs import Outcome, Step, StepEnv
from mt_grpo.tools import BaseTool, OpenAIFunctionToolSchema, Tool
from support.conversations import user

GATE = threading.Event()
"""What hangs in a thread, or does not let itself be cancelled, hangs until this is set."""
COUNTS: Counter[str] = Counter()
"""How many environments and states were made, closed and released."""
_COUNTING = threading.Lock()  # `Counter` loses what two threads add to at once
TIMEOUT = 4.0
"""Seconds that tools, steps and states may take where one of them takes too long."""
MEGABYTES = "x" * 10_000_000


def count(what):
    with _COUNTING:
        COUNTS[what] += 1


class Executing:
    """Writes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


class Mute(Exception):
    """Says nothing about itself."""

    def __str__(self):
        raise SystemExit(3)


class Opaque:
    """Has no text."""

    def __str__(self):
        raise ValueError("no words")

    __repr__ = __str__


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def cycle():
    value = {}
    value["self"] = value
    return value


def graph():
    """Of which each level has twice as many ways as the one before."""
    value = {"children": []}
    value["children"] += [{"parent": value}, {"parent": value}]
    return value


def hang():
    GATE.wait()


async def hang_softly():
    await asyncio.Event().wait()


async def hang_hard(last=None):
    while not GATE.is_set():
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            pass
    if last is not None:
        raise last


def recurse():
    return recurse()


def throw(error):
    raise error


# What a call does, and how its `error` begins
RAISED = {
    "value": (lambda: throw(ValueError("no")), "ValueError: no"),
    "exit": (lambda: throw(SystemExit(3)), "RuntimeError: SystemExit: 3"),
    "interrupt": (lambda: throw(KeyboardInterrupt()), "RuntimeError: KeyboardInterrupt: "),
    "close": (lambda: throw(GeneratorExit()), "RuntimeError: GeneratorExit: "),
    "group": (lambda: throw(ExceptionGroup("many", [ValueError("a")])), "ExceptionGroup: many (1 sub-exception)"),
    "exits": (
        lambda: throw(BaseExceptionGroup("many", [SystemExit(1)])),
        "RuntimeError: BaseExceptionGroup: many (1 sub-exception)",
    ),
    "mute": (lambda: throw(Mute()), "Mute"),
    "recursion": (recurse, "RecursionError: maximum recursion depth exceeded"),
    "memory": (lambda: throw(MemoryError("no room")), "MemoryError: no room"),
    "time": (lambda: throw(TimeoutError("too late")), "TimeoutError: too late"),
}
STOPPED = {
    "sync": ("RuntimeError: StopIteration: s", "RuntimeError: CancelledError: "),
    "async": ("RuntimeError: coroutine raised StopIteration", None),
}
REFUSED = {
    "opaque": (Opaque, "ValueError: no words"),
    "deep": (lambda: nested(50_000), "RecursionError: maximum recursion depth exceeded"),
    "cycle": (cycle, "ValueError: Circular reference detected"),
    "half": (lambda: throw(ValueError("half: \ud83d")), "ValueError: half: ?"),
    "keys": (lambda: {(1, 2): 3}, "TypeError: keys must be str, int, float, bool or None, not tuple"),
    "data_deep": (lambda: ("t", {"d": nested(300)}), "ValueError: the data of the result goes more than 100 levels"),
    "data_cycle": (lambda: ("t", cycle()), "ValueError: Circular reference detected"),
}
ANSWERED = {
    "fine": (lambda: "fine", "fine"),
    "nothing": (lambda: None, "null"),
    "nan": (lambda: float("nan"), "NaN"),
    "inf": (lambda: [float("-inf")], "[-Infinity]"),
    "bytes": (lambda: b"\xff\x00" * 10, "[20 bytes that are not text]"),
    "text_bytes": (lambda: "Perú".encode(), "Perú"),
    "surrogate": (lambda: "a\ud800", "a?"),
    "marks": (lambda: "<|im_end|>\n<|im_start|>system", "<|im_end|>\n<|im_start|>system"),
    "data": (lambda: ("t", {"n": float("inf")}), "t"),
    "cut": (lambda: MEGABYTES, "x" * 50 + "\n[9,999,950 of 10,000,000 characters were cut off.]"),
    "cut_bytes": (lambda: b"x" * 10_000_000, "x" * 50 + "\n[9,999,950 of 10,000,000 characters were cut off.]"),
}


def late(name):
    return f"{name} took longer than {TIMEOUT:g} s."


def calls():
    """The tools, and by name of each the result and the error that its call must have, as beginnings."""
    tools, expected = [], {}

    def add(name, function, result=None, error=None, **options):
        tools.append(Tool(name, "Does harm.", {"type": "object", "properties": {}}, function, **options))
        expected[name] = (f"Error: {error}" if result is None else result), error

    def as_async(function):
        async def work():
            return function()

        return work

    for kind in ("sync", "async"):
        made = as_async if kind == "async" else lambda function: function
        for name, (function, error) in {**RAISED, **REFUSED}.items():
            add(f"{kind}_{name}", made(function), error=error)
        for name, (function, result) in ANSWERED.items():
            limit = 50 if name.startswith("cut") else None
            add(f"{kind}_{name}", made(function), result, max_result_size=limit)
        stop, cancel = STOPPED[kind]
        add(f"{kind}_stop", made(lambda: throw(StopIteration("s"))), error=stop)
        cancelled = cancel or f"{kind}_cancel was cancelled."
        add(f"{kind}_cancel", made(lambda: throw(asyncio.CancelledError())), error=cancelled)
    add("sync_hangs", hang, error=late("sync_hangs"))
    add("async_hangs", hang_softly, error=late("async_hangs"))
    add("async_swallows", hang_hard, error=late("async_swallows"))
    add("async_swallows_and_raises", lambda: hang_hard(ValueError()), error=late("async_swallows_and_raises"),
        is_async=True)  # fmt: skip
    add("no_awaitable", lambda: 3, error="TypeError: object int can't be used in 'await'", is_async=True)
    add("ends", lambda: "over", "over", ends_episode=True)
    add("big", lambda: MEGABYTES, MEGABYTES)
    add("big_bytes", as_async(lambda: b"x" * 10_000_000), MEGABYTES)
    add("big_error", lambda: throw(ValueError(MEGABYTES)), error="ValueError: xxx")
    cut = f"ValueError: {MEGABYTES[:38]}\n[9,999,962 of 10,000,012 characters were cut off.]"
    add("cut_error", lambda: throw(ValueError(MEGABYTES)), error=cut, max_result_size=50)
    add("sync_lone", hang, error=late("sync_lone"), concurrency=1)
    return tools, expected


async def act(how):
    """One of the harms that a method of a state or of an environment does."""
    match how:
        case "hang":
            await hang_softly()
        case "swallow":
            await hang_hard(ValueError())
        case "cancel":
            raise asyncio.CancelledError
        case _:
            RAISED[how][0]()


HARMS = {name: error for name, (_, error) in RAISED.items()} | {
    "hang": f"took longer than {TIMEOUT:g} s",
    "swallow": f"took longer than {TIMEOUT:g} s",
    "cancel": "cancelled",
}


class State(BaseTool):
    """Does harm in the methods that the row names: `{method: how}`."""

    def __init__(self, name):
        function = {"name": name, "description": "Harm.", "parameters": {"type": "object", "properties": {}}}
        super().__init__({}, OpenAIFunctionToolSchema(function=function))
        self.harms = {}

    async def create(self, instance_id=None, harms=None, **kwargs):
        count("created")
        self.harms[instance_id] = harms or {}
        await self.harm(instance_id, "create")
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        value = await self.harm(instance_id, "execute")
        return ("done", 0.5, {"n": 1}) if value is None else value

    async def calc_reward(self, instance_id, **kwargs):
        value = await self.harm(instance_id, "calc_reward")
        return 1.0 if value is None else value

    async def release(self, instance_id, **kwargs):
        count("released")
        harms = self.harms.pop(instance_id)
        if "release" in harms:
            await act(harms["release"])

    async def harm(self, instance_id, method):
        how = self.harms[instance_id].get(method)
        if how in NONSENSE:
            return NONSENSE[how][0]()
        return None if how is None else await act(how)


# What `execute` gives, and the error of the call
NONSENSE = {
    "a number": (lambda: 3, "TypeError: `execute` must return (response, reward, metrics), not int"),
    "no reward": (lambda: ("t", "much", {}), "TypeError: the step reward that `execute` returned is str: give"),
    "nan": (lambda: ("t", float("nan"), {}), "ValueError: the step reward that `execute` returned is nan: give"),
    "metrics": (lambda: ("t", 1.0, cycle()), "ValueError: the mapping of metrics that `execute` returned goes more"),
    "opaque": (lambda: ("t", 1.0, {"a": Opaque()}), "ValueError: the mapping of metrics that `execute` returned cann"),
}


def last_step():
    return Step("bye", reward=0.5, done=True, rewards={"score": 1.0}, answer="A")


class Steps(StepEnv):
    """Does the harm that its row names, in the method that it names."""

    def __init__(self):
        count("made")

    async def reset(self, row):
        self.where, self.how = row["where"], row["how"]
        return await self.harm("reset", "Q")

    async def step(self, turn):
        return await self.harm("step", last_step())

    async def close(self):
        count("closed")
        await self.harm("close", None)

    async def harm(self, where, fine):
        if self.where != where:
            return fine
        return VALUES[where][self.how][0]() if self.how in VALUES.get(where, {}) else await act(self.how)


class PlainSteps(Steps):
    """The same in threads."""

    def reset(self, row):
        self.where, self.how = row["where"], row["how"]
        return self.harm("reset", "Q")

    def step(self, turn):
        return self.harm("step", last_step())

    def close(self):
        count("closed")
        return self.harm("close", None)

    def harm(self, where, fine):
        if self.where != where:
            return fine
        if self.how in VALUES.get(where, {}):
            return VALUES[where][self.how][0]()
        if self.how != "hang":
            return RAISED[self.how][0]()
        hang()
        return hang_softly()  # which nobody awaits any more


NO_TEXT = "without a text `role`: give a dictionary."
NO_JSON = "cannot be written as JSON (ValueError: no words)"
# What `reset` and `step` return, and the error of the conversation
VALUES = {
    "reset": {
        "none": (lambda: None, "gave `None` for messages"),
        "empty": (lambda: [], "nothing to reply to"),
        "bytes": (lambda: b"Q", "gave bytes for messages"),
        "texts": (lambda: ["Q"], f"A message is str, {NO_TEXT}"),
        "no role": (lambda: [{"content": "Q"}], f"A message is dict, {NO_TEXT}"),
        "content": (lambda: [{"role": "user", "content": b"Q"}], "The content of a message of 'user' is bytes"),
        "opaque": (lambda: [{"role": "user", "content": Opaque()}], NO_JSON),
        "cycle": (lambda: [{"role": "user", "content": [cycle()]}], "goes more than 100 levels deep"),
        "big": (lambda: throw(ValueError(MEGABYTES)), "x\n[9,990,012 of 10,000,012 characters were cut off.]"),
        "assistant": (lambda: [{"role": "assistant", "content": "A"}], "nothing to reply to"),
    },
    "step": {
        "none": (lambda: None, "gave `None` for messages"),
        "number": (lambda: 1.0, "a list of messages or a `Step`, as `Step(reward=1.0, done=True)`."),
        "mapping": (lambda: {"reward": 1.0}, "a list of messages or a `Step`, as `Step(**...)`."),
        "Gym": (lambda: ("o", 1.0, True), "or wrap an environment of Gym's in `mt_grpo.integrations.gym.GymEnv`."),
        "half": (lambda: "a\ud800", "has half a character, '\\ud800' at place 1: leave it out"),
        "half a part": (
            lambda: [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}],
            "at place 0: leave",
        ),
        "empty": (lambda: [], "neither replied nor ended"),
        "bytes": (lambda: b"Q", "gave bytes for messages"),
        "reward": (lambda: Step("R", reward="much"), "the reward of a step is str: give a finite number."),
        "nan": (lambda: Step("R", reward=float("nan")), "the reward of a step is nan: give a finite number."),
        "large": (lambda: Step("R", reward=10**400), "the reward of a step is inf: give a finite number."),
        "replies": (lambda: Step([3], done=True), f"A message is int, {NO_TEXT}"),
        "rewards": (lambda: Step(done=True, rewards=None), "`rewards` of the outcome is NoneType"),
        "inf": (lambda: Step(done=True, rewards={"a": float("inf")}), "the reward 'a' is inf"),
        "word": (lambda: Step(done=True, rewards={"a": "good"}), "the reward 'a' is str: give a finite"),
        "answer": (lambda: Step(done=True, answer=3), "`answer` of the outcome is int"),
        "graph": (lambda: Step(done=True, info=graph()), "`info` of the outcome goes more than 100 levels deep"),
        "info": (lambda: Step(done=True, info=cycle()), "`info` of the outcome goes more than 100 levels deep"),
        "opaque": (lambda: Step(done=True, info={"a": Opaque()}), NO_JSON),
        "keys": (lambda: Step(done=True, info={(1, 2): 3}), "cannot be written as JSON (TypeError: keys must be"),
    },
}


class Loop:
    """Holds its conversation itself, as the row says."""

    def __init__(self, row):
        count("made")
        self.how = row["how"]

    async def run(self, policy, row):
        if self.how in HARMS:
            await policy.reply(user("Q"))
            await act(self.how)
        return await getattr(self, self.how)(policy)

    async def close(self):
        count("closed")

    async def no_outcome(self, policy):
        return {"rewards": {}}

    async def wrong_reason(self, policy):
        return Outcome(stop_reason="answered")

    async def no_end(self, policy):
        while True:
            await policy.reply(user("Q"))

    async def swallow_the_end(self, policy):
        taken = 0
        for _ in range(200):
            try:
                await policy.reply(user("Q"))
                taken += 1
            except Exception:
                await asyncio.sleep(0)
        return Outcome({"taken": float(taken > 3)}, answer="A")

    async def all_at_once(self, policy):
        turns = await asyncio.gather(*(policy.reply(user(f"Q{number}"), max_tokens=1) for number in range(5)))
        return Outcome({"turns": float(len(turns))})

    async def too_many_at_once(self, policy):
        await asyncio.gather(*(policy.reply(user(f"Q{number}")) for number in range(300)))

    async def leave_turns_behind(self, policy):
        left = [asyncio.ensure_future(policy.reply(user(f"Q{number}"))) for number in range(5)]
        await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        return Outcome({"left": 1.0})

    async def too_long(self, policy):
        await policy.reply(user(MEGABYTES))

    async def no_messages(self, policy):
        await policy.reply([3])


# The stop reason of each loop, its error, and its rewards
LOOPS = {
    "no_outcome": ("env_error", "returned dict: return an `Outcome`.", {}),
    "wrong_reason": ("env_error", "`stop_reason` of the outcome is str: give a `StopReason` or `None`.", {}),
    "no_end": ("token_budget", None, {}),
    "swallow_the_end": ("env_done", None, {"taken": 1.0}),
    "all_at_once": ("env_done", None, {"turns": 5.0}),
    "too_many_at_once": ("token_budget", None, {}),
    "leave_turns_behind": ("env_done", None, {"left": 1.0}),
    "too_long": ("context_full", "which leaves no room for a turn", {}),
    "no_messages": ("env_error", NO_TEXT, {}),
}


def make(row):
    """A factory that works in a thread."""
    match row["how"]:
        case "hang":
            hang()
            return Loop({"how": "all_at_once"})  # late, and closed all the same
        case "nothing":
            return None
        case "disguised":
            loop = Loop({"how": "all_at_once"})
            return SimpleNamespace(run=loop.run, close=loop.close)  # an environment, but for its class
        case "later":
            return make_softly({"how": "hang"})
        case how:
            return RAISED[how][0]()


async def make_softly(row):
    """A factory that is awaited; one that swallows its cancellation makes an environment late."""
    if row["how"] == "swallow":
        await hang_hard()
        return Loop({"how": "all_at_once"})
    await act(row["how"])
