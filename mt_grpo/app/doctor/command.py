"""`mt-grpo doctor`: the checks of a run, each called once, and a line for each thing that they find."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from datasets import IterableDataset
from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

from mt_grpo.app.build import HIDDEN_TOOLS, env_of_prompt, first_rows, tools_not_in
from mt_grpo.app.doctor import memory_plan, surroundings, time_plan
from mt_grpo.app.doctor.case import FAIL, OK, WARN, Case, Check, Finding, Lines, NotKnown, examine
from mt_grpo.app.recipe import build_recipe
from mt_grpo.app.request import Request
from mt_grpo.concurrency import run
from mt_grpo.data.images import naming_rows
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.envs.tool_env import execute_calls
from mt_grpo.errors import ConfigError
from mt_grpo.media import part_text
from mt_grpo.options.rules import check_batches
from mt_grpo.rewards import load_rewards
from mt_grpo.rollout import ChatRenderer, TemplateError
from mt_grpo.rollout.token_check import examine_template
from mt_grpo.servers.env_servers import ServerLost
from mt_grpo.tools import Tool
from mt_grpo.tools.mcp.tools import MCPBaseTool, McpRemote, McpTool
from mt_grpo.tools.stateful import StatefulTool, ToolSession, ToolStateError
from mt_grpo.training.media import with_column_media
from mt_grpo.training.preflight import check_reward_columns
from mt_grpo.training.reward_models import with_models
from mt_grpo.trajectory import Message, ToolCall, visible

PLAN: dict[str, Check] = {
    "training memory": memory_plan.training,
    "server memory": memory_plan.serving,
    "files": memory_plan.files,
    "step": time_plan.step,
}
"""The plan's parts by name. They come after the checks, which measure what tools cost."""

WIDTH = 16


def diagnose(request: Request) -> int:
    """Examines a run, and prints what was found."""
    case = Case(request, build_recipe(request))
    checks = CHECKS | PLAN
    if request.own["probe"]:
        from mt_grpo.app.doctor.probe import probe

        checks = checks | {"probe": probe}
    out = sys.stdout
    with _quiet(), contextlib.redirect_stdout(sys.stderr):  # tools and libraries may print
        found = examine(case, checks)
        findings = list(found if request.own["json"] else _print(found, out))
    failed = [one for one in findings if one.status == FAIL]
    if request.own["json"]:
        content = {"ok": not failed, "findings": [vars(one) for one in findings], "plan": case.plan}
        print(json.dumps(content, indent=2))
    else:
        warned = sum(one.status == WARN for one in findings)
        verdict = "nothing stands in the way of this run" if not failed else f"{len(failed)} of these must be mended"
        print(f"{verdict}; {warned} to look at" if warned else verdict)
    return 1 if failed else 0


def _print(findings: Iterable[Finding], out: TextIO) -> Iterable[Finding]:
    for one in findings:
        mend = f"\n{'':{WIDTH + 6}}→ {one.mend}" if one.mend else ""
        print(visible(f"{one.status:<5} {one.check:<{WIDTH}}{one.what}{mend}"), file=out, flush=True)
        yield one


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the log lines of libraries, and our own, beside the report."""
    ours = logging.getLogger("mt_grpo")
    level, verbosity = ours.level, get_verbosity()
    disable_progress_bar()
    set_verbosity_error()
    ours.setLevel(logging.ERROR)
    try:
        yield
    finally:
        ours.setLevel(level)
        set_verbosity(verbosity)


WORDS = 80
"""Characters of a result, or of an error, that are shown."""
EXAMPLES = {"expression": "1 + 1", "code": "print(1)"}
"""Arguments by name, for those that the words of a prompt would not suit."""
MADE_UP = "arguments were made up: see whether it works with those that the model will give"
ERROR = re.compile(
    r"""[\s{\[("']*(?:error|exception|traceback|\w+(?:Error|Exception))\b"""
    r"""(?!["']?\s*[:=]\s*(?:null|none|false|0|""|'')\s*[,}\]])""",
    re.IGNORECASE,
)
"""How a result begins that tells of an error: in words, or as the first key of JSON whose value does not deny it."""
LIMIT = 60.0
"""Seconds a call may take where the recipe has no `tool_timeout`."""


def tools(case: Case) -> Lines:
    """Calls each tool once. A tool of an MCP server is only called if the server says that it changes nothing."""
    rows: Any = []
    try:
        rows = list(case.train_rows.take(1))
    except NotKnown:  # a tool is called with made-up words then
        pass
    row = rows[0] if rows else {}
    environments = [one for one in case.environments if isinstance(one, MultiTurnToolEnv)]
    offered = {tool.name: tool for one in environments for tool in one.tools.values()}
    if not offered:
        words = "the recipe names none" if environments else "those of its environments belong to a conversation"
        yield OK, f"no tool is called: {words}", ""
    for tool in offered.values():
        remote = remote_of(tool)
        if remote is not None and not remote.only_reads:
            yield OK, f"{tool.name} is offered by its MCP server, and not called, since it may change something", ""
            continue
        call = ToolCall(tool.name, made_arguments(tool.parameters, row))
        limit = LIMIT if case.args.tool_timeout is None else case.args.tool_timeout
        try:
            run(_call(tool, call, row, limit))
        except ToolStateError as error:
            raise ConfigError(str(error)) from error
        yield _outcome(call, limit)
        if call.error is None:
            case.tool_seconds[tool.name] = call.seconds


def _outcome(call: ToolCall, limit: float) -> tuple[str, str, str]:
    asked = f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"
    if call.error is None and ERROR.match(call.result):
        return WARN, f"{asked} answered with what reads as an error: {_cut(call.result)!r}", MADE_UP
    if call.error is None:
        return OK, f"{asked} answered in {call.seconds:.2f} s: {_cut(call.result)!r}", ""
    if call.executed and call.seconds >= limit:
        mend = "see why it hangs, or raise `tool_timeout`"
        return FAIL, f"{asked} did not answer in {limit:g} s", mend
    return WARN, f"{asked} answered with an error after {call.seconds:.2f} s: {_cut(call.error)!r}", MADE_UP


def remote_of(tool: Tool) -> McpRemote | None:
    """The tool of an MCP server behind a tool."""
    if isinstance(tool, McpTool):
        return tool.remote
    if isinstance(tool, StatefulTool) and isinstance(tool.base, MCPBaseTool):
        return tool.base.remote
    return None


async def _call(tool: Tool, call: ToolCall, row: dict[str, Any], limit: float) -> None:
    session = ToolSession([tool], row, limit)
    try:
        if isinstance(tool, StatefulTool):
            await session.create(tool.name)  # a state that cannot be made is no error of the arguments
        with contextlib.suppress(ServerLost):  # the call has it as its error
            await execute_calls([call], session.tools, limit)
    finally:
        await asyncio.shield(session.release())
    if session.failures:
        raise ToolStateError(" ".join(session.failures))


def made_arguments(schema: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """
    Arguments for a call: those that the schema requires. Each is the row's column of the same name, or an example of
    its schema, or for text the words of the row's prompt.
    """
    properties = schema.get("properties", {})
    return {
        name: row[name] if isinstance(row.get(name), str | int | float) else _made(properties.get(name, {}), row, name)
        for name in schema.get("required", [])
    }


def _made(schema: Any, row: dict[str, Any], name: str = "") -> Any:
    schema = schema if isinstance(schema, dict) else {}  # `true` takes anything
    for key in ("default", "const"):
        if key in schema:
            return schema[key]
    for key in ("examples", "enum", "anyOf", "oneOf"):
        if schema.get(key):
            first = schema[key][0]
            return _made(first, row) if key in ("anyOf", "oneOf") else first
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind in ("integer", "number"):
        return schema.get("minimum", 1)
    if kind == "array":
        return [_made(schema.get("items", {}), row)] * schema.get("minItems", 1)
    if kind == "object":
        return made_arguments(schema, row)
    return {"boolean": False, "null": None}.get(kind, EXAMPLES.get(name) or _words(row))


def _words(row: dict[str, Any]) -> str:
    """The text of the last message of the row's prompt."""
    prompt = row.get("prompt") or "test"
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "test")


def _cut(text: str) -> str:
    text = visible(" ".join(text.split()))
    return text if len(text) <= WORDS else f"{text[:WORDS]}…"


def processes(case: Case) -> Lines:
    """Whether the stated processes make whole groups."""
    check_batches(case.options, case.processes)
    if case.args.sp_size > 1 and case.sharding is not None and case.sharding.deepspeed:
        raise ConfigError(
            f"`sp_size: {case.args.sp_size}` cannot be trained with DeepSpeed: launch with `--accelerate_config "
            "fsdp2`, or leave `sp_size` out."
        )
    prompts = case.batch // case.args.num_generations
    yield (
        OK,
        f"{case.processes} of them sample {case.batch} conversations at a time: {prompts} prompts × "
        f"{case.args.num_generations}",
        "",
    )


def model(case: Case) -> Lines:
    """Whether the model's configuration and tokenizer are here."""
    parameters = case.shape.parameters
    case.tokenizer  # noqa: B018, asked for what it may be refused with
    size = f"{parameters / 1e9:.3g} billion" if parameters >= 1e9 else f"{parameters / 1e6:.3g} million"
    what = f"{case.recipe.model.model_name_or_path} has {size} parameters"
    adapter = f", {case.shape.adapter / 1e6:.3g} million more in the adapter" if case.shape.adapter else ""
    yield OK, what + adapter, ""


def rows(case: Case) -> Lines:
    """Whether there are rows for a step, with the columns that rewards read."""
    needed = case.batch // case.args.num_generations
    train, evaluated = case.train_rows, case.rows[1]
    listed = load_rewards(case.args.turn_reward_funcs or [], "turn")
    listed += load_rewards(with_models(case.args.outcome_reward_funcs or [], case.args), "outcome")
    check_reward_columns(listed, train, evaluated)
    if isinstance(train, IterableDataset):
        yield OK, "they are a stream, and its columns are those that rewards read", ""
    elif len(train) < needed:
        mend = "give it more rows, or make the batch smaller (`per_device_train_batch_size`)"
        yield FAIL, f"the training dataset has {len(train)} rows, and one batch takes {needed} prompts", mend
    else:
        yield OK, f"{len(train)} rows to train on, {needed} in a batch, with the columns that rewards read", ""


def template(case: Case) -> Lines:
    """Whether the chat template only appends."""
    for one in case.environments:
        if not isinstance(one, MultiTurnToolEnv):
            continue
        try:
            renderer = ChatRenderer(
                case.tokenizer, one.tool_schemas, case.args.chat_template_kwargs, tags=one.protocol.tags
            )
        except TemplateError as error:
            yield FAIL, str(error), "name another by `chat_template_path`"
            continue
        verdict = examine_template(renderer).removeprefix("Chat template: ").removesuffix(".")
        read = verdict if one.protocol.native_tools else verdict.split("; ")[-1]  # results are user messages
        if "refuses" in read:
            mend = "choose another `call_protocol`, or a model whose template takes them (`chat_template_path`)"
            yield FAIL, f"it {read}", mend
        elif "rewrites" in read:
            mend = "the trajectory keeps what was sampled; see docs/history.md for what the model is to see"
            yield WARN, verdict, mend
        else:
            yield OK, verdict, ""


def prompt(case: Case) -> Lines:
    """Whether the first prompt shows the tools. Its images and sounds stand as words: it is for the tokenizer."""
    with naming_rows({"training dataset": case.train_rows}):
        rows = [with_column_media(row) for row in first_rows(case.train_rows, case.env)]
    for row in rows:
        env = env_of_prompt(case.env, row)
        if env is None or not env.tools:
            continue
        with contextlib.suppress(TemplateError):  # `template` has told
            renderer = ChatRenderer(
                case.tokenizer, env.tool_schemas, case.args.chat_template_kwargs, tags=env.protocol.tags
            )
            if missing := tools_not_in(renderer.prompt_text([*map(_in_words, env.start(row["prompt"]))]), env):
                yield WARN, f"the model is not shown its tools ({missing})", HIDDEN_TOOLS
            else:
                yield OK, f"the model has its tools ({', '.join(env.tools)}) from the prompt, or has learnt them", ""


def _in_words(message: Message) -> Message:
    """A message with the words of its parts."""
    content: Any = message.get("content")
    return {**message, "content": "\n".join(map(part_text, content))} if isinstance(content, list) else message


def lengths(case: Case) -> Lines:
    """Whether the longest conversation fits into the context."""
    longest, room = max(case.prompt_lengths), case.args.max_completion_length
    what = f"the longest prompt has {longest} tokens"
    if min(case.prompt_lengths) >= case.context:
        yield FAIL, f"{what}, and the context {case.context}", "use a model with a longer context, or shorter prompts"
    elif longest >= case.context:
        yield WARN, f"{what}, and the context {case.context}: such rows are dropped", "shorten them"
    elif longest + room > case.context:
        largest = case.context - longest
        yield (
            WARN,
            f"{what}, and with `max_completion_length: {room}` that is more than the context of {case.context}, where "
            "conversations then end",
            f"set `max_completion_length: {largest}`"
            + (", or raise `vllm_max_model_length`" if case.args.use_vllm and case.args.vllm_max_model_length else ""),
        )
    else:
        yield OK, f"{what}; with {room} after it, it fits the context of {case.context}", ""


CHECKS: dict[str, Check] = {
    "processes": processes,
    "device": surroundings.device,
    "model": model,
    "rows": rows,
    "template": template,
    "prompt": prompt,
    "lengths": lengths,
    "tools": tools,
    "environment": surroundings.environment,
    "server": surroundings.server,
    ".venv-vllm": surroundings.server_environment,
    "ports": surroundings.ports,
    "report_to": surroundings.trackers,
    "output_dir": surroundings.output,
}
"""Checks that come before the plan, by name."""
