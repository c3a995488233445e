"""Tools with a state of their own in each conversation, in the form of verl's `BaseTool`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

from mt_grpo.tools.function import Tool, ToolDefinitionError


class OpenAIFunctionPropertySchema(BaseModel):
    """One argument; keywords of JSON schema that have no field here are kept."""

    model_config = ConfigDict(extra="allow")
    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The arguments of a function, a JSON schema."""

    model_config = ConfigDict(extra="allow")
    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema | bool] = {}
    required: list[str] = []


class OpenAIFunctionSchema(BaseModel):
    """A function: what the model reads of it."""

    model_config = ConfigDict(extra="allow")
    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool in OpenAI's form: `{"type": "function", "function": {...}}`."""

    type: str = "function"
    function: OpenAIFunctionSchema


@dataclass
class ToolResponse:
    """
    What `create` and `execute` may return instead of text.

    Args:
        text (`str`, *optional*): What the model reads.
        image, video (`list`, *optional*): Refused: conversations here are text.
    """

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class BaseTool:
    """
    A tool that holds a state in each conversation. Subclass it and override what you need; the methods may be `async`
    or not, those that are not run in threads. One object serves all conversations: keep states by `instance_id`.

    In each conversation, `create` is called before the first turn, `execute` for each call, `calc_reward` at the end,
    and at last `release`, whatever happened. The columns of the dataset row may bring arguments for them, as
    `tools_kwargs` or `extra_info.tools_kwargs`: `{tool name: {create_kwargs: {...}, execute_kwargs: {...},
    calc_reward_kwargs: {...}, release_kwargs: {...}}}`.

    Args:
        config (`dict`): What the tool's entry in `tools_config_file` gives as `config`.
        tool_schema (`OpenAIFunctionToolSchema`, *optional*): Its description; `get_openai_tool_schema` where none is
            given.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        self.tool_schema = tool_schema
        self.tool_schema = self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ToolDefinitionError(
                f"The tool class {type(self).__name__!r} has no schema: give its entry a `tool_schema`, or override "
                "`get_openai_tool_schema`."
            )
        self.name: str = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """The description of the tool for the model."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """
        Makes the state of one conversation.

        Returns:
            The id by which the other methods know it, alone or as the first of a tuple.
        """
        return instance_id or uuid4().hex

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, float, dict]:
        """
        Answers a call.

        Args:
            instance_id (`str`): The conversation.
            parameters (`dict`): The arguments the model gave, held against the schema.

        Returns:
            Text (or a `ToolResponse`, or anything JSON can hold) for the model; the reward of this step, which
            `None` leaves to others; and numbers to log.
        """
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """The reward of the conversation, from the state it ended with; only asked for where it is overridden."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Lets go of what the conversation held."""


@dataclass
class StatefulTool(Tool):
    """
    A `BaseTool` as the model sees it. It is called in a conversation only, through the copy that `ToolSession` makes.

    Args:
        base (`BaseTool`): The tool.
    """

    base: BaseTool = field(kw_only=True)
    keeps_state: bool = field(default=True, repr=False, compare=False)

    @classmethod
    def of(cls, base: BaseTool) -> StatefulTool:
        """The description of a tool; raises `ToolDefinitionError` where its schema is none."""
        assert base.tool_schema is not None  # its constructor refuses that
        function = base.tool_schema.model_dump(exclude_unset=True, exclude_none=True)["function"]
        parameters = {"type": "object", "properties": {}, **function.get("parameters", {})}
        description = function.get("description", "")
        return cls(function["name"], description, parameters, _outside(base.name), is_async=True, base=base)


def _outside(name: str) -> Callable[..., Any]:
    async def refuse(**arguments: Any) -> Any:
        raise RuntimeError(f"the tool {name!r} keeps a state, so it is called in a conversation only (`ToolSession`)")

    return refuse
