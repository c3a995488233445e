"""Reading a request: which fields count, which the run decides, which change nothing, and how others are refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mt_grpo.envs.env import ConversationEnded
from mt_grpo.media import IMAGE, SOUND, kind_of_part
from mt_grpo.tools.function import too_deep
from mt_grpo.trajectory import Message, StopReason

logger = logging.getLogger(__name__)

Fields = dict[str, Any]  # a JSON object of a request or an answer
NO_ROOM = "context_length_exceeded"  # code of an error that clients know: no token is left
OVER = "conversation_ended"  # code of the error of a request that comes too late


@dataclass(eq=False)
class ApiError(Exception):
    """A refused request, in the form that OpenAI's clients read."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    again: bool = False
    details: dict[str, str] | None = None

    def __str__(self) -> str:
        return self.message

    @classmethod
    def of_end(cls, ended: ConversationEnded) -> ApiError:
        """The error of a request that has no tokens left, or that comes after the end of the conversation."""
        if ended.stop_reason in (StopReason.CONTEXT_FULL, StopReason.TOKEN_BUDGET):
            return cls(400, str(ended), NO_ROOM, "messages")
        return cls(404, str(ended), OVER)

    @property
    def body(self) -> Fields:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        error: Fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        if self.details is not None:
            error["details"] = self.details
        return {"type": "error", "error": error}  # the outer `type` is Anthropic's

    @property
    def headers(self) -> dict[str, str]:
        """Headers that tell the client whether to retry."""
        return {"x-should-retry": str(self.again).lower()} | ({"retry-after": "1"} if self.again else {})


def invalid(param: str, problem: str) -> ApiError:
    """The error about a field of a request."""
    return ApiError(400, f"`{param}` {problem}.", "invalid_value", param)


# Messages

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_MOST_MESSAGES = 2048
"""Largest number of messages in a request, as with OpenAI: rendering them holds up all other conversations."""
_TEXTS = ("text", "input_text", "output_text", "refusal")  # types of content parts that are text


def _read_message(message: object, place: str) -> Message:
    """Normalises a message: content is text, arguments of calls are JSON objects, other keys are left out."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise invalid(place, f"has no role out of {', '.join(_ROLES)}")
    role = _ROLES[message["role"]]
    read_content = _read_parts if role == "user" else _read_text
    read: Message = {"role": role, "content": read_content(message.get("content"), f"{place}.content")}
    if role == "tool":
        read |= {name: message[name] for name in ("tool_call_id", "name") if isinstance(message.get(name), str)}
        read |= {"is_error": True} if message.get("is_error") is True else {}  # as Anthropic's clients say it
    elif role == "assistant":
        for name in ("function_call", "audio"):
            if message.get(name):
                raise invalid(f"{place}.{name}", "is nothing that is read: give `tool_calls`, and content as text")
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str):
            read["reasoning_content"] = reasoning
        if message.get("tool_calls"):
            read["tool_calls"] = [_read_call(call, f"{place}.tool_calls") for call in message["tool_calls"]]
    return read


def _read_parts(content: object, place: str) -> str | list[Fields]:
    """Content as text, or as parts with images (`data:` URLs) or sounds (`input_audio`) for the policy."""
    if not isinstance(content, list) or not any(kind_of_part(part) in (IMAGE, SOUND) for part in content):
        return _read_text(content, place)
    return [_read_part(part, place) for part in content]


def _read_part(part: Fields, place: str) -> Fields:
    kind = kind_of_part(part)
    if kind == IMAGE:
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        if not isinstance(url, str) or not url.startswith("data:"):
            raise invalid(place, "has an image that is no `data:` URL, and nothing is fetched from elsewhere")
        return {"type": "image", "image": url}
    if kind == SOUND:
        sound = part.get("input_audio")
        if part["type"] != "input_audio" or not isinstance(sound, dict) or not isinstance(sound.get("data"), str):
            raise invalid(place, "has a sound that is no `input_audio` with `data` in base64, and nothing is fetched")
        return {"type": "input_audio", "input_audio": sound}
    return {"type": "text", "text": _read_text([part], place)}


def _read_text(content: object, place: str) -> str:
    """Content as text. Parts are joined by line feeds, as in vLLM."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(place, "is neither text nor a list of parts")
    texts = []
    for part in content:
        if isinstance(part, dict) and part.get("type") in _TEXTS:
            part = part.get("refusal" if part["type"] == "refusal" else "text")
        if not isinstance(part, str):
            raise invalid(place, "has a part that is no text: the policy reads text, and images or sounds of users")
        texts.append(part)
    return "\n".join(texts)


def _function_of(tool: object, place: str, problem: str) -> Fields:
    """The `function` of a tool or a call, which has a name."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(place, problem)
    return function


def _read_call(call: Fields, place: str) -> Fields:
    function = _function_of(call, place, "has a call without the name of a function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            pass
    if too_deep(arguments):
        raise invalid(place, "has arguments whose brackets are too deep")
    read = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return read | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


# Other fields

CHAT_FIELDS = frozenset(
    """messages model tools tool_choice parallel_tool_calls stop n max_tokens max_completion_tokens logprobs
    top_logprobs stream stream_options response_format functions function_call""".split()
)
"""Fields of chat completions that are honoured or have a sentence of their own. Each dialect has such a set."""
_NEUTRAL = frozenset(
    """user metadata client_metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options
    prompt_cache_retention prediction timeout request_id priority cache_salt max_tool_calls cache_control inference_geo
    speed diagnostics user_profile_id workspace_id billing_policy fallbacks fallback_credit_token betas""".split()
)
"""Fields that are passed over: they do not change what the policy is asked, nor what it answers."""
_SAMPLING = frozenset(
    "temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty length_penalty".split()
)
"""Fields in whose place the run's own ways to sample stay."""
_EFFORT = frozenset("reasoning reasoning_effort thinking thinking_budget enable_thinking verbosity".split())
"""Fields that say how much to think and to write."""
_FORCING = frozenset(
    """guided_json guided_regex guided_choice guided_grammar structured_outputs output_format json_schema regex ebnf
    grammar logit_bias bad_words allowed_token_ids logits_processors min_tokens ignore_eos""".split()
)
"""Fields that force or forbid tokens."""
TOOL_FIELDS = frozenset("type function name description parameters return strict cache_control".split())
"""Fields of a tool, or of its function. `return` is what transformers makes of a docstring."""
_UNCHANGED: Mapping[str, object] = {
    "modalities": ["text"],
    **dict.fromkeys("logit_bias chat_template_kwargs mm_processor_kwargs".split(), {}),
    "min_tokens": 0,
    "best_of": 1,
    **dict.fromkeys("add_generation_prompt skip_special_tokens spaces_between_special_tokens".split(), True),
    **dict.fromkeys("include_reasoning separate_reasoning".split(), True),
    **dict.fromkeys("ignore_eos use_beam_search echo continue_final_message add_special_tokens".split(), False),
    **dict.fromkeys("include_stop_str_in_output return_token_ids return_tokens_as_token_ids".split(), False),
}
"""Fields whose value, where it is this one, changes nothing."""
_EFFORT_STAYS = "it has no effect, since the run decides how much is thought (`chat_template_kwargs`)"
_UNREAD = "is no field that this server reads, and could change the answer: leave it out"
_FORCED = "would force tokens that the policy did not choose"
_MOST_CHOICES = _MOST_TOOLS = 128  # largest `n`, and largest number of tools in a request, as with OpenAI
_MOST_STOPS = 64  # largest number of strings in `stop`: each is looked for after every token


@dataclass(frozen=True)
class ParsedRequest:
    """A request of any dialect; `instructed`: its first message is of this request alone."""

    messages: list[Message]
    model: str
    tools: list[Fields] | None = None
    reads_calls: bool = True
    stop: tuple[str, ...] = ()
    n: int = 1
    max_tokens: int | None = None
    logprobs: bool = False
    stream: bool = False
    usage: bool = False
    instructed: bool = False


class Warnings:
    """One warning per run about each field that requests set without an effect."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def once(self, field: str, why: str) -> None:
        """Warns, unless there was a warning about the field before."""
        if field not in self._named:
            self._named.add(field)
            logger.warning("The agent's requests set `%s`: %s.", field, why)


def read_chat(
    body: object,
    fields: frozenset[str],
    as_chat: Callable[[Fields, Warnings], Fields],
    fixed: Mapping[str, float],
    warnings: Warnings,
) -> ParsedRequest:
    """Reads a request of a dialect with these `fields`, made a chat completion; `fixed` is how is sampled."""
    if not isinstance(body, dict):
        raise ApiError(400, "The body of the request is no JSON object.", "invalid_value")
    try:
        _check_fields(body, fields, fixed, warnings)
        return _read_chat(as_chat(body, warnings), warnings)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"A field of the request has another type than it should: {error}."
        raise ApiError(400, message, "invalid_type") from error


def _read_chat(body: Fields, warnings: Warnings) -> ParsedRequest:
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise invalid("messages", "must be a non-empty list of messages")
    if len(given) > _MOST_MESSAGES:
        raise invalid("messages", f"has {len(given)} messages, above {_MOST_MESSAGES}: leave out or join old ones")
    messages = [_read_message(message, f"messages[{index}]") for index, message in enumerate(given)]
    for name in ("functions", "function_call"):
        if body.get(name):
            raise invalid(name, "is an older form that is not read: give `tools`")
    tools, reads_calls = _read_tools(body, warnings)
    _check_format(body.get("response_format"), "response_format")
    if body.get("top_logprobs"):
        raise invalid("top_logprobs", "is set, and log-probabilities are known of the sampled tokens only")
    counts = {}
    for name in ("n", "max_tokens", "max_completion_tokens"):
        value = counts[name] = body.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise invalid(name, f"is {value!r}: give a whole number above 0")
    n = counts.pop("n") or 1
    if n > _MOST_CHOICES:
        raise invalid("n", f"is {n}, above {_MOST_CHOICES}")
    stream = bool(body.get("stream"))
    return ParsedRequest(
        messages,
        model=body["model"] if isinstance(body.get("model"), str) else "policy",
        tools=tools,
        reads_calls=reads_calls,
        stop=_read_stop(body.get("stop")),
        n=n,
        max_tokens=min((count for count in counts.values() if count is not None), default=None),
        logprobs=bool(body.get("logprobs")),
        stream=stream,
        usage=stream and bool((body.get("stream_options") or {}).get("include_usage")),
        instructed=bool(body.get("instructed")),
    )


def _check_fields(body: Fields, fields: frozenset[str], fixed: Mapping[str, float], warnings: Warnings) -> None:
    """Passes over fields without an effect, and warns of those that the run decides."""
    for name, value in body.items():
        if name in fields or name in _NEUTRAL or value is None or value in ([], ""):
            continue
        if name in _SAMPLING:
            if name not in fixed:
                warnings.once(name, "it has no effect, since the run decides how is sampled")
            elif value != fixed[name]:
                warnings.once(name, f"the run samples with {fixed[name]}, and so it stays")
        elif name in _EFFORT:
            warnings.once(name, _EFFORT_STAYS)
        elif name not in _UNCHANGED or value != _UNCHANGED[name]:
            raise invalid(name, f"{_FORCED}: leave it out" if name in _FORCING else _UNREAD)


def check_output(given: Fields | None, name: str, effort: str, warnings: Warnings) -> None:
    """Checks a field that says how the answer is to be."""
    given = given or {}
    _check_format(given.get("format"), f"{name}.format")
    for part, value in given.items():
        if value is None or part == "format":
            continue
        if part != effort:
            raise invalid(f"{name}.{part}", _UNREAD)
        warnings.once(f"{name}.{part}", _EFFORT_STAYS)


def _check_format(given: Fields | None, name: str) -> None:
    kind = (given or {"type": "text"}).get("type")
    if kind != "text":
        raise invalid(name, f"is {kind!r}, which {_FORCED}")


def _read_tools(body: Fields, warnings: Warnings) -> tuple[list[Fields] | None, bool]:
    """The tools, and whether calls of them are read."""
    choice, tools = body.get("tool_choice"), body.get("tools") or None
    if tools and body.get("parallel_tool_calls") is False:
        warnings.once("parallel_tool_calls", "a turn may hold several calls, as the policy made them")
    if tools is not None:
        if not isinstance(tools, list):
            raise invalid("tools", "is no list")
        if len(tools) > _MOST_TOOLS:
            raise invalid("tools", f"has {len(tools)} tools, above {_MOST_TOOLS}")
        tools = [_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if choice in (None, "auto", "none"):
        return tools, choice != "none"
    named = choice.get("function", choice).get("name") if isinstance(choice, dict) else None
    if choice != "required" and named is None:
        raise invalid("tool_choice", f"is {choice!r}: give auto, none, required or a function")
    names = [tool["function"]["name"] for tool in tools or ()]
    if not names or named is not None and names != [named]:
        asked = "required" if named is None else f"the function {named!r}"
        raise invalid("tool_choice", f"is {asked}, and `tools` has {', '.join(names) or 'none'}: give that tool alone")
    warnings.once("tool_choice", "no call is forced, since it would not be the policy's own; treat text as a miss")
    return tools, True


def check_tool(tool: Fields, fields: frozenset[str], place: str) -> None:
    """Checks that all fields of a tool, or of another part, are known: they say what the policy is shown of it."""
    for name, value in tool.items():
        if name not in fields and value not in (None, False, "", [], {}):
            raise invalid(f"{place}.{name}", _UNREAD)


def _read_tool(tool: Fields, place: str) -> Fields:
    function = _function_of(tool, place, "is no function with a name")
    check_tool(tool, TOOL_FIELDS, place)
    check_tool(function, TOOL_FIELDS, f"{place}.function")
    shown = {"name": function["name"], "description": function.get("description") or ""}
    shown["parameters"] = function.get("parameters") or {"type": "object", "properties": {}}
    if too_deep(shown):
        raise invalid(place, "has brackets that are too deep")
    return {"type": "function", "function": shown}


def _read_stop(stop: object) -> tuple[str, ...]:
    stop = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise invalid("stop", "is neither text nor a list of texts")
    if len(stop) > _MOST_STOPS:
        raise invalid("stop", f"has {len(stop)} texts, above {_MOST_STOPS}")
    return tuple(stop)
