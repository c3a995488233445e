"""Conversations that branch: they share a beginning, and nothing of what comes after it."""

from __future__ import annotations

import asyncio
import copy
import time

import pytest
from support.conversations import user
from support.models import lookup

from mt_grpo.envs import MultiTurnToolEnv, Outcome, Step, StepEnv
from mt_grpo.envs.source import check_forkable, close_environments
from mt_grpo.errors import ConfigError
from mt_grpo.forward.packing import unique_tokens
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.rollout.branching import Branching
from mt_grpo.servers.fleet import Placement
from mt_grpo.servers.http import Server
from mt_grpo.tools import Tool
from mt_grpo.trajectory import StopReason, Trajectory

END = "<|im_end|>"


class Count(StepEnv):
    """Counts what was said in the conversation; ends with the word "end"."""

    open = 0

    def reset(self, row):
        Count.open += 1
        self.said = []
        return row["prompt"]

    def step(self, turn):
        self.said.append(turn.text)
        done = turn.text.startswith("end")
        return Step(f"{len(self.said)} so far", reward=len(turn.text), done=done, rewards={"n": float(len(self.said))})

    def fork(self):
        Count.open += 1
        return copy.deepcopy(self)

    async def close(self):
        Count.open -= 1


def branching_script(session, turn):
    """The first of three conversations says two words before they branch; then each says a letter of its own."""
    own = ["abcdef"[int(session)], "end"]
    return (own if int(session) % 3 else ["one", "two", *own])[turn] + END


def run(tokenizer, env=Count, script=branching_script, at=2, size=6, branches=3, keep=False, seeds=None, **options):
    engine = ScriptedEngine(tokenizer, script)
    options = {"limits": RolloutLimits(**options.pop("limits", {})), **options}
    runner = RolloutRunner(env, engine, **options)
    requests = [RolloutRequest("Q", str(index), {"row": index}, seed=index) for index in range(size)]
    branching = None if branches is None else Branching(at, branches)
    finished = []
    work = runner.run(requests, SamplingParams(), finished.append, keep, branching)
    trajectories = asyncio.run(work)
    assert sorted(id(each) for each in finished) == sorted(id(each) for each in trajectories)
    return trajectories, engine, runner


def words(trajectory):
    return [turn.text for turn in trajectory.turns]


def test_branches_go_on_by_themselves_from_shared_turns(tokenizer):
    trajectories, engine, _ = run(tokenizer)
    assert [words(each) for each in trajectories] == [["one", "two", letter, "end"] for letter in "abcdef"]
    assert [each.branch_of for each in trajectories] == [None, "0", "0", None, "3", "3"]
    assert [each.row["row"] for each in trajectories] == list(range(6))
    for each in trajectories:
        assert each.stop_reason is StopReason.ENV_DONE and each.env_rewards == {"n": 4.0}
        assert [turn.replies for turn in each.turns] == [user(f"{number} so far") for number in (1, 2, 3, 4)]
        assert [turn.reward for turn in each.turns] == [len(turn.text) for turn in each.turns]
    assert len(engine.requests) == 2 * (2 + 3 * 2)  # each turn is sampled once
    assert Count.open == 0


def test_a_branch_begins_with_the_ids_of_its_trunk(tokenizer):
    trajectories, engine, runner = run(tokenizer, size=3)
    trunk = trajectories[0].tree
    shared = trunk.path_of_turn(1)
    contexts = {session: context for session, context, _ in reversed(engine.requests)}  # the first of each
    assert len(contexts["1"]) > len(shared)
    for session in ("1", "2"):
        assert contexts[session][: len(shared)] == shared
    for each in trajectories:
        assert each.tree.path_of_turn(1) == shared and each.tree.num_sequences == 1
    alone = sum(each.tree.num_tokens - len(contexts["1"]) for each in trajectories)
    assert unique_tokens([each.tree for each in trajectories]) == len(contexts["1"]) + alone
    rows = [runner.completion(each) for each in trajectories]
    assert rows[0].prompt_ids == rows[1].prompt_ids and rows[0].logprobs[:3] == rows[2].logprobs[:3]


def test_a_conversation_that_ends_before_it_branches_is_copied(tokenizer):
    trajectories, engine, _ = run(tokenizer, script=lambda session, turn: f"end{END}", size=3, keep=True)
    assert [words(each) for each in trajectories] == [["end"]] * 3 and len(engine.requests) == 1
    assert [each.session for each in trajectories] == ["0", "1", "2"]
    first, *copies = trajectories
    for each in copies:
        assert each.branch_of == "0" and each.tree == first.tree and each.turns == first.turns
        assert each.turns[0] is not first.turns[0] and each.env_rewards == {"n": 1.0}
    assert Count.open == 1
    asyncio.run(close_environments(trajectories))
    assert Count.open == 0


def test_the_seeds_of_branches_differ(tokenizer):
    class Seeds(ScriptedEngine):
        seen = {}

        async def generate(self, context, sampling, session):
            self.seen.setdefault(session, []).append(sampling.seed)
            return await super().generate(context, sampling, session)

    engine = Seeds(tokenizer, branching_script)
    requests = [RolloutRequest("Q", str(index), seed=index) for index in range(3)]
    asyncio.run(RolloutRunner(Count, engine).run(requests, SamplingParams(), branching=Branching(2, 3)))
    assert [len(engine.seen[session]) for session in "012"] == [4, 2, 2]
    seeds = [seed for seeds in engine.seen.values() for seed in seeds]
    assert len(set(seeds)) == len(seeds)


def test_branches_keep_the_budget_of_their_trunk(tokenizer):
    def long(session, turn):
        return branching_script(session, turn) if session != "1" else f"{'long ' * 300}{END}"

    trajectories, _, _ = run(tokenizer, script=long, size=3, limits={"max_completion_tokens": 120})
    assert [each.stop_reason for each in trajectories] == [
        StopReason.ENV_DONE, StopReason.TOKEN_BUDGET, StopReason.ENV_DONE
    ]  # fmt: skip
    first = trajectories[1].turns[0].context_length
    assert trajectories[1].tree.num_tokens - first == 120


@pytest.mark.parametrize("history", [{"history": "strip_thinking"}, {"history": "compact", "compact_every": 2}])
def test_branches_rewrite_their_history_alone(tokenizer, history):
    def thinks(session, turn):
        return f"<think>{session}</think>{branching_script(session, turn)}"

    class Thinking(Count):
        def step(self, turn):
            step = super().step(turn)
            step.done = turn.text.endswith("end")
            return step

        fork = Count.fork

    trajectories, _, _ = run(tokenizer, Thinking, thinks, size=3, **history)
    for session, each in zip("012", trajectories, strict=True):
        assert len(each.turns) == 4 and each.tree.num_turns == 4
        assert each.turns[1].text == "<think>0</think>two" and each.turns[2].text.startswith(f"<think>{session}")


def test_a_fork_that_fails_ends_the_whole_trunk(tokenizer):
    class Second(Count):
        forks = 0

        def fork(self):
            Second.forks += 1
            if Second.forks == 2:
                raise ZeroDivisionError("no more")
            return super().fork()

    trajectories, _, _ = run(tokenizer, Second, size=3)
    assert [each.stop_reason for each in trajectories] == [StopReason.ENV_ERROR] * 3
    assert all("ZeroDivisionError: no more" in each.error for each in trajectories)
    assert Count.open == 0


def test_a_fork_must_be_another_environment(tokenizer):
    class Same(Count):
        def fork(self):
            return self

    trajectories, _, _ = run(tokenizer, Same, size=3)
    assert "Same.fork returned itself: return a copy." in trajectories[0].error
    Count.open = 0


def test_a_branch_that_fails_leaves_the_others_alone(tokenizer):
    class Fails(Count):
        def step(self, turn):
            if turn.text == "b":
                raise ZeroDivisionError
            return super().step(turn)

        fork = Count.fork

    trajectories, _, _ = run(tokenizer, Fails, size=3)
    assert [each.stop_reason for each in trajectories] == [
        StopReason.ENV_DONE, StopReason.ENV_ERROR, StopReason.ENV_DONE
    ]  # fmt: skip
    assert Count.open == 0


def test_a_bug_of_the_engine_in_a_branch_ends_the_run(tokenizer):
    def fails(session, turn):
        return TypeError("a bug") if session == "2" else branching_script(session, turn)

    with pytest.raises(TypeError, match="a bug"):
        run(tokenizer, script=fails, size=3)
    assert Count.open == 0


def test_the_time_of_a_branch_includes_its_trunk(tokenizer):
    class Slow(Count):
        def step(self, turn):
            time.sleep(0.02)
            return super().step(turn)

        fork = Count.fork

    trajectories, _, _ = run(tokenizer, Slow, size=3)
    assert all(each.seconds >= 4 * 0.02 for each in trajectories)


def test_conversations_at_once_count_branches(tokenizer):
    most = 0

    class Watched(ScriptedEngine):
        async def generate(self, context, sampling, session):
            nonlocal most
            most = max(most, len(runner.under_way))
            return await super().generate(context, sampling, session)

    runner = RolloutRunner(Count, Watched(tokenizer, branching_script), RolloutLimits(max_concurrent=3))
    requests = [RolloutRequest("Q", str(index), seed=index) for index in range(6)]
    asyncio.run(runner.run(requests, SamplingParams(), branching=Branching(2, 3)))
    assert most == 3


def test_tools_that_keep_no_state_can_branch(tokenizer):
    def searches(session, turn):
        call = '<tool>{"name": "lookup", "args": {"query": "Lima"}}</tool>'
        texts = [call, call, f"<answer>{session}</answer>"]
        return (texts if session == "0" else texts[1:])[turn]

    env = MultiTurnToolEnv([lookup], protocol="learnt_tags")
    check_forkable(env)
    trajectories, _, _ = run(tokenizer, env, searches, at=1, size=3)
    assert [each.answer for each in trajectories] == ["0", "1", "2"]
    assert [len(each.turns[0].tool_calls) for each in trajectories] == [1, 1, 1]


def test_a_branch_stays_on_the_server_of_its_trunk():
    pool = Placement([Server("http://a"), Server("http://b")])
    trunk = pool.place("0", [1, 2])
    other = pool.place("1", [9])
    assert trunk is not other
    for session in ("2", "3"):
        pool.join(session, "0")
        assert pool.place(session, [1, 2, 3]) is trunk
    pool.join("4", "unknown")
    for session in "01234":
        pool.release(session)
    assert not pool._members and not pool._server_of_group


class Inherits(Count):
    """What it adds may need a copy of its own."""


class OwnLoop(StepEnv):
    async def run(self, policy, row):
        return Outcome()

    reset = step = None

    def fork(self):
        return self


class State(MultiTurnToolEnv):
    fork = MultiTurnToolEnv.fork


@pytest.mark.parametrize(
    ("env", "what"),
    [
        (Inherits, "Inherits has no `fork` of its own"),
        (Inherits(), "Inherits has no `fork` of its own"),
        ({"a": Count, "b": {"c": Inherits}}, "Inherits has no `fork`"),
        (lambda row: Count(), "<lambda> is none of which that is known"),
        (OwnLoop, "OwnLoop has a `run` of its own"),
        (State([Tool("sql", "", {"type": "object"}, lookup, keeps_state=True)]), "the tool 'sql' keeps a state"),
    ],
)
def test_environments_that_cannot_be_forked_are_refused(env, what):
    with pytest.raises(ConfigError, match=what):
        check_forkable(env)


def test_a_forked_tree_grows_by_itself():
    tree = Trajectory([]).tree
    tree.add_turn([1, 2], [3], [-0.1])
    tree.extend([4], [5], [-0.2])
    before, twin = tree.to_dict(), tree.fork()
    assert twin == tree
    twin.extend([6], [7], [-0.3])
    twin.add_turn([1, 9], [3], [-0.1])
    assert tree.to_dict() == before and tree.path() == [1, 2, 3, 4, 5] and tree.num_sequences == 1
    assert twin.num_turns == 4 and twin.num_sequences == 2
