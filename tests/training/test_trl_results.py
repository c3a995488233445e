"""Results of tools, held against the loop of TRL's own trainer: what rewards are given, and what the model reads."""

import asyncio
import json
import threading
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from support.models import build_tokenizer
from trl import GRPOTrainer
from trl.chat_template_utils import add_response_schema

from mt_grpo.integrations.trl import TRLEnv
from mt_grpo.rewards.base import FunctionReward
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams
from mt_grpo.rollout.engines import ScriptedEngine
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training.environment import build_env
from mt_grpo.trajectory import ToolCall, Trajectory

CALL = '<tool_call>\n{"name": "ask", "arguments": {}}\n</tool_call>'


@dataclass
class Point:
    x: int
    y: float


class Loud(str):
    def __str__(self):
        return self.upper()


class Rows(list):
    pass


def fail(error: Exception):
    raise error


RESULTS = {
    "text": lambda: "Lima",
    "empty text": lambda: "",
    "text of another class": lambda: Loud("Lima"),
    "bytes": lambda: b"Lima",
    "nothing": lambda: None,
    "a truth value": lambda: True,
    "a number": lambda: 3,
    "a float": lambda: 1e-7,
    "not a number": lambda: float("nan"),
    "a dictionary": lambda: {"city": "Lima", "hits": [1, None]},
    "an error as a dictionary": lambda: {"error": "no route"},
    "a dictionary without a JSON form": lambda: {(1, 2): {3}},
    "a tuple": lambda: ("Lima", 3),
    "text and a dictionary": lambda: ("Lima", {"hits": 3}),
    "a named tuple": lambda: namedtuple("Hit", "name")("Lima"),
    "a set": lambda: {3},
    "a list": lambda: ["Lima", 3, None, 0.5],
    "an empty list": lambda: [],
    "rows of a database": lambda: [("Lima", 3), ("Oslo", None)],
    "dictionaries": lambda: [{"error": "none"}],
    "dictionaries with a type": lambda: [{"type": "bug", "id": 3}],
    "a list without a JSON form": lambda: [{(1, 2): 3}],
    "a list of another class": lambda: Rows(["Lima"]),
    "an object": lambda: Point(1, 2.0),
    "an array": lambda: np.arange(3),
    "an exception": lambda: fail(ValueError("no 'route'")),
    "an exception without words": lambda: fail(KeyError()),
}
"""What a tool does, by kind."""


def tool_of(result, is_async=False):
    """A tool that returns what a function does."""

    def ask():
        """Asks somebody."""
        return result()

    async def ask_later():
        """Asks somebody."""
        return result()

    ask_later.__name__ = "ask"
    return ask_later if is_async else ask


class Loop:
    """TRL's own loop of tools, over one conversation whose model calls once and then says no more."""

    _get_tool_suffix_ids = GRPOTrainer._get_tool_suffix_ids
    max_tool_calling_iterations, max_completion_length = 1, 10_000
    use_vllm = _is_vlm = False
    environment_factories = tools = chat_template = None
    chat_template_kwargs: dict = {}
    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10_000))

    def __init__(self, tokenizer, tool, loop):
        self.processing_class = self._tokenizer = tokenizer
        self.async_loop = loop
        found = {"ask": tool}
        self._sync_tool_dicts, self._async_tool_dicts = ([{}], [found]) if loop else ([found], [{}])

    def _generate_single_turn(self, prompt_ids, images, fields, **options):
        return [[] for _ in prompt_ids], None


@pytest.fixture(scope="module")
def loop():
    """A running event loop, as TRL's trainer has one for asynchronous tools."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def tokenizer():
    """Of Qwen2.5, whose template writes any content as it is."""
    return add_response_schema(build_tokenizer("qwen2_5"))


def in_trl(tokenizer, tool, loop):
    """The content that TRL's reward functions get, and the ids that its model reads."""
    call = {"type": "function", "function": {"name": "ask", "arguments": {}}}
    completions = [[{"role": "assistant", "content": "", "tool_calls": [call]}]]
    prompt, said = [{"role": "user", "content": "Go."}], tokenizer.encode("call")
    given = [prompt], [[0]], [list(said)], completions, None, None, {}
    _, completions, ids, *_ = GRPOTrainer._tool_call_loop(Loop(tokenizer, tool, loop), *given)
    return completions[0][1]["content"], tokenizer.decode(ids[0][len(said) :])


def env_of(tool, **options):
    return build_env(MTGRPOConfig("run", report_to=[], use_cpu=True, **options), tools=[tool])


def game_of(tool):
    return TRLEnv(type("Game", (), {"reset": lambda self, **row: None, "ask": staticmethod(tool)}))


def here(tokenizer, env, call=CALL):
    """The same of ours, and the conversation."""
    engine = ScriptedEngine(tokenizer, [f"{call}<|im_end|>", "Bye."])
    runner = RolloutRunner(env, engine, RolloutLimits())
    [trajectory] = asyncio.run(runner.run([RolloutRequest("Go.", "0")], SamplingParams()))
    (_, before, sampled), (_, context, _) = engine.requests
    given = FunctionReward(lambda **_: [0.0]).arguments([trajectory], [{}])["completions"][0]
    return given[1]["content"], tokenizer.decode(context[len(before) + len(sampled.ids) :]), trajectory


@pytest.mark.parametrize("made", [env_of, game_of], ids=["tools", "environment"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", RESULTS)
def test_results_are_those_of_trl(tokenizer, loop, kind, is_async, made):
    tool = tool_of(RESULTS[kind], is_async)
    content, shown = in_trl(tokenizer, tool, loop if is_async else None)
    ours, ours_shown, trajectory = here(tokenizer, made(tool))
    assert (type(ours), repr(ours), ours_shown) == (type(content), repr(content), shown)
    assert (trajectory.turns[0].tool_calls[0].error is not None) == kind.startswith("an exception")


@pytest.mark.parametrize("kind", RESULTS)
def test_results_come_back_from_records(tokenizer, kind):
    given, _, trajectory = here(tokenizer, env_of(tool_of(RESULTS[kind])))
    written = json.loads(json.dumps(trajectory.to_dict()))
    expected = json.loads(json.dumps(given)) if isinstance(given, list) and "without" not in kind else given
    expected = str(given) if kind == "a list without a JSON form" else expected
    assert Trajectory.from_dict(written).completion_in_trl[1]["content"] == expected
    assert written["messages"][2]["content"] == str(given)  # what the model was shown


def test_parts_are_a_list_for_rewards_and_text_for_the_model(tokenizer):
    parts = [{"type": "text", "text": "Lima"}, {"type": "text", "text": "!"}]
    given, shown, _ = here(tokenizer, game_of(tool_of(lambda: parts)))
    assert given == parts and "Lima!" in shown and "type" not in shown


@pytest.mark.parametrize(
    ("template", "call"),
    [("qwen3", CALL), ("qwen3_5_nothink", "<tool_call>\n<function=ask>\n</function>\n</tool_call>")],
)
def test_a_list_is_shown_where_trl_shows_none_or_ends(template, call):
    tokenizer = add_response_schema(build_tokenizer(template))
    _, shown, trajectory = here(tokenizer, game_of(tool_of(RESULTS["rows of a database"])), call)
    assert "[('Lima', 3), ('Oslo', None)]" in shown and not trajectory.failed


def test_an_unknown_tool_is_an_error_in_the_form_of_trl(tokenizer):
    _, _, trajectory = here(tokenizer, env_of(tool_of(RESULTS["text"])), CALL.replace("ask", "tell"))
    (call,) = trajectory.turns[0].tool_calls
    assert call.result == str({"error": "unknown tool 'tell'; the tools are: ask."})


def test_results_of_recipes_tools_stay_json():
    env = env_of(tool_of(RESULTS["text"]), tools=["calculator"])
    calls = [ToolCall("calculator", {"expression": "1 +"}), ToolCall("ask")]
    asyncio.run(env.execute(calls))
    assert calls[0].result.startswith("Error: ") and calls[1].result == "Lima"
