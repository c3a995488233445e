"""Agents that reach the policy over HTTP, and runs of them on scripted conversations."""

import asyncio
from functools import cache

import httpx
import torch
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


class Reciting(ScriptedEngine):
    """Says what its script says, each token with the log-probability that a model gives it."""

    def __init__(self, model, script):
        super().__init__(calling_tokenizer(), script, context_length=model.config.max_position_embeddings)
        self.model = model

    @torch.no_grad()
    async def generate(self, context, sampling, session):
        sample = await super().generate(context, sampling, session)
        logits = self.model(input_ids=torch.tensor([context + sample.ids])).logits[0, len(context) - 1 : -1]
        chosen = torch.tensor(sample.ids).unsqueeze(1)
        sample.logprobs = logits.log_softmax(dim=-1).gather(1, chosen)[:, 0].tolist()
        return sample


def call(query: str, thought: str = "") -> str:
    """A turn that calls the tool."""
    body = f'<tool_call>\n{{"name": "lookup", "arguments": {{"query": "{query}"}}}}\n</tool_call>'
    return (f"<think>\n{thought}\n</think>\n\n" if thought else "") + body + END


def answers(session: str, turn: int) -> str:
    """A script of turns that differ."""
    return f"A{turn}{END}"


def run_agent(
    agent, answers, *, rows=({},), protocol=None, latency=0.0, context_length=4096, history="keep", **limits
):
    """Runs an agent, or its source, once for each row: the trajectories, and the runner."""
    engine = ScriptedEngine(calling_tokenizer(), answers, latency, context_length)
    source = agent if isinstance(agent, AgentSource) else AgentSource(agent, protocol)
    runner = RolloutRunner(source, engine, RolloutLimits(**limits))
    requests = [RolloutRequest("Q1", f"{index:03d}", {**row, "number": index}) for index, row in enumerate(rows)]
    return asyncio.run(runner.run(requests, SamplingParams())), runner


def hold(agent, script=answers, *, fails=False, **options):
    """One conversation of an agent, whose own assertions hold unless it is to fail: its trajectory, and the runner."""
    (trajectory,), runner = run_agent(agent, script, **options)
    assert fails or trajectory.error is None, trajectory.error
    return trajectory, runner


def sampled(trajectory) -> int:
    """Tokens that were sampled."""
    return sum(turn.num_tokens for turn in trajectory.turns)


def check_whole(trajectory, runner):
    """Every sampled token is in the tree once, and trained once."""
    assert sum(map(len, trajectory.tree.actions())) == sampled(trajectory)
    assert sum(runner.completion(trajectory).mask) == sampled(trajectory)


def web(client, key=None, **options):
    """A client of HTTP with the key of a conversation, or another, or none where it is empty."""
    key = client.api_key if key is None else key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    options = {"base_url": client.base_url, "trust_env": False, "timeout": 60.0, "headers": headers, **options}
    return httpx.AsyncClient(**options)


async def reply(client, messages, **options):
    """The assistant's message that a request is answered with."""
    answer = await client.openai().chat.completions.create(model="m", messages=messages, **options)
    return answer.choices[0].message


async def tool_loop(row, client):
    """The loop of OpenAI's manual."""
    messages = [{"role": "user", "content": row["prompt"]}]
    while True:
        message = await reply(client, messages, tools=[LOOKUP])
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for made in message.tool_calls:
            told = f"about {made.function.arguments}"
            messages.append({"role": "tool", "tool_call_id": made.id, "content": told})
