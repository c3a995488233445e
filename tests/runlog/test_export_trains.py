"""What is exported for training renders as what the model saw, under chat templates of TRL's with tools."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from datasets import load_dataset
from support.runs import REWARDS
from support.template_matrix import look, sampled, tokenizer_of

from mt_grpo.cli import main
from mt_grpo.envs import MultiTurnToolEnv, Outcome
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.runlog import Batch, RunWriter, open_run

FAMILIES = ("qwen3", "qwen3_5_think", "qwen3_8", "glm4moe", "gemma4", "gptoss", "lfm2_2_5", "llama3_1", "muse_glimmer")
CALLS_AS_TEXT = ("llama3", "lfm2", "qwen2_5_vl")


def written(folder: Path, trajectory, tokenizer, **about) -> Path:
    """A run of one conversation."""
    trajectory.rewards = {"outcome": {"exact_match": 1.0}, "turn": {"tool_execution": [0.2] * len(trajectory.turns)}}
    writer, batch = RunWriter(folder), Batch("train", 0, 0, 1, [0], [trajectory], REWARDS)
    saved = writer.save_tokenizer(tokenizer.save_pretrained)
    writer.append([*saved, {"kind": "run", "version": 1, "rewards": REWARDS, **about}, *writer.write(batch)])
    writer.append(writer.write_credit(batch, [[0.5] * len(trajectory.turns)]))
    return folder


def exported(folder: Path, form: str, *options: str) -> list[dict]:
    path = folder / f"{form}.jsonl"
    assert main(["export", str(folder), "--to", form, "--output", str(path), "--overwrite", *options]) == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


def rendered(line: dict, tokenizer, **variables) -> str:
    documented = (Path(__file__).parents[2] / "docs" / "records.md").read_text().split("def rendered")[1]
    namespace: dict = {}
    exec("def rendered" + documented.split("```")[0], namespace)
    return namespace["rendered"]({**line, "chat_template_kwargs": variables}, tokenizer)


def check(line: dict, context: str, tokenizer) -> None:
    """What the model saw before its last message is what the messages before it render as, letter for letter."""
    *before, last = line["messages"]
    assert rendered({**line, "messages": before}, tokenizer, add_generation_prompt=True) == context
    assert last["content"] in rendered(line, tokenizer)


@pytest.mark.parametrize("scenario", ["one call", "two calls, thinking"])
@pytest.mark.parametrize("family", FAMILIES)
def test_messages_render_as_what_was_seen(family, scenario, tmp_path):
    trajectory, engine = sampled(family, scenario, "keep")
    (line,) = exported(written(tmp_path, trajectory, tokenizer_of(family)), "messages")
    calls = [call for message in line["messages"] for call in message.get("tool_calls", ())]
    assert all(isinstance(call["function"]["arguments"], dict) for call in calls) and len(calls) >= 3
    assert [tool["function"]["name"] for tool in line["tools"]] == ["look", "find"]
    if scenario == "two calls, thinking" and family in ("gemma4", "llama3_1"):
        return  # the page on templates says `kept`: they write the past in another way
    check(line, tokenizer_of(family).decode(engine.requests[-1][1]), tokenizer_of(family))


@pytest.mark.parametrize("family", CALLS_AS_TEXT)
def test_calls_that_a_template_hides_stay_text(family, tmp_path):
    trajectory, engine = sampled(family, "two calls", "keep")
    (line,) = exported(written(tmp_path, trajectory, tokenizer_of(family)), "messages")
    check(line, tokenizer_of(family).decode(engine.requests[-1][1]), tokenizer_of(family))


def test_a_data_set_has_objects_that_render_the_same(tmp_path):
    trajectory, _ = sampled("qwen3", "two calls", "keep")
    folder = written(tmp_path / "run", trajectory, tokenizer_of("qwen3"))
    (line,) = exported(folder, "messages")
    assert main(["export", str(folder), "--to", "dataset", "--output", str(tmp_path / "set")]) == 0
    (example,) = load_dataset(str(tmp_path / "set"), cache_dir=str(tmp_path / "cache"))["train"]
    assert example["prompt"] + example["completion"] == line["messages"] and example["tools"] == line["tools"]
    assert [message["role"] for message in example["prompt"]] == ["user"]
    assert (example["session"], example["group"], example["weights"]["tool_execution"]) == (
        "train-000000-000000-000000",
        "train-0-0-0",
        0.5,
    )


def test_sharegpt_has_calls_and_results_in_turns(tmp_path):
    trajectory, _ = sampled("qwen3", "two calls, thinking", "keep")
    (line,) = exported(written(tmp_path, trajectory, tokenizer_of("qwen3")), "sharegpt")
    who = [entry["from"] for entry in line["conversations"]]
    assert who == ["human", *["function_call", "observation"] * 3, "gpt"]
    assert json.loads(line["conversations"][1]["value"].split("</think>")[-1])[1]["name"] == "find"
    assert [tool["name"] for tool in json.loads(line["tools"])] == ["look", "find"]


class Agent:
    """Asks, asks a sub-agent with a tool of its own in between, goes on, and begins anew with a summary."""

    async def run(self, policy, row) -> Outcome:
        tools = MultiTurnToolEnv([look], "", 9, "native").tool_schemas
        picture = {"role": "user", "name": "ann", "content": "Plan."}
        messages = [{"role": "system", "content": "Main."}, picture]
        messages += [(await policy.reply(messages)).message, {"role": "user", "content": "Go on."}]
        aside = [{"role": "user", "content": "Look."}]
        await policy.reply(aside, tools)
        messages.append((await policy.reply(messages)).message)
        await policy.reply([{"role": "system", "content": "Main."}, {"role": "user", "content": "Summary."}])
        return Outcome({}, None)

    async def close(self) -> None:
        pass


@pytest.fixture
def agent_run(tmp_path):
    tokenizer = tokenizer_of("qwen2_5")
    engine = ScriptedEngine(tokenizer, lambda session, turn: f"Said {turn}.<|im_end|>")
    runner = RolloutRunner(Agent, engine)
    (trajectory,) = asyncio.run(runner.run([RolloutRequest("Plan.", "0")], SamplingParams()))
    assert trajectory.error is None, trajectory.error
    contexts = [tokenizer.decode(context) for _, context, _ in engine.requests]
    return written(tmp_path, trajectory, tokenizer), contexts, tokenizer


def test_each_way_through_an_agent_renders_as_what_was_seen(agent_run):
    folder, contexts, tokenizer = agent_run
    lines = exported(folder, "messages")
    assert [(line["sequence"], line["sequences"]) for line in lines] == [(0, 3), (1, 3), (2, 3)]
    assert [line["advantages"] for line in lines] == [[0.5], [0.5, 0.5], [0.5]]
    for line, seen in zip(lines, (contexts[1], contexts[2], contexts[3]), strict=True):
        check(line, seen, tokenizer)
    assert "tools" in lines[0] and "tools" not in lines[1]
    assert lines[1]["messages"][1]["name"] == "ann"


def test_a_trace_names_the_turn_that_a_fork_goes_on_from(agent_run):
    folder, _, _ = agent_run
    (trace,) = exported(folder, "openinference")
    (spans,) = (scope["spans"] for scope in trace["resourceSpans"][0]["scopeSpans"])
    attributes = [{each["key"]: each["value"] for each in span["attributes"]} for span in spans[1:]]
    parents = [each.get("graph.node.parent_id", {}).get("stringValue") for each in attributes]
    assert parents == [None, None, "turn 1", None]
    given = [sum(key.endswith("message.role") and "input" in key for key in each) for each in attributes]
    assert given == [2, 1, 1, 2]


def test_a_trace_grows_with_its_turns(tmp_path):
    trajectory, _ = sampled("qwen3", "two calls", "keep")
    written(tmp_path, trajectory, tokenizer_of("qwen3"))
    (trace,) = exported(tmp_path, "openinference")
    text = json.dumps(trace)
    asked = open_run(tmp_path).trajectory("train-000000-000000-000000")["prompt"][0]["content"]
    assert (
        text.count(json.dumps({"key": "llm.input_messages.0.message.content", "value": {"stringValue": asked}})) == 1
    )
    for turn in trajectory.turns[:-1]:
        for reply in turn.replies:
            assert text.count(json.dumps({"stringValue": reply["content"]})) == 2  # told to the model, and the call's


def test_a_filter_chooses_as_on_the_page(tmp_path):
    trajectory, _ = sampled("qwen3", "one call", "keep")
    folder = written(tmp_path, trajectory, tokenizer_of("qwen3"), chat_template_kwargs={"enable_thinking": False})
    (line,) = exported(folder, "messages", "--filter", "mode=train right=1 tool_execution>0.5")
    assert line["chat_template_kwargs"] == {"enable_thinking": False}
    assert main(["export", str(folder), "--to", "messages", "--filter", "right=0"]) == 1
