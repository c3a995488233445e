"""
The files of a run's conversations: their names, columns, types and units.

    output_dir/
      rollouts/
        index.jsonl                        the commit log: a line per conversation, credit, update and step
        index.rank{r}.jsonl                the same, of a batch that failed, by the process r > 0
        {mode}-{step}-{k}.rank{r}.parquet          ROLLOUTS: what was sampled and scored
        credit-{mode}-{step}-{k}.rank{r}.parquet   CREDIT: what each turn was credited with
        updates-{step}.rank{r}.parquet             UPDATES: what the trainer computed per token in an optimiser step
      tokenizer/                           the tokenizer, as `save_pretrained` writes it

`mode` is `train`, `eval`, or `discarded` for those in whose place others were sampled. `step` counts optimiser steps
from 0: the number of steps that were taken before. `k` tells batches of one step apart: for `train` the micro-batch of
the step at which it was sampled, for `eval` the batch of the evaluation; for `discarded` that of `train`, plus
`gradient_accumulation_steps` for each earlier attempt. `r` is the process.

A session, `{mode}-{step:06d}-{k:06d}-{number:06d}`, names a conversation in all of these files; `number` is its row in
the batch of all processes. `number // group_size` is its group, `number % group_size` its place in the group. A
resumed run removes what was recorded after its checkpoint, see `trim`. Where a session occurs again all the same, as
when `trainer.train()` is called twice, the last one counts.

Pages of the Parquet files have checksums, and the index has one of each file and of each of its own lines.
"""

from __future__ import annotations

import pyarrow as pa

FOLDER = "rollouts"
INDEX = "index.jsonl"
TOKENIZER = "tokenizer"
TOKENIZER_FILE = "tokenizer/tokenizer.json"
TEMPLATE_FILE = "tokenizer/chat_template.jinja"
MODES = ("train", "eval", "discarded")
VERSION = 1
ROW_GROUP = 16
"""Rows of a row group: what is read to show one conversation."""


_SESSION = [
    pa.field("session", pa.string(), nullable=False),
    pa.field("mode", pa.string(), nullable=False),
    pa.field("step", pa.int32(), nullable=False),
    pa.field("k", pa.int32(), nullable=False),
]

ROLLOUTS = pa.schema(
    [
        *_SESSION,
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),
        pa.field("member", pa.int32(), nullable=False),
        pa.field("stop", pa.string()),
        pa.field("reward", pa.float64()),
        pa.field("turn_rewards", pa.list_(pa.float64()), nullable=False),
        pa.field("weights", pa.string(), nullable=False),
        pa.field("record", pa.string(), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("node_parent", pa.list_(pa.int32()), nullable=False),
        pa.field("node_turn", pa.list_(pa.int32()), nullable=False),
        pa.field("node_size", pa.list_(pa.int32()), nullable=False),
        pa.field("num_turns", pa.int32(), nullable=False),
        pa.field("tip", pa.int32(), nullable=False),
    ]
)
"""
A row per conversation.

| column | unit | what |
| --- | --- | --- |
| `session`, `mode`, `step`, `k`, `rank`, `group`, `member` | | see above |
| `stop` | | why it ended, a `StopReason` |
| `reward` | weighted | sum of all rewards times their weights; null where none applies |
| `turn_rewards` | weighted | the same of turn rewards, per turn; null where none applies to a turn |
| `weights` | JSON | weight of each reward by name |
| `record` | JSON | `Trajectory.to_dict()` without `tree` and `messages` |
| `tokens` | ids | token ids of all nodes of the token tree, in the order of the nodes |
| `logprobs` | nats | the engine's log-probs, exact, of the nodes whose `node_turn` is not -1, in their order |
| `node_parent` | | node that each node continues; -1: none |
| `node_turn` | | turn that sampled each node; -1: context |
| `node_size` | tokens | of each node |
| `num_turns`, `tip` | | turns in the tree; node of the latest token |

`record` has the prompt, turns with their calls and replies, rewards by name, the dataset row and more. Its times are
in seconds: `start` of the conversation, of each turn and of each call since 1970 (UTC), and `seconds` that each took.
"""

_PART = pa.struct(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("values", pa.list_(pa.float64()), nullable=False),
        pa.field("scales", pa.list_(pa.float64())),
    ]
)

CREDIT = pa.schema(
    [
        *_SESSION,
        pa.field("advantages", pa.list_(pa.float32()), nullable=False),
        pa.field("parts", pa.list_(_PART)),
    ]
)
"""
A row per conversation.

| column | unit | what |
| --- | --- | --- |
| `session`, `mode`, `step`, `k` | | see above |
| `advantages` | | advantage per turn |
| `parts` | | what the advantage is the sum of: each part's `name`, and per turn `values` and `scales` |

A value is divided by its scale already. `scales` is null where no single number divides, an entry of it where the part
does not occur. `parts` is empty where the rule says none, and no column in runs of earlier versions.
"""

LATER = ("parts",)
"""Columns that runs of earlier versions lack."""

UPDATES = pa.schema(
    [
        *_SESSION,
        pa.field("updated_step", pa.int32(), nullable=False),
        pa.field("columns", pa.list_(pa.int32()), nullable=False),
        pa.field("difference", pa.list_(pa.float16()), nullable=False),
        pa.field("entropies", pa.list_(pa.float16()), nullable=False),
        pa.field("ratios", pa.list_(pa.float16()), nullable=False),
        pa.field("clipped", pa.list_(pa.int8()), nullable=False),
    ]
)
"""
A row per conversation and optimiser step that trains on it. Lists have an entry per trained token.

| column | unit | what |
| --- | --- | --- |
| `session`, `mode`, `step`, `k` | | of the conversation, see above |
| `updated_step` | | `step` of the update |
| `columns` | | position among the tokens after the prompt, in depth-first order of the token tree |
| `difference` | nats | the trainer's log-prob minus the engine's, before the update |
| `entropies` | nats | of the trainer's distribution |
| `ratios` | | probability before the update, divided by the one that the loss compares it with |
| `clipped` | | 1 where the loss clips the ratio, so that the token has no gradient |

A conversation that is trained in several passes (`num_iterations`) has a row in several files.
"""


def session_id(mode: str, step: int, k: int, number: int) -> str:
    """The name of a conversation in a run; training names a `Trajectory` in the same way."""
    return f"{mode}-{step:06d}-{k:06d}-{number:06d}"


def image_file(digest: str) -> str:
    """The file of an image, by its content."""
    return f"image_{digest}.png"


def sound_file(digest: str) -> str:
    """The file of a sound, by its content."""
    return f"sound_{digest}.wav"


def rollouts_file(mode: str, step: int, k: int, rank: int) -> str:
    """Name of the file of a batch's conversations."""
    return f"{mode}-{step}-{k}.rank{rank}.parquet"


def credit_file(mode: str, step: int, k: int, rank: int) -> str:
    """Name of the file of a batch's credit."""
    return f"credit-{mode}-{step}-{k}.rank{rank}.parquet"


def updates_file(step: int, rank: int) -> str:
    """Name of the file of an optimiser step."""
    return f"updates-{step}.rank{rank}.parquet"
