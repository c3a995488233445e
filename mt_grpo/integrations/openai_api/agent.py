"""Anybody's agent as an environment: a function or a program that asks the policy over HTTP."""

from __future__ import annotations

import asyncio
import inspect
import numbers
from collections.abc import Callable
from functools import partial
from typing import Any

from mt_grpo.envs.env import ConversationEnded, Outcome, finite
from mt_grpo.envs.protocols import CallProtocol
from mt_grpo.envs.threads import abandon, in_thread
from mt_grpo.errors import defined_at
from mt_grpo.integrations.openai_api.agent_loop import run_agent
from mt_grpo.integrations.openai_api.client import AgentClient
from mt_grpo.integrations.openai_api.command import Command
from mt_grpo.integrations.openai_api.conversation import Conversation
from mt_grpo.integrations.openai_api.server import Endpoint
from mt_grpo.rollout.policy import ConversationPolicy
from mt_grpo.trajectory import StopReason

REWARD = "reward"
"""Name of a reward that an agent gives without one."""


class AgentSource:
    """
    Makes the environments of an agent: an `EnvSource`.

    Args:
        agent (`Callable` or `Command`): `solve(row, client)`, `async` or not: see docs/any_agent.md.
        protocol (`CallProtocol`, *optional*): A text protocol in which calls are written and read, where the model's
            chat template has no calls of its own or none that the model was trained on.
        host (`str`, *optional*, defaults to `"127.0.0.1"`): Address of the server.
    """

    def __init__(
        self, agent: Callable[..., Any] | Command, protocol: CallProtocol | None = None, host: str = "127.0.0.1"
    ) -> None:
        self.agent, self.protocol, self.endpoint = agent, protocol, Endpoint(host)

    def __call__(self, row: dict[str, Any]) -> AgentEnv:
        return AgentEnv(self)


class AgentEnv:
    """One conversation of an agent."""

    def __init__(self, source: AgentSource) -> None:
        self._source = source

    async def run(self, policy: ConversationPolicy, row: dict[str, Any]) -> Outcome:
        """Lets the agent work on a row. Where a limit ended its conversation, that is the reason of the end."""
        source = self._source
        async with source.endpoint.conversation(policy, source.protocol) as conversation:
            client = AgentClient(
                conversation.base_url,
                conversation.api_key,
                policy.session,
                partial(source.endpoint.add_session, conversation),
            )
            try:
                result = await self._work(conversation, row, client)
                outcome = read_result(result, f"{_name(source.agent)}{defined_at(source.agent)}")
            except Exception:  # whatever the user's agent raises: that there was no turn to be had is the cause
                if conversation.failure is None and conversation.limit is not None:
                    raise ConversationEnded(conversation.limit) from None
                if conversation.failure is None:
                    raise
            if conversation.failure is not None:  # which says nothing about the policy, whatever the agent made of it
                raise conversation.failure
            outcome.stop_reason = conversation.limit or outcome.stop_reason
            return outcome

    async def _work(self, conversation: Conversation, row: dict[str, Any], client: AgentClient) -> Any:
        """What the agent returns; `None` where it asks on without an end."""
        working = asyncio.ensure_future(self._call(row, client))
        asking = asyncio.ensure_future(conversation.over.wait())
        try:
            await asyncio.wait([working, asking], return_when=asyncio.FIRST_COMPLETED)
            return await working if working.done() else None
        finally:
            asking.cancel()
            if isinstance(self._source.agent, Command) and not working.done():  # its processes end here, or never
                working.cancel()
                await asyncio.wait([working])
            abandon(working)

    async def _call(self, row: dict[str, Any], client: AgentClient) -> Any:
        agent, name = self._source.agent, _name(self._source.agent)
        if isinstance(agent, Command):
            return await agent(row, client)
        if not inspect.iscoroutinefunction(agent):
            result = await in_thread(partial(agent, row, client), name)
            if not inspect.isawaitable(result):
                return result
            return await run_agent(_closing(result, client), name)
        return await run_agent(_closing(agent(row, client), client), name)

    async def close(self) -> None:
        """Nothing to let go of."""


async def _closing(work: Any, client: AgentClient) -> Any:
    try:
        return await work
    finally:
        await client.close()


def _name(agent: Any) -> str:
    return agent.arguments[0] if isinstance(agent, Command) else getattr(agent, "__name__", type(agent).__name__)


def read_result(result: Any, name: str) -> Outcome:
    """
    The outcome that an agent's result stands for.

    Args:
        result: A number (the reward), a mapping from names of rewards to numbers, in which the text `answer` is the
            answer, text (the answer), an `Outcome`, or `None`.
        name (`str`): Of the agent, and where it is written, for errors.

    Raises:
        TypeError: If it is something else.
    """
    if isinstance(result, Outcome):
        return result
    if isinstance(result, str):
        return Outcome(stop_reason=StopReason.ANSWERED, answer=result)
    if isinstance(result, numbers.Real):
        return Outcome({REWARD: result})
    if isinstance(result, dict):
        rewards = {
            key: finite(value, f"{name}: the reward {key!r}") for key, value in result.items() if key != "answer"
        }
        answer = result.get("answer")
        if not isinstance(answer, (str, type(None))):
            raise TypeError(f"{name} returned {type(answer).__name__} as `answer`: return text.")
        return Outcome(rewards, None if answer is None else StopReason.ANSWERED, answer)
    if result is None:
        return Outcome()
    raise TypeError(
        f"{name} returned {type(result).__name__}: return a reward, a mapping from names of rewards to numbers, the "
        "answer as text, or nothing."
    )
