"""A harness of verifiers 0.4 that talks in this process: the chat loop with tools of its `null`, which starts one."""

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack
from typing import Any

from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient
from verifiers.v1.clients import ModelContext
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.compaction import is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

__all__ = ["ChatHarness"]

HARNESS = "mt_grpo_chat"
"""Its name in verifiers' configurations."""

# verifiers finds a harness as a module of this package, by its name
sys.modules.setdefault(f"verifiers.v1.harnesses.{HARNESS}", sys.modules[__name__])


class ChatHarness(NullHarness):
    """Asks until the model calls no tool; a full context ends the run as it is."""

    SUPPORTS_TOOL_INTERCEPTION = False

    async def setup(self, runtime: Runtime) -> None:
        """Nothing is installed."""

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """Holds one segment of the conversation."""
        system, prompt = self.resolve_prompt(data)
        messages = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            http = DefaultAsyncHttpxClient(trust_env=False, verify=False)
            client = AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=http)
            await stack.enter_async_context(client)
            asked = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
            try:
                while True:
                    completion = await client.chat.completions.create(**asked)
                    message = completion.choices[0].message
                    messages.append(message.model_dump(exclude_none=True))
                    if not message.tool_calls:
                        break
                    for call in message.tool_calls:
                        messages.append(await _answered(call, dispatch, connections))
            except APIStatusError as error:
                if trace.stop_condition is None and not is_context_overflow(error):
                    raise
        return ProgramResult(0, "", "")


async def _answered(call: Any, dispatch: dict[str, Any], connections: dict[str, Any]) -> dict[str, Any]:
    name = call.function.name
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except json.JSONDecodeError as error:
        content: Any = f"error: invalid JSON in tool arguments ({error})"
    else:
        if name not in dispatch:
            content = f"error: unknown tool {name!r}"
        elif not isinstance(arguments, dict):
            content = "error: tool arguments must be a JSON object"
        else:
            content = await call_mcp(connections, dispatch, name, arguments)
    return {"role": "tool", "tool_call_id": call.id, "content": content, "name": name}
