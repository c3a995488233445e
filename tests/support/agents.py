"""Agents that reach the policy over HTTP, and runs of them on scripted conversations."""

from __future__ import annotations

import asyncio
from functools import cache

from trl.chat_template_utils import add_response_schema

from mt_grpo.integrations.openai_api import AgentSource
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
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
    """Runs an agent, or its source, once for each row: the trajectories, and the runner."""
    engine = ScriptedEngine(calling_tokenizer(), answers, latency, context_length)
    source = agent if isinstance(agent, AgentSource) else AgentSource(agent, protocol)
    runner = RolloutRunner(source, engine, RolloutLimits(**limits))
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
