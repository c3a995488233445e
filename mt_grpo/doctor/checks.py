"""`mt-grpo doctor`: the checks of a recipe and of the machine, and a line for each thing that they find."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from datasets import IterableDataset
from transformers.utils.logging import disable_progress_bar

from mt_grpo.app.build import HIDDEN_TOOLS, build_recipe, env_of_prompt, first_rows, tools_not_in
from mt_grpo.app.commands import server_vllm
from mt_grpo.app.request import Request, check_writable
from mt_grpo.concurrency import run
from mt_grpo.data.images import naming_rows
from mt_grpo.doctor.context import FAIL, OK, WARN, Check, Lines, NotKnown, RunFacts
from mt_grpo.doctor.plan import PLAN, probe
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.envs.env import ServedEnv
from mt_grpo.envs.tool_env import execute_calls
from mt_grpo.errors import ConfigError, UserError
from mt_grpo.media import part_text
from mt_grpo.options.rules import check_batches, check_groups
from mt_grpo.rewards import load_rewards
from mt_grpo.rollout import ChatRenderer, TemplateError
from mt_grpo.rollout.token_row import examine_template
from mt_grpo.servers.external import ServerLost, in_words
from mt_grpo.servers.http import RequestFailed, Server
from mt_grpo.servers.start import is_free
from mt_grpo.tools import Tool
from mt_grpo.tools.loading import StatefulTool, ToolSession, ToolStateError
from mt_grpo.tools.mcp import MCPBaseTool, McpTool
from mt_grpo.training.columns import check_reward_columns, with_column_media
from mt_grpo.training.model import resolve_base
from mt_grpo.training.preflight import check_folder, check_push, check_trackers
from mt_grpo.training.reward_batch import with_models
from mt_grpo.training.servers import INSTALL_VLLM, NO_VLLM, server_client
from mt_grpo.training.step_log import serving
from mt_grpo.trajectory import Message, Row, ToolCall, visible

_WIDTH = 16  # of a check's name in the report
_SHOWN_CHARACTERS = 80  # characters of a result, or of an error, that are shown
_EXAMPLES = {"expression": "1 + 1", "code": "print(1)"}
"""Arguments by name, for those that the words of a prompt would not suit."""
_MOST_ITEMS = 100  # of a list that is made up
_MADE_UP = "arguments were made up: see whether it works with those that the model will give"
ERROR = re.compile(
    r"""[\s{\[("']*(?:error|exception|traceback|\w+(?:Error|Exception))\b"""
    r"""(?!["']?\s*[:=]\s*(?:null|none|false|0|""|'')\s*[,}\]])""",
    re.IGNORECASE,
)
"""How a result begins that tells of an error: in words, or as the first key of JSON whose value does not deny it."""
_TOOL_TIMEOUT = 60.0  # seconds a call may take where the recipe has no `tool_timeout`
_SERVER_TIMEOUT = 3.0  # seconds in which a server answers
MEETING_PORT = 29500  # where accelerate lets the processes of a machine meet


@dataclass(frozen=True)
class _Finding:
    """One line of the report."""

    check: str
    status: str
    what: str
    mend: str = ""


_OF_THIS_MACHINE = ("environment", "sandbox", "server", ".venv-vllm", "ports", "files")
"""Checks of this machine. Their fails are a `warn` if the run is for another one."""


def _examine(facts: RunFacts, checks: Mapping[str, Check]) -> Iterator[_Finding]:
    """Runs checks: a `UserError` is a `fail`, `NotKnown` a `warn`; one that stops several is told once."""
    told: set[str] = set()
    left_out = []
    states_more = facts.states_gpu and not facts.args.use_cpu and torch.cuda.device_count() < facts.processes

    def finding(name: str, status: str, what: str, mend: str = "") -> _Finding:
        if status == FAIL and name in _OF_THIS_MACHINE and states_more:
            return _Finding(name, WARN, f"here, which is not the machine of the run: {what}", mend)
        return _Finding(name, status, what, mend)

    for name, check in checks.items():
        try:
            for line in check(facts):
                yield finding(name, *line)
        except UserError as error:
            words = " ".join(str(error).split()).removesuffix(".")
            if words in told:
                left_out.append(name)
                continue
            told.add(words)
            yield finding(name, WARN if isinstance(error, NotKnown) else FAIL, words)
    if left_out:
        yield _Finding("left out", WARN, f"not checked, for the reasons above: {', '.join(left_out)}")


def diagnose(request: Request) -> int:
    """Examines a run, and prints what was found."""
    facts = RunFacts(request, build_recipe(request))
    checks = CHECKS | PLAN | ({"probe": probe} if request.own["probe"] else {})
    out = sys.stdout
    with _quiet(), contextlib.redirect_stdout(sys.stderr):  # tools and libraries may print
        found = _examine(facts, checks)
        findings = list(found if request.own["json"] else _print(found, out))
    failed = [one for one in findings if one.status == FAIL]
    if request.own["json"]:
        content = {"ok": not failed, "findings": [vars(one) for one in findings], "plan": facts.plan}
        print(json.dumps(content, indent=2))
    else:
        warned = sum(one.status == WARN for one in findings)
        verdict = "nothing stands in the way of this run" if not failed else f"{len(failed)} of these must be mended"
        print(f"{verdict}; {warned} to look at" if warned else verdict)
    return 1 if failed else 0


def _print(findings: Iterable[_Finding], out: TextIO) -> Iterable[_Finding]:
    for one in findings:
        mend = f"\n{'':{_WIDTH + 6}}→ {one.mend}" if one.mend else ""
        print(visible(f"{one.status:<5} {one.check:<{_WIDTH}}{one.what}{mend}"), file=out, flush=True)
        yield one


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the log lines of libraries, and our own, beside the report."""
    disable_progress_bar()
    loggers = [logging.getLogger(name) for name in ("mt_grpo", "transformers")]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


# The recipe


def _processes(facts: RunFacts) -> Lines:
    """Whether the stated processes make whole groups."""
    check_batches(facts.options, facts.processes)
    if facts.args.sp_size > 1 and facts.sharding is not None and facts.sharding.deepspeed:
        raise ConfigError(
            f"`sp_size: {facts.args.sp_size}` cannot be trained with DeepSpeed: launch with `--accelerate_config "
            "fsdp2`, or leave `sp_size` out."
        )
    group = facts.args.num_generations
    prompts = f"{facts.batch // group} prompts × {group}"
    yield OK, f"{facts.processes} of them sample {facts.batch} conversations at a time: {prompts}", ""


def _model(facts: RunFacts) -> Lines:
    """Whether the model's configuration and tokenizer are here."""
    parameters = facts.shape.parameters
    facts.tokenizer  # noqa: B018, asked for what it may be refused with
    size = f"{parameters / 1e9:.3g} billion" if parameters >= 1e9 else f"{parameters / 1e6:.3g} million"
    adapter = f", {facts.shape.adapter / 1e6:.3g} million more in the adapter" if facts.shape.adapter else ""
    yield OK, f"{facts.recipe.model.model_name_or_path} has {size} parameters{adapter}", ""


def _rows(facts: RunFacts) -> Lines:
    """Whether there are rows for a step, with the columns that rewards read."""
    needed = facts.batch // facts.args.num_generations
    train, evaluated = facts.train_rows, facts.rows[1]
    listed = load_rewards(facts.args.turn_reward_funcs or [], "turn")
    listed += load_rewards(with_models(facts.args.outcome_reward_funcs or [], facts.args), "outcome")
    check_reward_columns(listed, train, evaluated)
    if isinstance(train, IterableDataset):
        yield OK, "they are a stream, and its columns are those that rewards read", ""
    elif len(train) < needed:
        mend = "give it more rows, or make the batch smaller (`per_device_train_batch_size`)"
        yield FAIL, f"the training dataset has {len(train)} rows, and one batch takes {needed} prompts", mend
    else:
        yield OK, f"{len(train)} rows to train on, {needed} in a batch, with the columns that rewards read", ""


def _renderer(facts: RunFacts, env: MultiTurnToolEnv) -> ChatRenderer:
    return ChatRenderer(facts.tokenizer, env.tool_schemas, facts.args.chat_template_kwargs, tags=env.protocol.tags)


def _template(facts: RunFacts) -> Lines:
    """Whether the chat template only appends."""
    for one in facts.environments:
        if not isinstance(one, MultiTurnToolEnv):
            continue
        try:
            renderer = _renderer(facts, one)
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


def _prompt(facts: RunFacts) -> Lines:
    """Whether the first prompt shows the tools. Its images and sounds stand as words: it is for the tokenizer."""
    with naming_rows({"training dataset": facts.train_rows}):
        rows = [with_column_media(row) for row in first_rows(facts.train_rows, facts.env)]
    for row in rows:
        env = env_of_prompt(facts.env, row)
        if env is None or not env.tools:
            continue
        with contextlib.suppress(TemplateError):  # `template` has told
            text = _renderer(facts, env).prompt_text([*map(_message_in_words, env.start(row["prompt"]))])
            if missing := tools_not_in(text, env):
                yield WARN, f"the model is not shown its tools ({missing})", HIDDEN_TOOLS
            else:
                yield OK, f"the model has its tools ({', '.join(env.tools)}) from the prompt, or has learnt them", ""


def _message_in_words(message: Message) -> Message:
    content: Any = message.get("content")
    return {**message, "content": "\n".join(map(part_text, content))} if isinstance(content, list) else message


def _lengths(facts: RunFacts) -> Lines:
    """Whether the longest conversation fits into the context."""
    longest, context, room = max(facts.prompt_lengths), facts.context, facts.args.max_completion_length
    what = f"the longest prompt has {longest} tokens"
    if min(facts.prompt_lengths) >= context:
        yield FAIL, f"{what}, and the context {context}", "use a model with a longer context, or shorter prompts"
    elif longest >= context:
        yield WARN, f"{what}, and the context {context}: such rows are dropped", "shorten them"
    elif longest + room > context:
        what += f", and with `max_completion_length: {room}` that is more than the context of {context}, where"
        raised = facts.args.use_vllm and facts.args.vllm_max_model_length
        mend = f"set `max_completion_length: {context - longest}`" + (
            ", or raise `vllm_max_model_length`" if raised else ""
        )
        yield WARN, f"{what} conversations then end", mend
    elif not longest:
        yield (
            OK,
            f"prompts are known once conversations begin; {context - room} tokens of the context are for them",
            "",
        )
    else:
        yield OK, f"{what}; with {room} after it, it fits the context of {context}", ""


# Tools


def _tools(facts: RunFacts) -> Lines:
    """Calls each tool once. A tool of an MCP server is only called if the server says that it changes nothing."""
    row: Row = {}
    with contextlib.suppress(NotKnown):  # a tool is called with made-up words then
        row = next(iter(facts.train_rows.take(1)), row)
    environments = [
        one for one in facts.environments if isinstance(one, MultiTurnToolEnv) and not facts.env.in_sandboxes
    ]
    offered = {tool.name: tool for one in environments for tool in one.tools.values()}
    if not offered:
        words = "the recipe names none" if environments else "those of its environments belong to a conversation"
        yield OK, f"no tool is called: {words}", ""
    for tool in offered.values():
        behind = tool.base if isinstance(tool, StatefulTool) else tool
        if isinstance(behind, McpTool | MCPBaseTool) and not behind.remote.only_reads:
            yield OK, f"{tool.name} is offered by its MCP server, and not called, since it may change something", ""
            continue
        call = ToolCall(tool.name, _made_arguments(tool.parameters, row))
        limit = _TOOL_TIMEOUT if facts.args.tool_timeout is None else facts.args.tool_timeout
        try:
            run(_call(tool, call, row, limit))
        except ToolStateError as error:
            raise ConfigError(str(error)) from error
        yield _outcome(call, limit)
        if call.error is None:
            facts.tool_seconds[tool.name] = call.seconds


def _outcome(call: ToolCall, limit: float) -> tuple[str, str, str]:
    asked = f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"
    if call.error is None and ERROR.match(call.result):
        return WARN, f"{asked} answered with what reads as an error: {_cut(call.result)!r}", _MADE_UP
    if call.error is None:
        return OK, f"{asked} answered in {call.seconds:.2f} s: {_cut(call.result)!r}", ""
    if call.executed and call.seconds >= limit:
        return FAIL, f"{asked} did not answer in {limit:g} s", "see why it hangs, or raise `tool_timeout`"
    return WARN, f"{asked} answered with an error after {call.seconds:.2f} s: {_cut(call.error)!r}", _MADE_UP


async def _call(tool: Tool, call: ToolCall, row: Row, limit: float) -> None:
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


def _made_arguments(schema: dict[str, Any], row: Row) -> dict[str, Any]:
    """Arguments that a schema requires: the row's columns, examples of the schema, or the prompt's words."""
    properties = schema.get("properties", {})
    return {
        name: row[name] if isinstance(row.get(name), str | int | float) else _made(properties.get(name, {}), row, name)
        for name in schema.get("required", [])
    }


def _made(schema: Any, row: Row, name: str = "") -> Any:
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
        return [_made(schema.get("items", {}), row)] * min(schema.get("minItems", 1), _MOST_ITEMS)
    if kind == "object":
        return _made_arguments(schema, row)
    asked = row.get("prompt") or "test"
    words = asked if isinstance(asked, str) else str(asked[-1].get("content") or "test")
    return {"boolean": False, "null": None}.get(kind, _EXAMPLES.get(name) or words)


def _cut(text: str) -> str:
    text = visible(" ".join(text.split()))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


# The machine


def _device(facts: RunFacts) -> Lines:
    """Whether the GPUs of the run are here, or stated."""
    if facts.args.use_cpu:
        yield OK, "the run is on the CPU, as `use_cpu: true` says", ""
        return
    if facts.args.fp16 and not facts.on_gpu:
        raise ConfigError("`fp16: true` needs a GPU, and this run would be on a CPU: leave it out.")
    here = torch.cuda.device_count()
    if not here and not facts.states_gpu:
        words = "there is no GPU here, so this run would be on the CPU"
        mend = "state the GPUs of its machine, as `--gpu H100 --num_processes 7`, or set `use_cpu: true`"
        refused = facts.args.bf16
        yield FAIL if refused else WARN, f"{words}, where `bf16: true` is refused" if refused else words, mend
    elif here < facts.processes:
        what = f"the run takes {facts.processes} GPUs to train, and {here} are here"
        yield WARN, what, "the plan is for those stated"
    else:
        yield OK, f"{here} GPUs are here, and {facts.processes} train", ""


def _environment(facts: RunFacts) -> Lines:
    """Whether the OpenEnv servers of the environments answer."""
    remote = [one for one in facts.environments if isinstance(one, ServedEnv)]
    if not remote:
        yield OK, "none is on OpenEnv servers", ""
    for one in remote:
        gone = run(one.check())
        there = f"{len(one.pool.urls) - len(gone)} of {len(one.pool.urls)} OpenEnv servers answer"
        if gone:
            yield WARN, f"{there} ({in_words(gone)})", "start the others, or leave them out"
        else:
            yield OK, there, ""


def _sandbox(facts: RunFacts) -> Lines:
    """Whether the sandboxes of tasks start here, and what they need is here."""
    if facts.env.in_sandboxes:
        for fine, what, mend in facts.env.examine(facts.train_rows, facts.under_way):
            yield OK if fine else WARN, what, mend


def _server(facts: RunFacts) -> Lines:
    """Whether the servers answer and hold this run's model."""
    if not facts.args.use_vllm:
        yield OK, "none is needed: the trainer samples from its own model", ""
        return
    if facts.colocated:
        check_groups(vars(facts.args), facts.processes)
        several = f"{len(facts.urls)} servers" if len(facts.urls) > 1 else "a server"
        place = "GPUs" if facts.on_gpu else "machine"
        yield OK, f"none is needed: the trainer starts {several} on its own {place}", ""
        return
    for url in facts.urls:
        fault = _server_fault(url)
        if fault is not None:
            yield FAIL, fault, "start it with `mt-grpo serve` and this recipe, on a GPU that does not train"
            return
    client = server_client(facts.args, facts.tokenizer, resolve_base(facts.name))
    client.server_timeout = _SERVER_TIMEOUT
    try:
        run(client.connect(lambda words: None))
    except RequestFailed as error:
        raise ConfigError(str(error)) from error
    yield OK, f"{', '.join(facts.urls)} holds this run's model, with a context of {client.context_length} tokens", ""


def _server_fault(url: str) -> str | None:
    """Why a server cannot be used, from its answer to `/health`."""
    try:
        Server(url, timeout=_SERVER_TIMEOUT).get("/health")
    except RequestFailed as error:
        return str(error).removesuffix(".")
    return None


def _server_environment(facts: RunFacts) -> Lines:
    """Whether vLLM is installed where `mt-grpo serve` looks for it."""
    if not facts.args.use_vllm or facts.local_port is None:
        yield OK, "vLLM is not needed on this machine", ""
        return
    found, mend = server_vllm()
    if found:
        yield WARN if mend else OK, found, mend
    else:
        yield FAIL, NO_VLLM, INSTALL_VLLM


def _ports(facts: RunFacts) -> Lines:
    """Whether the ports of the run are free, or taken by its own server."""
    port, metrics = facts.local_port, facts.args.metrics_address
    if metrics is not None:
        with serving(metrics, "run", dict):
            yield OK, f"Prometheus can read at {metrics}", ""
    if facts.colocated:
        first, last = facts.args.vllm_server_port, facts.args.vllm_server_port + len(facts.urls) - 1
        taken = [str(each) for each in range(first, last + 1) if not is_free(each)]
        if taken:
            mend = "give the run another `vllm_server_port`: its servers take that one and those after it"
            yield FAIL, f"port {', '.join(taken)} is taken, where the trainer starts a server", mend
        else:
            yield OK, f"port {first}{f' to {last}' if last > first else ''} is free", ""
    elif facts.args.use_vllm and port is not None:
        if is_free(port):
            yield OK, f"port {port} is free for the server", ""
        elif _server_fault(facts.urls[0]) is None:
            yield OK, f"the server listens on port {port}", ""
        else:
            mend = "give server and trainer another `vllm_server_port`"
            yield FAIL, f"port {port} is taken by another program", mend
    if facts.processes > 1:
        if is_free(MEETING_PORT):
            yield OK, f"port {MEETING_PORT} is free for the processes to meet", ""
        else:
            mend = "end what holds it, or give accelerate another `main_process_port`"
            yield FAIL, f"port {MEETING_PORT}, where the processes meet, is taken", mend
    elif not facts.args.use_vllm and metrics is None:
        yield OK, "none is needed", ""


def _trackers(facts: RunFacts) -> Lines:
    """Whether the packages of `report_to` are installed, and the Hub can be pushed to."""
    check_trackers(facts.args)
    if facts.args.push_to_hub:
        check_push(facts.args)
    yield OK, f"metrics go to {', '.join([*facts.args.report_to, 'metrics.jsonl'])}", ""


def _output(facts: RunFacts) -> Lines:
    """Whether the run can begin in its folder."""
    folder = facts.args.output_dir
    check_writable(folder)
    check_folder(facts.args, facts.name if Path(facts.recipe.model.model_name_or_path).exists() else "")
    yield OK, f"the run can begin in {folder}", ""


CHECKS: dict[str, Check] = {
    "processes": _processes,
    "device": _device,
    "model": _model,
    "rows": _rows,
    "template": _template,
    "prompt": _prompt,
    "lengths": _lengths,
    "tools": _tools,
    "environment": _environment,
    "sandbox": _sandbox,
    "server": _server,
    ".venv-vllm": _server_environment,
    "ports": _ports,
    "report_to": _trackers,
    "output_dir": _output,
}
"""Checks that come before the plan, by name."""
