"""Agents that reach the policy over HTTP, and runs of them on scripted conversations."""

from __future__ import annotations

import asyncio
from functools import cache

import torch
from trl.chat_template_utils import add_response_schema

from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.rollout.endpoint import AgentSource
from support.models import build_tokenizer

END = "<|im_end|>"
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks a query up.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


@cache
def calling_tokenizer():
    """A tokenizer whose tool calls can be read back."""
    tokenizer = build_tokenizer()
    add_response_schema(tokenizer)
    return tokenizer


def call(query: str, thought: str = "") -> str:
    """A turn that calls the tool."""
    body = f'<tool_call>\n{{"name": "lookup", "arguments": {{"query": "{query}"}}}}\n</tool_call>'
    return (f"<think>\n{thought}\n</think>\n\n" if thought else "") + body + END


def run_agent(
    agent, answers, *, rows=({},), protocol=None, latency=0.0, context_length=4096, history="keep", **limits
):
    """Runs an agent once for each row: the trajectories, and the runner."""
    engine = ScriptedEngine(calling_tokenizer(), answers, latency, context_length)
    runner = RolloutRunner(AgentSource(agent, protocol), engine, RolloutLimits(**limits))
    requests = [RolloutRequest("Q1", f"{index:03d}", {**row, "number": index}) for index, row in enumerate(rows)]
    return asyncio.run(runner.run(requests, SamplingParams())), runner


def sampled(trajectory) -> int:
    """Tokens that were sampled."""
    return sum(turn.num_tokens for turn in trajectory.turns)


async def tool_loop(row, client):
    """The loop of OpenAI's manual."""
    openai, messages = client.openai(), [{"role": "user", "content": row["prompt"]}]
    while True:
        answer = await openai.chat.completions.create(model="policy", messages=messages, tools=[LOOKUP])
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for asked in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": asked.id, "content": f"about {asked.function.arguments}"})


def check_log_probs(trainer, inputs):
    """Every trained token has the log-probability in training that it was sampled with."""
    logps, _, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        inputs["completion_ids"].shape[1],
        **{name: inputs[name] for name in ("parent",) if name in inputs},
    )
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    turns = [turn for trajectory in trainer._batch.trajectories for turn in trajectory.turns]
    assert mask.sum() == sum(turn.num_tokens for turn in turns)
    torch.testing.assert_close(logps[mask], inputs["sampling_per_token_logps"][mask], rtol=0, atol=1e-4)
