"""
Which share of the sampled tokens is trained, where a chat template leaves the thinking of the past out: ours, and what
TRL's asynchronous trainer makes of the same turns.

    python benchmarks/tokens_trained.py [--quick]

Every conversation is sampled once, by script, in the contexts that the template renders (`history: template`). Ours
is what the token tree trains. TRL's is `_chain_to_sequences` of `trl.experimental.async_grpo`, run on the same
contexts and samples with the trainer's default `fork_threshold_tokens`. Where an answer was rewritten by fewer tokens
than that, TRL takes it for another spelling of the same text, and trains none of it. Prints a table and writes
`benchmarks/results/tokens_trained.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path
from typing import Any, NamedTuple

import trl
from common import build_tokenizer, write
from rich.console import Console
from rich.table import Table
from tokenizers import AddedToken
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.async_rollout_worker import TurnRecord, _chain_to_sequences

from mt_grpo.envs import MultiTurnToolEnv, Step
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.trajectory import StopReason

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
FORK_THRESHOLD = AsyncGRPOConfig.__dataclass_fields__["fork_threshold_tokens"].default
SPECIAL = re.compile(r"<[|｜][^<>\s]+?[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>")


class Writing(NamedTuple):
    """How a model writes a turn: before its thought, between thought and words, and at the end."""

    opening: str
    closing: str
    end: str


WRITINGS = {
    "qwen3": Writing("<think>\n", "\n</think>\n\n", "<|im_end|>"),
    "qwen3_5_think": Writing("", "\n</think>\n\n", "<|im_end|>"),
    "nemotron_3_nano": Writing("", "\n</think>\n", "<|im_end|>"),
    "glm4moe": Writing("\n<think>", "</think>\n", "<|user|>"),
    "gptoss": Writing(
        "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>", "<|return|>"
    ),
    "gemma4": Writing("<|channel>thought\n", "\n<channel|>", "<turn|>"),
    "deepseekv3": Writing("", "\n</think>\n\n", "<｜end▁of▁sentence｜>"),
    "qwen3_8": Writing("", "\n</think>\n\n", "<|im_end|>"),  # keeps the thinking of the past
}
LENGTHS = [(300, 100), (900, 100), (1500, 100)]
"""Tokens of thinking, and of the answer."""


class Talk(MultiTurnToolEnv):
    """Asks a further question after each answer."""

    def __init__(self, turns: int) -> None:
        super().__init__(protocol="plain")
        self.number = turns

    async def step(self, turn):
        return Step("And its currency?", done=StopReason.ANSWERED if turn.index + 1 == self.number else False)


def template_tokenizer(template: str) -> Any:
    """The embedded model's tokenizer with a template of TRL's, and the special tokens that this writes."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    found = sorted(set(SPECIAL.findall(tokenizer.chat_template)))
    tokenizer.add_tokens([AddedToken(token, special=True) for token in found])
    tokenizer.bos_token = tokenizer.bos_token or tokenizer.eos_token
    return tokenizer


def of_length(tokenizer: Any, before: str, after: str, size: int) -> str:
    """A text between two others, such that all three have `size` tokens together."""
    text = ""
    while (length := len(tokenizer.encode(before + text + after, add_special_tokens=False))) < size:
        text += " the" * max(1, (size - length) // 2)
    assert length == size, f"{length} tokens in place of {size}"
    return before + text + after


def measure(template: str, thinking: int, words: int, turns: int) -> dict[str, Any]:
    """One conversation: the shares of its sampled tokens that are trained."""
    tokenizer, writing = template_tokenizer(template), WRITINGS[template]
    thought = of_length(tokenizer, writing.opening + "So", "." + writing.closing, thinking)
    answer = of_length(tokenizer, "It is", "." + writing.end, words)
    ids = tokenizer.encode(thought, add_special_tokens=False) + tokenizer.encode(answer, add_special_tokens=False)
    engine = ScriptedEngine(tokenizer, lambda session, turn: ids, context_length=1 << 20)
    runner = RolloutRunner(Talk(turns), engine, history="template")
    (trajectory,) = asyncio.run(runner.run([RolloutRequest("What is the capital?", "0")], SamplingParams()))
    assert trajectory.error is None, trajectory.error
    records = [TurnRecord(context, sample.ids, sample.logprobs) for _, context, sample in engine.requests]
    assert len(records) == turns
    sampled = sum(len(record.output_ids) for record in records)
    theirs, tally = _chain_to_sequences(records, "0", FORK_THRESHOLD)
    ours = sum(runner.completion(trajectory).mask)
    left = sum(sum(sequence.completion_mask) for sequence in theirs)
    return {
        "conversation": f"{template}, {turns} turns of {thinking} + {words} tokens",
        "sampled": sampled,
        "trained": {"ours": ours, "TRL": left},
        "share": {"ours": ours / sampled, "TRL": left / sampled},
        "ratio": {"median": ours / left, "minimum": ours / left},
        "sequences": {"ours": trajectory.tree.num_sequences, "TRL": len(theirs)},
        "masked transitions": tally["realign"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="two templates and two turns, to see that it runs")
    quick = parser.parse_args().quick
    templates = ["qwen3", "gptoss"] if quick else list(WRITINGS)
    cases = [(300, 100, 2)] if quick else [(*length, turns) for length in LENGTHS for turns in (4, 8, 16)]
    rows = [measure(template, *case) for template in templates for case in cases]
    table = Table(title=f"sampled tokens that are trained (TRL's fork_threshold_tokens: {FORK_THRESHOLD})")
    for column in ("conversation", "sampled", "ours", "TRL"):
        table.add_column(column, justify="left" if column == "conversation" else "right")
    for row in rows:
        share = row["share"]
        table.add_row(row["conversation"], str(row["sampled"]), f"{share['ours']:.1%}", f"{share['TRL']:.1%}")
    Console().print(table)
    if not quick:
        write("tokens_trained", {"fork_threshold_tokens": FORK_THRESHOLD}, rows)


if __name__ == "__main__":
    main()
