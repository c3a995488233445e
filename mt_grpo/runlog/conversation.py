"""
One conversation, put together from the files of a run, which are held against their shapes first; and its messages as
a chat template takes them, so that rendering them gives what the model saw; and as spans, for a collector of traces.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from mt_grpo.media import part_text, token_text
from mt_grpo.runlog.files import to_json
from mt_grpo.runlog.index import is_copy
from mt_grpo.runlog.schema import Row, misfit
from mt_grpo.runlog.writer import Batch, record_of, rollout_lines
from mt_grpo.token_tree import Node, TokenTree
from mt_grpo.trajectory import Trajectory

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


class CorruptRecord(ValueError):
    """A file does not hold a conversation as a run writes it. The message is a clause."""


@dataclass(frozen=True)
class StoredConversation:
    """A conversation's row in its file, and in the index; raises `CorruptRecord` for what no run writes."""

    rollout: Row
    row: Row

    @property
    def record(self) -> Row:
        """The conversation without its tokens."""
        record = _json("record", self.rollout["record"])
        turns = record["turns"]
        if [turn["index"] for turn in turns] != list(range(len(turns))) or len(turns) != len(self.row["turn_rewards"]):
            raise CorruptRecord("its turns are others than the index has")
        if self.row["advantages"] is not None and len(self.row["advantages"]) < len(turns):
            raise CorruptRecord("there are fewer advantages than turns")
        if any(len(values) < len(turns) for values in record["rewards"].get("turn", {}).values()):
            raise CorruptRecord("there are fewer rewards than turns")
        return record

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each reward."""
        return _json("weights", self.rollout["weights"])

    @property
    def tree(self) -> TokenTree:
        """Its token tree, if that is sound."""
        rollout = self.rollout
        lists = [rollout[name] for name in ("node_parent", "node_turn", "node_size", "tokens", "logprobs")]
        turns, tip = rollout["num_turns"], rollout["tip"]
        if any(values is None or None in values for values in lists) or turns is None or tip is None:
            raise CorruptRecord("its token tree has gaps")
        parents, of_turns, sizes, tokens, logprobs = lists
        sampled = sum(size for size, turn in zip(sizes, of_turns, strict=False) if turn >= 0)
        if not len(parents) == len(of_turns) == len(sizes) or (sum(sizes), sampled) != (len(tokens), len(logprobs)):
            raise CorruptRecord("its token tree has other sizes than its tokens")
        if (
            any(not -1 <= parent < len(parents) for parent in parents)
            or any(not -1 <= turn < turns for turn in of_turns)
            or not -1 <= tip < len(parents)
            or min(sizes, default=0) < 0
        ):
            raise CorruptRecord("its token tree is none")
        nodes, at, sampled = [], 0, 0
        for parent, turn, size in zip(parents, of_turns, sizes, strict=True):
            values = [] if turn < 0 else logprobs[sampled : sampled + size]
            nodes.append(vars(Node(parent, tokens[at : at + size], turn, values)))
            if turn >= 0 and min(nodes[-1]["tokens"], default=0) < 0:  # an image's, which no turn samples
                raise CorruptRecord("its token tree is none")
            at, sampled = at + size, sampled + len(values)
        tree = TokenTree.from_dict({"num_turns": turns, "tip": tip, "nodes": nodes})
        if len(tree.depth_first()) < len(nodes):
            raise CorruptRecord("its token tree is a circle")
        return tree

    def both(self) -> tuple[Row, TokenTree]:
        """Its record and its token tree, whose turns have the same tokens."""
        record, tree = self.record, self.tree
        for turn, ids in zip(record["turns"], tree.actions(), strict=False):
            if turn.get("mask") is not None and len(turn["mask"]) != len(ids):
                raise CorruptRecord("the mask of a turn is not one number per token")
        return record, tree

    def turn_texts(self, tokenizer: Tokenizer) -> list[str]:
        """What the model wrote in each turn, without the special token that ended it."""
        special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        actions = self.tree.actions()
        return [
            tokenizer.decode(ids[:-1] if ids and ids[-1] in special else ids, skip_special_tokens=False)
            for ids in actions
        ]

    def plain(self) -> Row:
        """It as `Trajectory.to_dict()` has it."""
        (record, tree), row = self.both(), self.row
        parent = record.get("branch_of")  # of the same batch: its number in it is the last part of both names
        record["branch_of"] = parent and f"{row['session'].rpartition('-')[0]}-{parent.rpartition('-')[2]}"
        record["session"] = row["session"]
        whole = {**record, "tree": tree.to_dict()}
        names = [name for name in Trajectory.__dataclass_fields__ if name in whole]
        return {**{name: whole[name] for name in names}, "messages": messages_of(record)}

    def shown(self, credit: Row | None, updates: list[Row], tokenizer: Tokenizer | None) -> Row:
        """It as the page shows it, in JSON, with `None` for NaN."""
        (record, tree), row = self.both(), self.row
        _check_lists(record, tree, credit, updates)
        nodes, laid = _layout(tree)
        ids = [token for node in laid for token in node.tokens]
        logprobs = [node.logprobs if node.turn >= 0 else [None] * len(node.tokens) for node in laid]
        turn = [node["turn"] for node in nodes for _ in range(node["begin"], node["end"])]
        advantages = None if credit is None else credit["advantages"]
        parts = (credit or {}).get("parts") or []
        for position, each in enumerate(record["turns"]):
            each["advantage"] = None if advantages is None else advantages[position]
            each["parts"] = []
            for part in parts:
                value, scale = _without_nan([part["values"][position], part["scales"] and part["scales"][position]])
                each["parts"].append({"name": part["name"], "value": value, "scale": scale})
        parents, subtree_ends = _ancestry(nodes)
        tokens: Row = {
            "ids": ids,
            "texts": None if tokenizer is None else _token_texts(ids, nodes, tokenizer),
            "turn": turn,
            "parent": parents,
            "subtree_end": subtree_ends,
            "logprobs": _without_nan([value for values in logprobs for value in values]),
            "trainer": [None] * len(ids),
            "entropies": [None] * len(ids),
            "advantages": [None if advantages is None or t < 0 else advantages[t] for t in turn],
        }
        begin = next((node["begin"] for node in nodes if node["turn"] == 0), 0)  # as in `mt_grpo.rollout.token_row`
        shown = []
        for number, update in enumerate(updates):
            at = [begin + column for column in update["columns"]]
            if not all(0 <= place < len(ids) for place in at):
                raise CorruptRecord("an update is of tokens that are not there")
            if not number:
                tokens["entropies"] = _spread(update["entropies"], at, len(ids))
                differences = _spread(update["difference"], at, len(ids))
                tokens["trainer"] = [
                    None if engine is None or difference is None else engine + difference
                    for engine, difference in zip(tokens["logprobs"], differences, strict=True)
                ]
            shown.append(
                {
                    "step": update["updated_step"],
                    "ratios": _spread(update["ratios"], at, len(ids)),
                    "clipped": _spread(update["clipped"], at, len(ids)),
                }
            )
        return {
            "index": row,
            **record,
            "weights": self.weights,
            "nodes": nodes,
            "tokens": tokens,
            "updates": shown,
        }


def _json(name: str, text: Any) -> Any:
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise CorruptRecord(f"`{name}` is no JSON: {error}") from None
    if (wrong := misfit(name, value)) is not None:
        raise CorruptRecord(f"`{name}` is not what a run writes: {wrong}")
    return value


def _check_lists(record: Row, tree: TokenTree, credit: Row | None, updates: list[Row]) -> None:
    turns = max([len(record["turns"]), *(node.turn + 1 for node in tree.nodes)])
    if credit is not None:
        check_credit(credit, turns)
    for update in updates:
        lists = [update[name] for name in ("columns", "difference", "entropies", "ratios", "clipped")]
        if any(values is None or None in values or len(values) != len(lists[0]) for values in lists):
            raise CorruptRecord("the numbers of an update are not one per token")


def check_credit(credit: Row, turns: int) -> None:
    """Raises `CorruptRecord` if a row of a file of credit has fewer numbers than a conversation has turns."""
    if credit["advantages"] is None or len(credit["advantages"]) < turns:
        raise CorruptRecord("there are fewer advantages than turns")
    for part in credit.get("parts") or []:
        if part is None or part["name"] is None or part["values"] is None or None in part["values"]:
            raise CorruptRecord("the parts of its advantages have gaps")
        scales = part["values"] if part["scales"] is None else part["scales"]
        if min(len(part["values"]), len(scales)) < turns:
            raise CorruptRecord("there are fewer parts of advantages than turns")


def messages_of(record: Row) -> list[Row]:
    """The whole conversation of a `record`."""
    return [*record["prompt"], *(part for turn in record["turns"] for part in (turn["message"], *turn["replies"]))]


def words(message: Row) -> str:
    """The text of a message, of its text parts if its content is in parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part_text(part) for part in content)


def _layout(tree: TokenTree) -> tuple[list[Row], list[Node]]:
    """The nodes in depth-first order, with their places."""
    order = tree.depth_first()
    place = {-1: -1} | {index: number for number, index in enumerate(order)}
    nodes: list[Row] = []
    begin = 0
    laid = [tree.nodes[index] for index in order]
    for node in laid:
        end = begin + len(node.tokens)
        known = {"parent": place[node.parent], "turn": node.turn, "begin": begin, "end": end}
        nodes.append({**known, "subtree_end": len(nodes) + 1})
        begin = end
    for entry in reversed(nodes):
        if entry["parent"] >= 0:
            parent = nodes[entry["parent"]]
            parent["subtree_end"] = max(parent["subtree_end"], entry["subtree_end"])
    return nodes, laid


def _ancestry(nodes: list[Row]) -> tuple[list[int], list[int]]:
    """Of each token the one before it, and the end of the tokens below it."""
    parents, ends = [], []
    for node in nodes:
        before = nodes[node["parent"]]["end"] - 1 if node["parent"] >= 0 else -1
        parents += [before, *range(node["begin"], node["end"] - 1)]
        ends += [nodes[node["subtree_end"] - 1]["end"]] * (node["end"] - node["begin"])
    return parents, ends


def _spread(values: list[float], at: list[int], size: int) -> list[float | None]:
    spread: list[float | None] = [None] * size
    for place, value in zip(at, _without_nan(values), strict=True):
        spread[place] = value
    return spread


def _without_nan(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None or not np.isfinite(value) else float(value) for value in values]


def _token_texts(ids: list[int], nodes: list[Row], tokenizer: Tokenizer) -> list[str]:
    """The text of each token; a character of several is with the last, an image's mark with the first."""
    texts: list[str] = []
    for number, node in enumerate(nodes):
        if number == 0 or node["parent"] != number - 1:  # another branch begins
            stream, waiting = DecodeStream(skip_special_tokens=False), list[int]()
        for place in range(node["begin"], node["end"]):
            token = ids[place]
            if token >= 0:
                waiting.append(token)
                try:
                    text = stream.step(tokenizer, token)
                except Exception:  # bytes that are no text: the library raises no narrower one, and goes on no more
                    text = tokenizer.decode(waiting, skip_special_tokens=False)
                    stream = DecodeStream(skip_special_tokens=False)
                waiting = waiting if text is None else []
                texts.append(text or "")
            else:
                texts.append("" if place and ids[place - 1] == token else token_text(token))
    return texts


@dataclass(frozen=True)
class Said:
    """What was said on one way through a conversation, to a turn that nothing follows."""

    messages: list[Row]
    prompt: int
    tools: list[Row] | None
    turns: list[int]


def _parents(turns: list[Row]) -> list[int]:
    """For each turn of a record the turn that its context goes on from; -1 for none."""
    follows = [turn.get("follows") for turn in turns]
    return [index - 1 if after is None or after >= index else after for index, after in enumerate(follows)]


def _added(record: Row, index: int) -> list[Row]:
    """The messages that turn `index` was given after the message of the turn that it goes on from."""
    turn = record["turns"][index]
    given = turn.get("given") or []
    if turn.get("follows") is not None:
        return given
    return [*(record["turns"][index - 1]["replies"] if index else record["prompt"]), *given]


def ways(record: Row, texts: list[str] | None = None) -> Iterator[Said]:
    """Each way through a conversation, in the order of their last turns; none where the model said nothing."""
    turns, before = record["turns"], _parents(record["turns"])
    for leaf in sorted(set(range(len(turns))) - set(before)):
        way = [leaf]
        while before[way[-1]] >= 0:
            way.append(before[way[-1]])
        way.reverse()
        messages = list(map(_as_template_takes, _added(record, way[0])))
        prompt = len(messages)
        for index in way:
            said = turns[index]["message"]
            if texts is not None and said.get("tool_calls"):
                said = {"role": "assistant", "content": texts[index]}
            for message in (*(_added(record, index) if index != way[0] else ()), said):
                _add(messages, _as_template_takes(message))
        tools = turns[leaf].get("tools")
        shown = record.get("tools") if tools is None else tools
        yield Said(messages, min(prompt, len(messages) - 1), shown or None, way)


def _as_template_takes(message: Row) -> Row:
    """A message with text for a content that is null, and calls whose arguments are objects."""
    taken = {name: value for name, value in message.items() if value is not None}
    taken.setdefault("content", "")
    calls = taken.pop("tool_calls", None)
    if isinstance(calls, list) and calls:
        taken["tool_calls"] = [_with_object(call) for call in calls if isinstance(call, dict)]
    return taken


def _with_object(call: Row) -> Row:
    function = call["function"] if isinstance(call.get("function"), dict) else call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except (ValueError, RecursionError):
            read = None
        function = {**function, "arguments": read} if isinstance(read, dict) else function
    return {"type": "function", **call, "function": function} if function is not call.get("function") else call


def _add(messages: list[Row], message: Row) -> None:
    """Adds a message, or what the model went on writing (`continue_last`) to its own before."""
    if messages and message["role"] == messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        messages[-1] = {**messages[-1], **message, "content": words(messages[-1]) + words(message)}
    else:
        messages.append(message)


_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_MOST_WAITING = 2**17  # spans that wait to be sent: a batch comes at once, and what is more than that is lost
_SECONDS = 10_000  # milliseconds that the end of a run waits for what is still to be sent

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Span:
    """One span. Its times are nanoseconds since 1970."""

    name: str
    start: int
    end: int
    error: str | None
    attributes: Row

    @classmethod
    def of(cls, name: str, kind: str, start: float, seconds: float, error: str | None, attributes: Row) -> _Span:
        known = {name: value for name, value in attributes.items() if value is not None}
        times = int(start * 1e9), int((start + seconds) * 1e9)
        return cls(name, *times, error, {"openinference.span.kind": kind, **known})


def spans_of(row: Row, record: Row, model: str | None) -> list[_Span]:
    """
    The spans of a conversation: its own (`AGENT`), one per turn (`LLM`) and per call (`TOOL`). Each message stands in
    a trace once, in the span of the turn before which it came.
    """
    names = ("mode", "step", "k", "group", "member", "reward", "rewards", "turn_rewards", "advantages", "shared_turns")
    known = {**{name: row[name] for name in names}, "branch_of": row["branch_of"], "copy": is_copy(row)}
    begin, session = record["start"] or 0.0, {"session.id": row["session"]}
    about = {
        **session,
        "input.value": row["prompt"],
        "output.value": record.get("answer"),
        "metadata": to_json({**known, "stop_reason": row["stop"], "row": record["row"]}),
    }
    spans = [_Span.of("conversation", "AGENT", begin, record["seconds"], record["error"], about)]
    before = _parents(record["turns"])
    schemas = map(to_json, record.get("tools") or [])
    tools = {f"llm.tools.{number}.tool.json_schema": schema for number, schema in enumerate(schemas)}
    for turn in record["turns"]:
        index, after = turn["index"], before[turn["index"]]
        start = begin if turn["start"] is None else turn["start"]
        metadata = {
            "advantage": known["advantages"] and known["advantages"][index],
            "reward": turn.get("reward"),
            "fork_cause": turn.get("fork_cause"),
        }
        about = {
            **session,
            "llm.model_name": model,
            "llm.token_count.prompt": turn["context_length"],
            "llm.token_count.completion": turn["num_tokens"],
            "llm.token_count.total": turn["context_length"] + turn["num_tokens"],
            "metadata": to_json(metadata),
            "graph.node.id": _node(index),
            "graph.node.parent_id": _node(after) if after >= 0 else None,
            **_numbered("llm.input_messages", list(map(_flat, _added(record, index)))),
            **_numbered("llm.output_messages", [_flat(turn["message"], turn["tool_calls"])]),
            **(tools if after < 0 else {}),
        }
        spans.append(_Span.of(_node(index), "LLM", start, turn["seconds"], turn["error"], about))
        end = begin if turn["start"] is None else turn["start"] + turn["seconds"]
        for call in turn["tool_calls"]:
            about = {
                **session,
                "tool.name": call["name"],
                "tool.parameters": to_json(call["arguments"]),
                "input.value": to_json(call["arguments"]),
                "input.mime_type": "application/json",
                "output.value": call.get("result"),
            }
            start = end if call["start"] is None else call["start"]
            spans.append(_Span.of(call["name"], "TOOL", start, call["seconds"], call["error"], about))
    return spans


def _node(index: int) -> str:
    return f"turn {index + 1}"


def _flat(message: Row, calls: list[Row] | None = None) -> dict[str, str]:
    flat = {"message.role": message["role"], "message.content": words(message)}
    for name in ("tool_call_id", "name"):
        if message.get(name):
            flat[f"message.{name}"] = str(message[name])
    for number, call in enumerate(calls or []):
        prefix = f"message.tool_calls.{number}.tool_call"
        flat[f"{prefix}.function.name"] = call["name"]
        flat[f"{prefix}.function.arguments"] = to_json(call["arguments"])
        if call["id"]:
            flat[f"{prefix}.id"] = call["id"]
    return flat


def _numbered(prefix: str, messages: list[dict[str, str]]) -> dict[str, str]:
    return {
        f"{prefix}.{number}.{key}": value for number, message in enumerate(messages) for key, value in message.items()
    }


class SpanSender:
    """Sends each batch's spans to OpenTelemetry's collector; what cannot be sent is lost."""

    def __init__(self, provider: TracerProvider, model: str | None) -> None:
        self._provider, self._model = provider, model
        self._tracer = provider.get_tracer("mt_grpo")

    @classmethod
    def wanted(cls, model: str | None) -> SpanSender | None:
        """One where a variable names a collector; the SDK is imported there alone."""
        if not any(map(os.environ.get, _ENDPOINTS)):
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            logger.warning("No spans are sent to the collector (%s): `pip install 'mt-grpo[otel]'`.", error)
            return None
        name = os.environ.get("OTEL_SERVICE_NAME", "mt-grpo")
        provider = TracerProvider(resource=Resource.create({"service.name": name, "openinference.project.name": name}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), max_queue_size=_MOST_WAITING))
        return cls(provider, model)

    def send(self, batch: Batch, rank: int, advantages: Sequence[Sequence[float]]) -> None:
        """Queues the spans of a batch's conversations, with the advantage of each turn."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        rows = rollout_lines(batch, rank)
        for row, trajectory, values in zip(rows, batch.trajectories, advantages, strict=True):
            record = json.loads(record_of(trajectory, lambda medium: "[medium]"))
            context = None
            row = {"branch_of": None, "shared_turns": 0, **row, "advantages": list(values)}
            for span in spans_of(row, record, self._model):
                sent = self._tracer.start_span(span.name, context, attributes=span.attributes, start_time=span.start)
                if span.error is not None:
                    sent.set_status(Status(StatusCode.ERROR, span.error))
                context = context or set_span_in_context(sent)
                sent.end(span.end)

    def flush(self) -> None:
        """Waits for what is still to be sent, for a while."""
        self._provider.force_flush(_SECONDS)
