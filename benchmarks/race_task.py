"""
What both trainers of `race.py` have in common: the embedded model with native calls, its template, a search of 50 ms,
rewards, and how the agent is measured on held-out questions.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from mt_grpo.concurrency import run
from mt_grpo.data import embedded, load_rows
from mt_grpo.data.embedded import tool
from mt_grpo.data.embedded.corpus import SYSTEM_PROMPT
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rewards import RewardFunc, load_rewards
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams, derive_seed
from mt_grpo.rollout.engines.transformers import TransformersEngine
from mt_grpo.trajectory import Message, ToolCall, Trajectory, Turn

sys.path.append(str(Path(__file__).parent.parent / "scripts"))

from warm_start_traces import make_trace  # noqa: E402

LATENCY = 0.05
"""Seconds of a search."""
MAX_CALLS = 4
MAX_TURN_TOKENS = 64
MAX_TOKENS = 256
EXACT = "exact_match_reward_func"
TURN_REWARDS = ["tool_execution_reward_func", "exist_answer_in_search_results"]
OUTCOME_REWARDS = [EXACT, "exist_answer_reward_func"]

TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}"
    "{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson + '}\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""
Qwen3's form of calls and results, without its list of tools, which is 300 tokens of each prompt: the model was taught
the one tool. Earlier messages are never written otherwise later, so that TRL takes the template as it is.
"""

RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""How transformers reads such a turn; TRL's own for Qwen3, without its thinking."""

CALL = re.compile(r"<tool>(.*)</tool>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*)</answer>", re.DOTALL)


async def search(query: str):  # no `-> str`: TRL would show it to the model
    """
    Search the corpus.

    Args:
        query: What to look for.
    """
    await asyncio.sleep(LATENCY)
    return tool.search(query)


def environment(searches: Callable[..., Any] = search) -> MultiTurnToolEnv:
    """The environment of our trainer, and of the measurement."""
    return MultiTurnToolEnv([searches], system_prompt=SYSTEM_PROMPT, max_steps=MAX_CALLS, protocol="native")


def questions(split: str) -> Dataset:
    """The embedded questions, each with the system prompt before it, as TRL has to be given it."""
    system = {"role": "system", "content": SYSTEM_PROMPT}
    return load_rows("embedded", split).map(lambda row: {"prompt": [system, *row["prompt"]]})


# The model


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with the template of the race."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE_TEMPLATE
    return tokenizer


def model_of(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def native(trace: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """A conversation of `warm_start_traces` whose calls and answers are between tags, as the template writes it."""
    pieces, unreadable = [trace[0]], False
    for text, learn in trace[1:]:
        if not learn:
            result = text.partition("<result>")[2].partition("</result>")[0]
            inside = result if unreadable else f"<tool_response>\n{result}\n</tool_response>"
            pieces.append((f"\n<|im_start|>user\n{inside}<|im_end|>\n<|im_start|>assistant\n", False))
        elif call := CALL.search(text):
            body = call[1].replace('"args"', '"arguments"')
            unreadable = not _is_json(body)
            pieces.append((f"<tool_call>\n{body}\n</tool_call><|im_end|>", True))
        elif answer := ANSWER.search(text):
            pieces.append((f"{answer[1]}<|im_end|>", True))
        else:  # a habit: words beside the answer
            pieces.append((f"done {text.rpartition(chr(10))[2]}", True))
    return pieces


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def teach(folder: Path, steps: int = 300, size: int = 32) -> None:
    """
    Teaches the embedded model to write its calls as the template does, first well, then with its bad habits; two
    minutes of one core. As in `warm_start.py` names are drawn at random, so that it learns no facts.
    """
    source = Path(embedded.__file__).parent / "model"
    tokenizer, model = tokenizer_of(source), model_of(source)
    torch.manual_seed(0)
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1 - step / steps))
    for step in range(steps):
        rows, masks = [], []
        for _ in range(size):
            pieces = native(make_trace(rng, (1, 2), habits=step >= steps // 2))
            encoded = [(tokenizer.encode(text), learn) for text, learn in pieces]
            rows.append([token for ids, _ in encoded for token in ids])
            masks.append([learn for ids, learn in encoded for _ in ids])
        length = max(map(len, rows))
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row in rows])
        wanted = torch.tensor([mask + [False] * (length - len(mask)) for mask in masks])[:, 1:]
        hidden = model.model(ids[:, :-1]).last_hidden_state[wanted]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden), ids[:, 1:][wanted])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# Rewards


def in_trl(reward: RewardFunc) -> Callable[..., list[float | None]]:
    """A reward as a function that TRL calls: the same value for a whole conversation, turn rewards summed."""

    def function(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        rows = [
            {name: values[i] for name, values in columns.items() if isinstance(values, list)}
            for i in range(len(prompts))
        ]
        return [
            _total(reward, trajectory_of(prompt, completion), row)
            for prompt, completion, row in zip(prompts, completions, rows, strict=True)
        ]

    function.__name__ = reward.name
    return function


def _total(reward: RewardFunc, trajectory: Trajectory, row: dict[str, Any]) -> float | None:
    if reward.name not in TURN_REWARDS:
        return reward.score(trajectory, **row)
    values = [reward.score(turn, trajectory, **row) for turn in trajectory.turns]
    return sum(value for value in values if value is not None) if any(value is not None for value in values) else None


def trajectory_of(prompt: list[Message], completion: list[Message]) -> Trajectory:
    """A conversation of TRL's tool loop as our rewards read it."""
    trajectory = Trajectory(prompt)
    for message in completion:
        if message["role"] == "assistant":
            calls = [
                ToolCall(call["function"]["name"], call["function"]["arguments"])
                for call in message.get("tool_calls") or []
            ]
            broken = not calls and "<tool_call>" in (message.get("content") or "")
            error = "the tool call cannot be read" if broken else None
            turn = Turn(len(trajectory.turns), message, calls, error=error)
            trajectory.turns.append(turn)
            trajectory.answer = None if calls or broken else (message.get("content") or "").strip()
        else:
            turn.replies.append(message)
            call = turn.tool_calls[len(turn.replies) - 1]
            call.result = message["content"]
            call.error = call.result if call.result.startswith("{'error':") else None
            call.executed = call.error is None
    return trajectory


# Held-out questions


class HeldOut:
    """
    Measures a model on held-out questions as training samples them; searches take no time here.

    Args:
        model (`PreTrainedModel`): The model, whose weights are read at each measurement.
        tokenizer: Its tokenizer.
        number (`int`): Questions.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, number: int) -> None:
        self.model, self._rows = model, list(questions("validation").take(number))
        engine = TransformersEngine(model, tokenizer, patience=600.0)
        limits = RolloutLimits(MAX_TOKENS, MAX_TURN_TOKENS)
        self._runner = RolloutRunner(environment(tool.search), engine, limits)
        self._exact = load_rewards([EXACT], "outcome")[0]

    def exact_match(self) -> float:
        """The share of the questions that are answered exactly; the same numbers are drawn each time."""
        requests = [
            RolloutRequest(row["prompt"], f"{number:06d}", {"answer": row["answer"]}, derive_seed(0, number))
            for number, row in enumerate(self._rows)
        ]
        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            trajectories = run(self._runner.run(requests, SamplingParams()))
        self.model.train(training)
        scores = [self._exact.score(each, **each.row) for each in trajectories]
        return sum(scores) / len(scores)
