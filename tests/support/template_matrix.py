"""
What conversations become under each chat template of TRL's: written as its models write, run turn by turn, and held
against the template's own rendering of the whole conversation.

    python tests/support/template_matrix.py     # writes the table of docs/templates.md
"""

from __future__ import annotations

import asyncio
import copy
import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # where it is run as a script

from trl import chat_template_utils as trl

from mt_grpo.envs import MultiTurnToolEnv, Step
from mt_grpo.rollout import ChatRenderer, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.tools import Tool
from mt_grpo.trajectory import StopReason, Trajectory
from support.conversations import template_tokenizer
from support.models import TEMPLATES

PAGE = Path(__file__).parents[2] / "docs" / "templates.md"
FAMILIES = sorted(path.stem for path in TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training"))
POLICIES = ("keep", "strip_thinking", "compact", "template")
ASKED = "What is the weather?"


def look(city: str, days: int = 1) -> str:
    """
    Looks.

    Args:
        city: Where.
        days: How long.
    """
    return f'"Rain" in {city} & around for {days} days.'


def find(query: str) -> str:
    """
    Finds.

    Args:
        query: What.
    """
    return f"About {query}."


TOOLS = [Tool.from_function(look), Tool.from_function(find)]

# How models write their turns


class Said(NamedTuple):
    """A turn, before any model writes it."""

    words: str = ""
    thought: str | None = None
    calls: tuple[tuple[str, dict], ...] = ()


def as_json(value) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_text(value) -> str:
    return value if isinstance(value, str) else as_json(value)


def hermes(call) -> str:
    return f"<tool_call>\n{as_json({'name': call[0], 'arguments': call[1]})}\n</tool_call>"


def xml(call) -> str:
    arguments = "".join(f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in call[1].items())
    return f"<tool_call>\n<function={call[0]}>\n{arguments}</function>\n</tool_call>"


def glm(call) -> str:
    arguments = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n" for key, value in call[1].items()
    )
    return f"\n<tool_call>{call[0]}\n{arguments}</tool_call>"


def gemma(call) -> str:
    arguments = (
        f'{key}:<|"|>{value}<|"|>' if isinstance(value, str) else f"{key}:{value}"
        for key, value in sorted(call[1].items())
    )
    return f"<|tool_call>call:{call[0]}{{{','.join(arguments)}}}<tool_call|>"


def atem(call) -> str:
    arguments = "".join(
        f'<atem:parameter name="{key}">{as_text(value)}</atem:parameter>\n' for key, value in call[1].items()
    )
    block = f'<atem:function_calls>\n<atem:invoke name="{call[0]}">\n{arguments}</atem:invoke>\n</atem:function_calls>'
    return f" to={call[0]}<|message|>{block}"


def pythonic(calls) -> str:
    written = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
    return f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>" if calls else ""


def deepseek(calls) -> str:
    written = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{as_json(given)}\n```<｜tool▁call▁end｜>"
        for name, given in calls
    )
    block = "\n".join(written)
    return f"<｜tool▁calls▁begin｜>{block}<｜tool▁calls▁end｜>" if calls else ""


ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "cohere2": "<|END_RESPONSE|>",
    "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "idefics3": "<end_of_utterance>",
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "llava_next": "</s>",
    "phi3": "<|end|>",
    "phi3_5": "<|end|>",
    "smolvlm": "<end_of_utterance>",
}
SPACED = ("idefics3", "llava_next", "smolvlm")
"""Families whose models write a space before their words."""
THOUGHTLESS = (*ENDS, "lfm2", "qwen2_5_vl", "qwen3_5_nothink")
ONE_CALL = ("gptoss", "llama3_1", "llama3_2")
"""Families whose models make one call in a turn."""
WORDS_ONLY = ("cohere", "cohere2", "gemma", "gemma3", "llava_next", "phi3", "phi3_5")
"""Families whose templates have no role for results, or leave them out."""
DROPS_WORDS = ("gptoss", "llama3_1", "llama3_2", "muse_glimmer")
"""Families whose templates drop what is said beside calls, or take it for thinking."""
HIDDEN = ("deepseek_r1_distill", "idefics3", "lfm2", "llama3", "qwen2_5_vl", "smolvlm")
"""Families whose templates show results, but no calls: these stay the text that was sampled."""


def written(family: str, header: str, said: Said) -> str:
    """A turn as a model of the family writes it behind a header."""
    words, thought, calls = said
    opened, ends_line = header.endswith("<think>\n"), "\n" if words and calls else ""
    if family.startswith("deepseek"):
        thinking = f"{thought or ''}\n</think>\n\n" if opened else ""
        return f"{thinking}{words}{deepseek(calls)}<｜end▁of▁sentence｜>"
    if family.startswith("nemotron"):
        thinking = f"{thought or ''}\n</think>\n" if opened else ""
        return f"{thinking}{words}{ends_line}{''.join(xml(call) + chr(10) for call in calls)}<|im_end|>"
    if family.startswith(("qwen3_5", "qwen3_6", "qwen3_8")):
        thinking = f"{thought or ''}\n</think>\n\n" if opened else ""
        return f"{thinking}{words}{ends_line * 2}{chr(10).join(map(xml, calls))}<|im_end|>"
    if family.startswith("qwen"):
        thinking = f"<think>\n{thought}\n</think>\n\n" if thought else ""
        return f"{thinking}{words}{ends_line}{chr(10).join(map(hermes, calls))}<|im_end|>"
    if family == "glm4moe":
        words = f"\n{words}" if words else ""
        end = "<|observation|>" if calls else "<|user|>"
        return f"\n<think>{thought or ''}</think>{words}{''.join(map(glm, calls))}{end}"
    if family == "gptoss":
        thought = thought or (calls and words)
        thinking = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
        if calls:
            ((name, given),) = calls
            call = f" to=functions.{name}<|channel|>commentary json<|message|>{as_json(given)}<|call|>"
            return thinking + call
        return f"{thinking}<|channel|>final<|message|>{words}<|return|>"
    if family.startswith("lfm"):
        thinking = f"<think>{thought}</think>" if thought else ""
        return f"{thinking}{words}{pythonic(calls)}<|im_end|>"
    if family.startswith(("gemma4", "diffusion")):
        thinking = f"<|channel>thought\n{thought}\n<channel|>" if thought else ""
        if family == "gemma4_v2":
            return f"{thinking}{''.join(map(gemma, calls))}{words}<turn|>"
        return f"{thinking}{words}{''.join(map(gemma, calls))}{'<|tool_response>' if calls else '<turn|>'}"
    if family == "muse_glimmer":
        parts = [f" to=self<|message|>{thought}"] if thought else []
        parts += map(atem, calls) if calls else [f" to=user<|message|>{words}"]
        return "<|eom|><|start|>assistant".join(parts) + "<|eot|>"
    if family.startswith("llama3_"):
        return (
            words
            + "".join(f'{{"name": "{name}", "parameters": {as_json(given)}}}' for name, given in calls)
            + (ENDS[family])
        )
    space = " " if family in SPACED else ""
    return f"{space}{words}{ends_line}{chr(10).join(map(hermes, calls))}{ENDS[family]}"


# How their calls are read, where TRL does not say


def anchored(anchor: str) -> dict:
    return {**trl.qwen3_template, "start_anchor": anchor}


DEEPSEEK = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<｜Assistant｜>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n",
            "close_pattern": r"\n```<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>)?",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<｜tool▁calls▁begin｜>|<｜end▁of▁sentence｜>", "content": "text"},
    },
}
MUSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": {
        "reasoning_content": {
            "open": " to=self<|message|>",
            "close_pattern": r"<\|eom\|>(?:<\|start\|>assistant)?",
            "content": "text",
        },
        "tool_calls": {
            "open_pattern": r" to=(?P<name>(?!self|user)[^<]+)<\|message\|><atem:function_calls>\n",
            "close_pattern": r"</atem:function_calls>(?:<\|eom\|><\|start\|>assistant)?",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r'<atem:parameter name="(?P<key>[^"]+)">(?P<value>.*?)</atem:parameter>',
                "value_parser": {"name": "text"},
            },
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"open": " to=user<|message|>", "close_pattern": r"<\|eot\|>\s*", "content": "text"},
    },
}
READ_BY = {
    "deepseek_r1_distill": DEEPSEEK,
    "deepseekv3": DEEPSEEK,
    "diffusion_gemma": trl.gemma4_template,
    "idefics3": anchored("Assistant:"),
    "lfm2": trl.lfm2_2_5_template,
    "llama3": anchored("<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "muse_glimmer": MUSE,
    "qwen2_5_vl": trl.qwen3_template,
    "smolvlm": anchored("Assistant:"),
}


@lru_cache
def tokenizer_of(family: str):
    """One that knows how to read the calls of the family."""
    tokenizer = copy.deepcopy(template_tokenizer(family))
    if family in READ_BY:
        tokenizer.response_template = READ_BY[family]
    elif family not in WORDS_ONLY:
        trl.add_response_schema(tokenizer)
    return tokenizer


# Conversations


def turns_of(scenario: str, family: str) -> list[Said]:
    """Three exchanges and an answer."""
    turns = []
    for turn in range(4):
        thought = f"Thought {turn}." if "thinking" in scenario and family not in THOUGHTLESS else None
        if "replies" in scenario or turn == 3:
            turns.append(Said(f"Answer {turn}.", thought))
            continue
        calls: list[tuple[str, dict]] = [("look", {"city": f"Lima {turn}", "days": turn + 2})]
        if "two" in scenario and family not in ONE_CALL:
            calls.append(("find", {"query": f"Peru, {turn}"}))
        turns.append(Said("Let me see." if "words" in scenario else "", thought, tuple(calls)))
    return turns


FRAMED = ("diffusion_gemma", "gemma4", "gptoss", "muse_glimmer", "nemotron", "qwen3_5", "qwen3_6", "qwen3_8")
"""Families whose templates would misread the text of a turn as its words."""
PLAIN = {"user": ("replies",), "tools": ("one call", "two calls")}
BESIDE = {"user": ("replies, thinking",), "tools": ("two calls, thinking", "words, two calls")}


class Exchange(MultiTurnToolEnv):
    """Runs the calls of a turn, or replies to it as a user."""

    def __init__(self, scenario: str) -> None:
        words = "replies" in scenario
        super().__init__([] if words else TOOLS, "", 9, "plain" if words else "native")
        self.words = words

    async def step(self, turn):
        if self.words:
            last = turn.index == 3
            return Step(done=StopReason.ANSWERED) if last else [{"role": "user", "content": f"Reply {turn.index}?"}]
        return await super().step(turn)


class Seen(NamedTuple):
    """What the model saw in one conversation."""

    contexts: list[str]
    """Before each turn."""
    rendered: list[str]
    """The same as the template renders the messages."""
    sequences: int
    sampled: int
    """Tokens that were sampled."""
    trained: int
    """Tokens of the tree's actions."""
    calls: list[list[tuple[str, dict]]]
    results: list[list[str]]
    """Contents of the replies to each turn."""


def sampled(family: str, scenario: str, policy: str) -> tuple[Trajectory, ScriptedEngine]:
    """One conversation, sampled by script, and the engine that was asked for it."""
    tokenizer, env, turns = tokenizer_of(family), Exchange(scenario), turns_of(scenario, family)
    renderer = renderer_of(family, env.words)
    header = ""

    class Model(ScriptedEngine):
        async def generate(self, context, sampling, session):
            nonlocal header
            header = renderer.decode(context[-40:])
            return await super().generate(context, sampling, session)

    engine = Model(tokenizer, lambda session, turn: written(family, header, turns[turn]))
    runner = RolloutRunner(env, engine, history=policy, compact_every=2 if policy == "compact" else None)
    (trajectory,) = asyncio.run(runner.run([RolloutRequest(ASKED, "0")], SamplingParams()))
    assert trajectory.error is None, trajectory.error
    return trajectory, engine


def run(family: str, scenario: str, policy: str) -> Seen:
    """What the model saw in one conversation, which the template can hold."""
    tokenizer, env, turns = tokenizer_of(family), Exchange(scenario), turns_of(scenario, family)
    renderer = renderer_of(family, env.words)
    trajectory, engine = sampled(family, scenario, policy)
    samples = [sample.ids for _, _, sample in engine.requests]
    assert len(samples) == 4, [turn.message for turn in trajectory.turns]
    for turn, ids in zip(trajectory.turns, samples, strict=True):
        # a turn ends where sampling would have ended, and nowhere before
        assert ids[-1] in renderer.end_ids and not set(ids[:-1]) & set(renderer.end_ids), renderer.decode(ids)
        assert turn.error is None, turn.error
    messages = messages_of(family, turns, trajectory, samples)
    rendered = []
    for end in range(4):
        before = [message for message in messages if message["turn"] < end]
        rendered.append(
            tokenizer.apply_chat_template(
                [{key: value for key, value in message.items() if key != "turn"} for message in before],
                tools=env.tool_schemas,
                add_generation_prompt=True,
                tokenize=False,
            )
        )
    return Seen(
        [tokenizer.decode(context) for _, context, _ in engine.requests],
        rendered,
        trajectory.tree.num_sequences,
        sum(map(len, samples)),
        sum(len(node.tokens) for node in trajectory.tree.nodes if node.turn >= 0),
        [[(call.name, call.arguments) for call in turn.tool_calls] for turn in trajectory.turns],
        [[reply["content"] for reply in turn.replies] for turn in trajectory.turns],
    )


@lru_cache
def renderer_of(family: str, words: bool) -> ChatRenderer:
    return ChatRenderer(tokenizer_of(family), Exchange("replies" if words else "calls").tool_schemas)


def messages_of(family: str, turns: list[Said], trajectory, samples) -> list[dict]:
    """The messages of a conversation as a program that knows the family would write them."""
    messages: list[dict] = [{"role": "user", "content": ASKED, "turn": -1}]
    for turn, said in enumerate(turns):
        message = {"role": "assistant", "content": said.words}
        if said.thought:
            message["reasoning_content"] = said.thought
        if not said.calls and not family.startswith(FRAMED) or said.calls and family in HIDDEN:
            text = tokenizer_of(family).decode(samples[turn][:-1])
            message = {"role": "assistant", "content": text.removeprefix(" ") if family in SPACED else text}
        elif said.calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": f"call_{number}",
                    "function": {"name": name, "arguments": as_json(given) if family == "deepseekv3" else given},
                }
                for number, (name, given) in enumerate(said.calls)
            ]
        messages += [{**each, "turn": turn} for each in (message, *trajectory.turns[turn].replies)]
    if family in SPACED:
        return [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    return messages


# Verdicts


def verdict(family: str, scenario: str, policy: str) -> str:
    """
    - `exact`: the model saw what the template renders, and each context goes on from the one before;
    - `fork`: it saw that, in contexts that leave the ones before;
    - `kept`: it saw what was sampled, which the template renders in another way.

    Raises `AssertionError` where it is none of these, or where something was lost.
    """
    turns, seen = turns_of(scenario, family), run(family, scenario, policy)
    assert seen.trained == seen.sampled
    assert seen.calls == [list(said.calls) for said in turns]
    for turn, context in enumerate(seen.contexts):
        told = context[context.index(ASKED) :]
        for earlier in range(turn):
            said = turns[earlier]
            parts = [as_text(value) for _, given in said.calls for value in given.values()] + seen.results[earlier]
            if not (said.calls and family in DROPS_WORDS):
                parts.append(said.words)
            assert all(part in told or as_json(part)[1:-1] in told for part in parts), (parts, told)
            if policy == "strip_thinking" and said.thought and family != "gemma4_v2":  # it shows thinking nowhere
                assert said.thought not in told, told
    if all(context == whole for context, whole in zip(seen.contexts, seen.rendered, strict=True)):
        return "exact" if seen.sequences == 1 else "fork"
    if policy == "template":
        for context, whole in zip(seen.contexts, seen.rendered, strict=True):
            # Gemma 4 begins no turn behind words that stand behind results: the header is ours
            assert context in (whole, whole + "<|turn>model\n"), f"{context}\n---\n{whole}"
        return "fork"
    if policy == "keep":
        assert seen.sequences == 1 or family == "gptoss"
        return "kept"
    return "kept" if seen.sequences == 1 else "fork"


def cell(family: str, replies: str, policy: str) -> str:
    """The verdict without thinking, and the one with thinking or words beside calls where it is another."""
    order = ("exact", "fork", "kept")
    if replies == "tools" and family in WORDS_ONLY:
        return "–"
    plain, beside = (
        max((verdict(family, scenario, policy) for scenario in scenarios[replies]), key=order.index)
        for scenarios in (PLAIN, BESIDE)
    )
    return plain if plain == beside else f"{plain} / {beside}"


def row(family: str) -> str:
    """The line of a template in the table."""
    by_kind = {WORDS_ONLY: "–", ONE_CALL: "one", HIDDEN: "as text"}
    calls = next((words for families, words in by_kind.items() if family in families), "any number")
    cells = []
    for replies in PLAIN:
        verdicts = {policy: cell(family, replies, policy) for policy in POLICIES}
        assert verdicts.pop("compact") == verdicts["strip_thinking"], family  # they share a column
        cells += verdicts.values()
    return f"| `{family}` | {calls} | {' | '.join(cells)} |"


def table() -> str:
    """The table of `docs/templates.md`: templates of the same verdicts share a line."""
    policies = [policy for policy in POLICIES if policy != "compact"]
    head = ["template", "calls", *(f"{policy}, {replies}" for replies in PLAIN for policy in policies)]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
    families: dict[str, list[str]] = {}
    for family in FAMILIES:
        name, verdicts = row(family).removeprefix("| ").split(" | ", 1)
        families.setdefault(verdicts, []).append(name)
    lines += [f"| {', '.join(names)} | {verdicts}" for verdicts, names in families.items()]
    return "\n".join(lines)


def filled(page: str) -> str:
    """A page with the table between its marks."""
    before, begin, rest = page.partition("<!-- templates -->\n")
    _, end, after = rest.partition("\n<!-- /templates -->")
    return before + begin + table() + end + after


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
