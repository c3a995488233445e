"""Conversations that branch: they share a beginning, and nothing of what comes after it."""

import asyncio
import copy
import time
from collections import defaultdict

import pytest
from support.conversations import user
from support.models import lookup

from mt_grpo.envs import MultiTurnToolEnv, Outcome, Step, StepEnv
from mt_grpo.envs.source import _check_forkable, close_environments
from mt_grpo.errors import ConfigError
from mt_grpo.forward.packing import unique_tokens
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.rollout.runner import Branching
from mt_grpo.servers.fleet import _Placement
from mt_grpo.servers.http import Server
from mt_grpo.tools import Tool
from mt_grpo.trajectory import StopReason, Trajectory

END = "<|im_end|>"
DONE, FAILED = StopReason.ENV_DONE, StopReason.ENV_ERROR


class Count(StepEnv):
    """Counts what was said in the conversation; ends with the word "end"."""

    open = 0

    def reset(self, row):
        Count.open += 1
        self.said = []
        return row["prompt"]

    def step(self, turn):
        self.said.append(turn.text)
        done = turn.text.endswith("end")
        return Step(f"{len(self.said)} so far", reward=len(turn.text), done=done, rewards={"n": float(len(self.said))})

    def fork(self):
        Count.open += 1
        return copy.deepcopy(self)

    async def close(self):
        Count.open -= 1


def counting(before_step=lambda turn: None, fork=Count.fork):
    """The same, which does something before each step, or forks otherwise."""

    class Kind(Count):
        def step(self, turn):
            before_step(turn)
            return super().step(turn)

    Kind.fork = fork
    return Kind


@pytest.fixture(autouse=True)
def all_are_closed():
    yield
    assert Count.open == 0


def branching_script(session, turn):
    """The first of three conversations says two words before they branch; then each says a letter of its own."""
    own = ["abcdef"[int(session)], "end"]
    return (own if int(session) % 3 else ["one", "two", *own])[turn] + END


class Engine(ScriptedEngine):
    """Notes the seeds of each session, and how many conversations there were at once."""

    async def generate(self, context, sampling, session):
        self.seeds[session].append(sampling.seed)
        self.most = max(self.most, len(self.runner.under_way))
        return await super().generate(context, sampling, session)


def run(tokenizer, env=Count, script=branching_script, at=2, size=3, keep=False, limits=None, **options):
    engine = Engine(tokenizer, script)
    engine.seeds, engine.most = defaultdict(list), 0
    engine.runner = runner = RolloutRunner(env, engine, RolloutLimits(**limits or {}), **options)
    requests = [RolloutRequest("Q", str(index), {"row": index}, seed=index) for index in range(size)]
    finished = []
    trajectories = asyncio.run(runner.run(requests, SamplingParams(), finished.append, keep, Branching(at, 3)))
    assert sorted(map(id, finished)) == sorted(map(id, trajectories))
    return trajectories, engine, runner


def words(trajectory):
    return [turn.text for turn in trajectory.turns]


def reasons(trajectories):
    return [each.stop_reason for each in trajectories]


def test_branches_go_on_by_themselves_from_shared_turns(tokenizer):
    trajectories, engine, _ = run(tokenizer, size=6)
    assert [words(each) for each in trajectories] == [["one", "two", letter, "end"] for letter in "abcdef"]
    assert [each.branch_of for each in trajectories] == [None, "0", "0", None, "3", "3"]
    assert [each.row["row"] for each in trajectories] == list(range(6))
    for each in trajectories:
        assert each.stop_reason is DONE and each.env_rewards == {"n": 4.0}
        assert [turn.replies for turn in each.turns] == [user(f"{number} so far") for number in (1, 2, 3, 4)]
        assert [turn.reward for turn in each.turns] == [len(turn.text) for turn in each.turns]
    # each turn is sampled once, with a seed of its own
    assert [len(engine.seeds[session]) for session in "012345"] == [4, 2, 2] * 2
    seeds = [seed for seeds in engine.seeds.values() for seed in seeds]
    assert len(set(seeds)) == len(seeds)


def test_conversations_at_once_count_branches(tokenizer):
    assert run(tokenizer, size=6, limits={"max_concurrent": 3})[1].most == 3


def test_a_branch_begins_with_the_ids_of_its_trunk(tokenizer):
    trajectories, engine, runner = run(tokenizer)
    shared = trajectories[0].tree.path_of_turn(1)
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
    trajectories, engine, _ = run(tokenizer, script=lambda session, turn: f"end{END}", keep=True)
    assert [words(each) for each in trajectories] == [["end"]] * 3 and len(engine.requests) == 1
    assert [each.session for each in trajectories] == ["0", "1", "2"]
    first, *copies = trajectories
    for each in copies:
        assert each.branch_of == "0" and each.tree == first.tree and each.turns == first.turns
        assert each.turns[0] is not first.turns[0] and each.env_rewards == {"n": 1.0}
    assert Count.open == 1
    asyncio.run(close_environments(trajectories))


def test_branches_keep_the_budget_of_their_trunk(tokenizer):
    def long(session, turn):
        return branching_script(session, turn) if session != "1" else f"{'long ' * 300}{END}"

    trajectories, _, _ = run(tokenizer, script=long, limits={"max_completion_tokens": 120})
    assert reasons(trajectories) == [DONE, StopReason.TOKEN_BUDGET, DONE]
    assert trajectories[1].tree.num_tokens - trajectories[1].turns[0].context_length == 120


@pytest.mark.parametrize("history", [{"history": "strip_thinking"}, {"history": "compact", "compact_every": 2}])
def test_branches_rewrite_their_history_alone(tokenizer, history):
    def thinks(session, turn):
        return f"<think>{session}</think>{branching_script(session, turn)}"

    trajectories, _, _ = run(tokenizer, script=thinks, **history)
    for session, each in zip("012", trajectories, strict=True):
        assert len(each.turns) == 4 and each.tree.num_turns == 4
        assert each.turns[1].text == "<think>0</think>two" and each.turns[2].text.startswith(f"<think>{session}")


def test_a_fork_that_fails_ends_the_whole_trunk(tokenizer):
    forks = []

    def second_fails(env):
        forks.append(env)
        return Count.fork(env) if len(forks) == 1 else 1 / 0

    trajectories, _, _ = run(tokenizer, counting(fork=second_fails))
    assert reasons(trajectories) == [FAILED] * 3
    assert all("ZeroDivisionError: division by zero" in each.error for each in trajectories)


def test_a_fork_must_be_another_environment(tokenizer):
    trajectories, _, _ = run(tokenizer, counting(fork=lambda env: env))
    assert "Kind.fork returned itself: return a copy." in trajectories[0].error
    Count.open = 0


def test_a_branch_that_fails_leaves_the_others_alone(tokenizer):
    trajectories, _, _ = run(tokenizer, counting(lambda turn: turn.text != "b" or 1 / 0))
    assert reasons(trajectories) == [DONE, FAILED, DONE]


def test_a_bug_of_the_engine_in_a_branch_ends_the_run(tokenizer):
    def fails(session, turn):
        return TypeError("a bug") if session == "2" else branching_script(session, turn)

    with pytest.raises(TypeError, match="a bug"):
        run(tokenizer, script=fails)


def test_the_time_of_a_branch_includes_its_trunk(tokenizer):
    trajectories, _, _ = run(tokenizer, counting(lambda turn: time.sleep(0.02)))
    assert all(each.seconds >= 4 * 0.02 for each in trajectories)


def test_tools_that_keep_no_state_can_branch(tokenizer):
    def searches(session, turn):
        call = '<tool>{"name": "lookup", "args": {"query": "Lima"}}</tool>'
        texts = [call, call, f"<answer>{session}</answer>"]
        return (texts if session == "0" else texts[1:])[turn]

    env = MultiTurnToolEnv([lookup], protocol="learnt_tags")
    _check_forkable(env)
    trajectories, _, _ = run(tokenizer, env, searches, at=1)
    assert [(each.answer, len(each.turns[0].tool_calls)) for each in trajectories] == [("0", 1), ("1", 1), ("2", 1)]


def test_a_branch_stays_on_the_server_of_its_trunk():
    pool = _Placement([Server("http://a"), Server("http://b")])
    trunk = pool.place("0", [1, 2])
    assert trunk is not pool.place("1", [9])
    for session in ("2", "3"):
        pool.join(session, "0")
        assert pool.place(session, [1, 2, 3]) is trunk
    pool.join("4", "unknown")
    for session in "01234":
        pool.release(session)
    assert not any((pool._members, pool._server_of_group, pool._group, pool._server))
    assert not any(server.sessions for server in pool.servers)


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
        _check_forkable(env)


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
