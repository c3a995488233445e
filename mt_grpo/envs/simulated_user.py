"""A user whom another model plays: any endpoint that speaks OpenAI's chat completions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from string import Formatter
from typing import TYPE_CHECKING, Any

from mt_grpo.envs.env import Outcome, Policy, Step
from mt_grpo.envs.source import environment, tool_arguments
from mt_grpo.envs.tool_env import DialogueEnv
from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean, need_library
from mt_grpo.options.values import parse_user
from mt_grpo.servers.external import BOUNDED, OpenAIEndpoint
from mt_grpo.trajectory import Message, Row, StopReason, Turn

if TYPE_CHECKING:
    from datasets import Dataset

GREETING = "Hello! How can I help you?"
"""What the user is told first: the endpoint's own conversation has to begin with the other side."""

_NO_KEY = "none"  # what the client sends where there is no key: it wants some text


class SimulatedUserError(Exception):
    """The endpoint gave no answer. It ends one conversation, with `env_error`."""


class SimulatedUser:
    """
    Plays the user of many conversations.

    Args:
        base_url (`str`): The endpoint, such as `http://127.0.0.1:8001/v1`.
        model (`str`): Its name of the model.
        system_prompt (`str`): What the user is told, with columns of the row in braces: `You want {goal}.`; a brace
            itself is written twice.
        api_key_env (`str`, *optional*): The environment variable that holds the key; no key where none is given.
        stop_phrase (`str`, *optional*): Ends the conversation where the user writes it, with `env_done`; it is no part
            of the reply. The system prompt has to ask for it.
        max_turns (`int`, *optional*): Replies of the user in one conversation; `max_env_steps` bounds them too.
        timeout (`float`, *optional*, defaults to `60.0`): Seconds one request may take.
        max_retries (`int`, *optional*, defaults to `2`): Further attempts after a request that failed.
        request (`dict`, *optional*): Further fields of each request, such as `temperature`; the endpoint's own among
            them.

    Raises:
        ConfigError: If one of these is wrong, the key is not set, or the package `openai` is missing.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        system_prompt: str,
        api_key_env: str | None = None,
        stop_phrase: str | None = None,
        max_turns: int | None = None,
        timeout: float = 60.0,
        max_retries: int = 2,
        request: Mapping[str, object] | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self" and value is not None}
        parse_user(given)
        need_library("openai", "`simulated_user`", '"mt-grpo[openai]"')
        option = "simulated_user: api_key_env"
        self._endpoint = OpenAIEndpoint(base_url, api_key_env, option, "The simulated user's endpoint")
        self.base_url, self.model, self.system_prompt = base_url, model, system_prompt
        self.api_key_env, self.stop_phrase, self.max_turns = api_key_env, stop_phrase, max_turns
        self.timeout, self.max_retries, self.request = timeout, max_retries, dict(request or {})
        self.columns = _columns(system_prompt)
        self._client: Any = None
        self._conversations = 0

    def check(self) -> None:
        """Asks the endpoint for its models, which not every one lists; see `OpenAIEndpoint.ask_models`."""
        self._endpoint.ask_models()

    def enter(self) -> None:
        """A conversation begins."""
        import openai

        if self._client is None:
            self._client = openai.AsyncOpenAI(
                api_key=self._endpoint.key or _NO_KEY,
                base_url=self.base_url,
                timeout=self.timeout,
                max_retries=self.max_retries,
                http_client=openai.DefaultAsyncHttpxClient(event_hooks=BOUNDED),
            )
        self._conversations += 1

    async def leave(self) -> None:
        """A conversation is over; with the last one, connections are closed."""
        self._conversations -= 1
        if self._conversations == 0:
            client, self._client = self._client, None
            await client.close()

    async def reply(self, dialogue: list[Message], row: Mapping[str, object]) -> tuple[str, bool]:
        """What the user says next, and whether the stop phrase was in it; the role `assistant` is the policy's."""
        import openai

        attempts = self.max_retries + 1
        try:
            # a request's own time begins anew with every byte that arrives
            async with asyncio.timeout(self.timeout * attempts):
                answer = await self._client.chat.completions.create(
                    model=self.model, messages=self._seen(dialogue, row), extra_body=self.request
                )
        except (openai.OpenAIError, TimeoutError, ValueError, RecursionError) as error:  # the last two: of its JSON
            raise SimulatedUserError(
                f"The simulated user {self.model!r} at {self.base_url} did not answer in {attempts} attempts: "
                f"{self._endpoint.hidden(error.__cause__ or error)}."
            ) from None  # the endpoint's words may repeat the key, and records have the traceback
        try:  # the client takes any JSON, and text too
            said = answer.choices[0].message.content
        except (AttributeError, IndexError, TypeError):
            said = None
        # a thought may have no beginning, or no end
        said = said.rpartition("</think>")[2].partition("<think>")[0].strip() if isinstance(said, str) else ""
        if not said:
            raise SimulatedUserError(f"The simulated user {self.model!r} at {self.base_url} answered without text.")
        if self.stop_phrase is not None and self.stop_phrase in said:
            return said.replace(self.stop_phrase, "").strip(), True
        return said, False

    def _seen(self, dialogue: list[Message], row: Mapping[str, object]) -> list[Message]:
        """The conversation as the user sees it: roles are swapped."""
        for column in self.columns:
            if column not in row:
                raise SimulatedUserError(f"The row has no `{column}`, which the simulated user's prompt names.")
        seen = [{"role": "system", "content": self.system_prompt.format_map(row)}]
        if dialogue and dialogue[0]["role"] == "user":
            seen.append({"role": "user", "content": GREETING})
        other = {"user": "assistant", "assistant": "user"}
        return seen + [{**message, "role": other[message["role"]]} for message in dialogue]


class SimulatedUserEnv(DialogueEnv):
    """A conversation with a simulated user. The row's `prompt` is how it begins: the user's first words."""

    _entered = False

    def __init__(self, user: SimulatedUser, **options: Any) -> None:
        super().__init__(**options)
        self.user = user

    def check_rows(self, rows: Dataset, name: str) -> None:
        """Refuses rows without a column that the system prompt names."""
        columns = rows.column_names
        for column in self.user.columns:
            if column not in columns:
                raise ConfigError(
                    f"`simulated_user: system_prompt` names {{{column}}}, which is no column of the dataset"
                    f"{did_you_mean(column, columns)}: its columns are {', '.join(columns)}; write {{{{ and }}}} "
                    "around what is no column."
                )

    async def run(self, policy: Policy, row: Row) -> Outcome:
        """The loop of `DialogueEnv`, with a connection to the endpoint."""
        self._replies = 0
        self.user.enter()
        self._entered = True
        return await super().run(policy, row)

    async def respond(self, turn: Turn) -> Step:
        """The user's reply; none after the last that it may give."""
        if self.user.max_turns is not None and self._replies >= self.user.max_turns:
            return Step(done=StopReason.MAX_STEPS)
        text, done = await self.user.reply(self.dialogue, self.row)
        self._replies += 1
        return Step(text or [], done=done)

    async def close(self) -> None:
        """Releases the endpoint and the tools."""
        try:
            if self._entered:
                self._entered = False
                await self.user.leave()
        finally:
            await super().close()


@environment("simulated_user")
def _user_of_options(options: Mapping[str, object]) -> SimulatedUserEnv:
    """The environment of a run's option `simulated_user`, whose endpoint is asked once."""
    user = SimulatedUser(**parse_user(options["simulated_user"]))
    user.check()
    return SimulatedUserEnv(user, **tool_arguments(options))


def _columns(template: str) -> list[str]:
    """The columns that a system prompt names."""
    try:
        fields = [field for _, field, _, _ in Formatter().parse(template) if field is not None]
        fault = "braces without the name of a column: write `{column}`, or the brace twice"
    except ValueError as error:
        fields, fault = [""], f"a brace that encloses no column ({error}): write it twice"
    columns = [field.split(".")[0].split("[")[0] for field in fields]
    if not all(column.isidentifier() for column in columns):
        raise ConfigError(f"`simulated_user: system_prompt` has {fault}.")
    return list(dict.fromkeys(columns))
