"""
One batch as it passes through the methods that TRL calls: the rows that are sampled, the columns that are trained, and
how these are dealt out to micro-batches.
"""

from __future__ import annotations

import asyncio
import heapq
import io
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import gather
from datasets import Dataset, IterableDataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mt_grpo.concurrency import in_waiting_thread, run
from mt_grpo.credit import Credit, RewardBatch, without_signal
from mt_grpo.envs.source import close_environments
from mt_grpo.forward.packing import FlatTree, unique_tokens
from mt_grpo.forward.routes import NO_ROUTE
from mt_grpo.media import media_to_digests, part_text
from mt_grpo.rewards import Scores, completion_ids, spread
from mt_grpo.rollout import RolloutRequest, TokenRow, derive_seed
from mt_grpo.rollout.policy import Again
from mt_grpo.rollout.runner import Branching
from mt_grpo.rollout.token_row import AnswerLeaves
from mt_grpo.runlog.files import to_json
from mt_grpo.runlog.schema import session_number
from mt_grpo.token_tree import TokenTree
from mt_grpo.trajectory import Message, Row, Trajectory, visible


@dataclass
class Staleness:
    """How a batch came to be trained: how old its samples are, and what was waited for."""

    turns: list[tuple[int, int]] = field(default_factory=list)
    ready: float = 0.0
    wait_seconds: float = 0.0
    sync_seconds: float = 0.0
    effective: float | None = None


Columns = dict[str, Any]
"""Columns of rows that are trained: tensors, and the list of the rows' images."""


@dataclass
class RolloutBatch:
    """The rows that this process samples and scores together, filled in step by step; lists have an entry per row."""

    mode: str  # `"train"` or `"eval"`
    rows: list[Row]  # of the dataset; a prompt occurs once per answer
    fills: list[bool]  # whether a row only fills up the last batch of an evaluation; it is not sampled
    branching: Branching | None = None
    group_size: int = 1
    trajectories: list[Trajectory] = field(default_factory=list)  # as they end; once all have ended, those of the rows
    token_rows: list[TokenRow] = field(default_factory=list)  # the trajectories as tokens
    rewards: RewardBatch = None  # type: ignore[assignment]  # of all processes, once they are judged
    rewards_per_func: Tensor = None  # type: ignore[assignment]  # (B, num_rewards), NaN where one does not apply
    extra: dict[str, list[Any]] = field(default_factory=dict)  # what reward functions log per row, by name
    scores: Scores | None = None  # of this process
    credit: Credit = None  # type: ignore[assignment]  # of all processes, once they are judged
    taught: bool = False  # whether the teacher has read them
    attempt: int = 0  # how often the rows were sampled before
    discarded: list[list[Trajectory]] = field(default_factory=list)  # those whose place later ones took, by attempt
    sampled_again: int = 0  # groups, counted as often as they were sampled again
    leaves: dict[str, list[AnswerLeaves]] = field(default_factory=dict)
    """By reward, the right answers that the policy's next forward scores."""
    answered: set[str] = field(default_factory=set)  # rewards whose right answers were scored
    staleness: Staleness = field(default_factory=Staleness)
    again: Again | None = None  # turns of a recorded conversation that all begin with

    @property
    def advantages(self) -> Tensor:
        """The advantages of the trajectories of all processes, shape `(B, K)`."""
        return self.credit.advantages

    @property
    def longest(self) -> int:
        """Tokens of the longest row, prompt included, or of the longest path to a right answer."""
        leaves = longest_path(tree for of_row in self.leaf_trees for tree in of_row)
        return max(leaves, *(len(row.prompt_ids) + len(row.ids) for row in self.token_rows))

    @property
    def has_signal(self) -> Tensor:
        """The rows of this process whose group has a signal, `(B,)`, bool."""
        first = PartialState().process_index * len(self.rows)
        silent = without_signal(self.advantages, self.group_size).repeat_interleave(self.group_size)
        return ~silent[first : first + len(self.rows)]

    @property
    def leaf_trees(self) -> list[list[TokenTree]]:
        """The trees of `leaves`, by row and reward."""
        return [[each.tree for each in of_row] for of_row in zip(*self.leaves.values(), strict=True)]

    @property
    def counted(self) -> list[Trajectory]:
        """The trajectories that were run. What stands for a padding row has no stop reason."""
        return [trajectory for trajectory in self.trajectories if trajectory.stop_reason is not None]

    def add_texts(self, tokenizer: PreTrainedTokenizerBase, rows_had_text: bool) -> None:
        """Adds what reward functions in TRL's form get where prompts are or were text."""
        for row, trajectory in zip(self.rows, self.trajectories, strict=True):
            prompt = row["prompt"]
            if isinstance(prompt, str) or rows_had_text:
                said = tokenizer.decode(completion_ids(trajectory), skip_special_tokens=True)
                asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
                if isinstance(asked, list):  # beside images
                    asked = "".join(part.get("text", "") for part in asked)
                trajectory.texts = asked, said

    def add_extra(self, name: str, values: Sequence[object]) -> list[Any]:
        """Takes what a reward function logs of the conversations that it judged; returns it per row."""
        self.extra[name] = self.fill_up(spread(values, self.counted))
        return self.extra[name]

    def fill_up(self, values: list[Any], absent: Callable[[int], object] = lambda index: None) -> list[Any]:
        """Adds to the values of the rows that count `absent(index)` for each row that only fills up."""
        rest = iter(values)
        return [absent(index) if fill else next(rest) for index, fill in enumerate(self.fills)]

    def fill_up_scores(self, scores: Scores) -> Scores:
        """Adds to the scores of the rows that count `None` for the others."""
        return Scores(
            [self.fill_up(values, lambda index: []) for values in scores.turn],
            [self.fill_up(values) for values in scores.outcome],
            [self.fill_up(values, lambda index: []) for values in scores.state],
        )

    @contextmanager
    def open_environments(self) -> Iterator[None]:
        """Closes the environments in the end: rewards may look at them, and nothing leaves them open."""
        try:
            yield
        finally:
            trajectories = [*self.trajectories, *chain(*self.discarded)]
            if any(trajectory.environment is not None for trajectory in trajectories):
                run(close_environments(trajectories))

    async def handing_over(
        self, run: Callable[..., Coroutine[object, object, list[Trajectory]]], take: Callable[[RolloutBatch], None]
    ) -> list[Trajectory]:
        """
        Runs the conversations; `take` gets those that have ended meanwhile, in the thread that waits, and nobody keeps
        them: all together may be more than fits into memory.
        """
        ended: asyncio.Queue[Trajectory | None] = asyncio.Queue()

        def note(trajectory: Trajectory) -> None:
            self.trajectories.append(trajectory)  # those that nobody takes have environments to close
            ended.put_nowait(trajectory)

        running = asyncio.ensure_future(run(on_finish=note, returns=False))
        running.add_done_callback(lambda done: ended.put_nowait(None))
        try:
            while (first := await ended.get()) is not None:
                together = [first]
                while not ended.empty() and (another := ended.get_nowait()) is not None:
                    together.append(another)
                rows = [self.rows[session_number(each.session)] for each in together]
                part = RolloutBatch(self.mode, rows, [False] * len(rows), None, self.group_size, together)
                await in_waiting_thread(partial(take, part))
                del self.trajectories[: len(together)]
                if running.done() and ended.empty():  # the last one came with them
                    break
        finally:
            running.cancel()
            await asyncio.wait([running])
        return running.result()

    def requests(self, first: int, moment: tuple[int, ...], seed: int) -> list[RolloutRequest]:
        """The conversations to run, from row `first` of all processes on; `seed` and `moment` decide what is drawn."""
        requests = []
        moment = (*moment, self.attempt) if self.attempt else moment
        for number, (row, fills) in enumerate(zip(self.rows, self.fills, strict=True), first):
            if fills:
                continue
            session = "-".join([self.mode, *(f"{part:06d}" for part in (*moment, number))])
            columns = {name: value for name, value in row.items() if name != "prompt"}
            prompt = row["prompt"]
            draw = derive_seed(seed, self.mode, *moment, number, media_to_digests(prompt))
            if self.again is not None:  # else the first would draw what was drawn
                draw = derive_seed(draw, self.again.turns)
            requests.append(RolloutRequest(prompt, session, columns, draw, self.again))
        return requests

    def answer(self, means: list[list[list[float]]]) -> None:
        """Takes the mean log-probs of `leaves`, by row, reward and turn, as those of the right answers."""
        for trajectory, of_row, *leaves in zip(self.trajectories, means, *self.leaves.values(), strict=True):
            for name, of_reward, values in zip(self.leaves, leaves, of_row, strict=True):
                of_turns = dict(zip(of_reward.turns, values, strict=True))
                trajectory.answer_logprobs[name] = [of_turns.get(turn.index) for turn in trajectory.turns]
        self.answered |= self.leaves.keys()
        self.leaves = {}

    def replace(self, again: RolloutBatch) -> None:
        """Takes the trajectories, scores and extra values of the rows that another batch has sampled again."""
        fields = ("turn", "outcome", "state")
        scores = [each for name in fields for each in getattr(self.scores, name)]
        others = [each for name in fields for each in getattr(again.scores, name)]
        rows = [row for row, fills in enumerate(again.fills) if not fills]
        self.discarded.append([self.trajectories[row] for row in rows])
        for row in rows:
            self.trajectories[row] = again.trajectories[row]
            for values, other in zip(scores, others, strict=True):
                values[row] = other[row]
            for name in self.extra.keys() | again.extra.keys():
                values = self.extra.setdefault(name, [None] * len(self.rows))
                values[row] = again.extra[name][row] if name in again.extra else None

    def leave_out(self, pad_token_id: int, mask_truncated: bool) -> None:
        """Masks completions of conversations that failed, or, with `mask_truncated`, were cut; none stays empty."""
        for trajectory, row in zip(self.trajectories, self.token_rows, strict=True):
            if not row.ids:
                row.ids, row.logprobs = [pad_token_id], [float("nan")]
                row.mask, row.turns, row.parent = [0], [0], [-1]
            elif trajectory.failed or mask_truncated and (end := trajectory.stop_reason) and end.is_truncated:
                row.mask = [0] * len(row.mask)
        masked = next((row for row in self.token_rows if not any(row.mask)), None)
        if masked is not None and all(len(row.ids) == 1 for row in self.token_rows):
            # TRL takes columns of one token for one value per sequence, and counts those of masked ones in its means
            masked.ids, masked.logprobs = [*masked.ids, pad_token_id], [*masked.logprobs, float("nan")]
            masked.mask, masked.turns, masked.parent = [0, 0], masked.turns * 2, [-1, 0]
            masked.routes += NO_ROUTE.to_bytes() * len(masked.routes)

    def generated(self, media_token: int | None = None) -> tuple[Any, ...]:
        """The result of TRL's `_generate`, which decodes the ids, so that those of images are `media_token` here."""

        def known(ids: list[int]) -> list[int]:
            return ids if media_token is None else [media_token if token < 0 else token for token in ids]

        return (
            [known(row.prompt_ids) for row in self.token_rows],
            [known(row.ids) for row in self.token_rows],
            [row.mask for row in self.token_rows],
            [as_text(trajectory.completion) for trajectory in self.trajectories],
            [row.logprobs for row in self.token_rows],
            {},  # fields that reach rewards: ours get the trajectory
            None,  # images of prompts
            [],  # images of tools
        )


def longest_path(trees: Iterable[TokenTree]) -> int:
    """Tokens of the longest path to a turn of any tree, at least 1."""
    return max([1, *(len(tree.path_of_turn(turn)) for tree in trees for turn in range(tree.num_turns))])


def as_text(said: str | list[Message]) -> str | list[dict[str, str | None]]:
    """A message list for TRL's table of completions: each value is text, parts in words, and what is no text JSON."""
    if isinstance(said, str):
        return str(visible(said))
    return [{name: _text(name, value) for name, value in message.items()} for message in said]


def _text(name: str, value: object) -> str | None:
    if value is None:
        return None
    if name == "content" and isinstance(value, list):
        value = "\n".join(map(part_text, value))
    return str(visible(value if isinstance(value, str) else to_json(value)))


class EvaluationRows:
    """Tells a dataset's rows from padding rows, with which accelerate fills up an evaluation's last batch."""

    def __init__(self, dataset: Dataset | IterableDataset, generations: int, accelerator: Accelerator) -> None:
        self.dataset = dataset
        """What to load: counts its rows as they are read, where their number is not known."""
        self._generations, self._accelerator = generations, accelerator
        self._batches = 0
        self.sizes: list[int] = []
        """Rows of all processes that count, per batch."""
        streams = isinstance(dataset, IterableDataset)
        # accelerate gives each process shards of its own where there are enough: they are not filled up
        shards = dataset.num_shards if streams else 0
        self._filled = accelerator.num_processes > 1 and shards < accelerator.num_processes
        self._rows = 0 if streams else len(dataset)
        if streams and self._filled:
            self.dataset = dataset.map(self._count, with_indices=True)

    def _count(self, row: Row, index: int) -> Row:
        self._rows = index + 1
        return row

    def fills(self, size: int) -> list[bool]:
        """For each of this process's next `size` rows, whether it is padding. This is a collective call."""
        first = (self._batches * self._accelerator.num_processes + self._accelerator.process_index) * size
        self._batches += 1
        fills = [self._filled and first + index >= self._rows * self._generations for index in range(size)]
        counts = gather(torch.tensor([size - sum(fills)], device=self._accelerator.device))
        self.sizes.append(int(counts.sum()))
        return fills


TOKENS_OF_ALL = ("cispo", "dapo", "vespo")
"""Losses that TRL divides by `num_items_in_batch`, the tokens that are trained in the whole generation batch."""


def leave_out(output: Columns, kept: torch.Tensor) -> None:
    """Keeps only some rows `(B,)` in the loss; `share_out` does the rest in micro-batches. A collective call."""
    output["kept"] = kept
    output["tool_mask"] = output["tool_mask"] * kept[:, None]
    trained = (output["completion_mask"] * output["tool_mask"]).sum()
    output["num_items_in_batch"] = gather(trained.reshape(1)).sum()


def share_out(batches: list[Columns], loss_type: str) -> None:
    """Gives micro-batches the factor by which losses grow that TRL divides by rows or micro-batches. Collective."""
    if loss_type in TOKENS_OF_ALL:
        return
    if loss_type == "bnpo":
        counts = [bool((batch["completion_mask"] * batch["tool_mask"]).any()) for batch in batches]
        count = torch.tensor([sum(counts), len(counts)])
    else:
        kept = torch.cat([batch["kept"] for batch in batches])
        count = torch.stack([kept.sum(), torch.tensor(len(kept), device=kept.device)])
    counted, total = gather(count.to(batches[0]["kept"].device)[None]).sum(dim=0).tolist()
    for batch in batches:
        batch["loss_factor"] = torch.tensor(total / max(counted, 1), device=batch["kept"].device)


IMAGES = "row_images"
"""The column of a batch with the images of each row, where a row has some: by id their size and inputs."""


TOP = "teacher_top"
"""
The column of a batch with a teacher's likeliest tokens in the place of each token, `(B, T, 2, k)`: their ids, and
their log-probs; NaN where a teacher did not read.
"""


# A batch as columns, and as trees


def token_columns(rows: list[TokenRow], output: Columns) -> Columns:
    """What our forward needs besides TRL's ids, padded as these; `parent`, `routes`, images only if there are some."""
    prompts, completions = output["prompt_ids"], output["completion_ids"]
    columns: Columns = {"turn_ids": _padded([row.turns for row in rows], completions)}
    if any(row.parent != list(range(-1, len(row.ids) - 1)) for row in rows):
        columns["parent"] = _padded([row.parent for row in rows], completions)
    width = max(len(row.routes) // len(row.ids) for row in rows)
    if width:
        before, after = (
            torch.full((*ids.shape, width), NO_ROUTE, dtype=torch.uint8) for ids in (prompts, completions)
        )
        for number, row in enumerate(rows):
            if row.routes:
                before[number, before.size(1) - len(row.prompt_ids) :] = _routes(row.prompt_routes, width)
                after[number, : len(row.ids)] = _routes(row.routes, width)
        columns |= {"prompt_routes": before.to(prompts.device), "routes": after.to(prompts.device)}
    if any(row.media for row in rows):  # each has an id of its own, where TRL's ids have the model's
        columns[IMAGES] = [{number: (image.size, image.inputs) for number, image in row.media.items()} for row in rows]
        columns["prompt_ids"], columns["completion_ids"] = prompts.clone(), completions.clone()
        for number, row in enumerate(rows):
            columns["prompt_ids"][number, prompts.size(1) - len(row.prompt_ids) :] = torch.tensor(row.prompt_ids)
            columns["completion_ids"][number, : len(row.ids)] = torch.tensor(row.ids)
    return columns


def _padded(rows: list[list[int]], like: Tensor) -> Tensor:
    """Rows of integers in the shape of `like`, `(B, T)`, padded with 0."""
    padded = torch.zeros_like(like)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = torch.tensor(values, device=like.device)
    return padded


def _routes(routes: bytes, width: int) -> Tensor:
    return torch.from_numpy(np.frombuffer(routes, np.uint8).reshape(-1, width).copy())


def row_tree(row: TokenRow) -> FlatTree:
    """A row as a tree."""
    before, size = len(row.prompt_ids), len(row.ids)
    turns = np.full(before + size, -1, dtype=np.int64)
    turns[before:] = np.where(np.array(row.mask) > 0, row.turns, -1)
    parent = routes = None
    if row.parent != list(range(-1, size - 1)):
        parent = np.r_[np.arange(-1, before - 1), np.array(row.parent, dtype=np.int64) + before]
    if row.routes:
        routes = np.frombuffer(row.prompt_routes + row.routes, np.uint8).reshape(before + size, -1)
    return FlatTree(np.array(row.prompt_ids + row.ids, dtype=np.int64), turns, parent, routes)


def batch_trees(columns: Columns) -> list[FlatTree]:
    """The rows of a batch that has `token_columns`, as trees."""
    arrays = {
        name: value.detach().cpu().numpy()
        for name, value in columns.items()
        if name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "turn_ids")
        or (name in ("parent", "prompt_routes", "routes") and value is not None)
    }
    trees = []
    for row, (prompt, known) in enumerate(zip(arrays["prompt_ids"], arrays["prompt_mask"].astype(bool), strict=True)):
        prompt, size = prompt[known], int(arrays["completion_mask"][row].sum())
        completion, mask, turn = (arrays[name][row][:size] for name in ("completion_ids", "tool_mask", "turn_ids"))
        turns = np.r_[np.full(len(prompt), -1), np.where(mask > 0, turn, -1)]
        parent = routes = None
        if "parent" in arrays:
            parent = np.r_[np.arange(-1, len(prompt) - 1), arrays["parent"][row][:size] + len(prompt)]
        if "routes" in arrays:
            routes = np.concatenate([arrays["prompt_routes"][row][known], arrays["routes"][row][:size]])
        trees.append(FlatTree(np.r_[prompt, completion], turns, parent, routes))
    return trees


# Which process trains which rows in which micro-batch, so that none waits long for another


def rebalance(batches: Sequence[Columns], group_size: int) -> list[Columns]:
    """
    Distributes the rows of all ranks over micro-batches again: a group's in one, where they share their prompt, with
    about as many unique tokens in each. Every rank keeps its number of rows and micro-batches. Columns move only if
    micro-batches hold whole groups, or a group whole micro-batches.
    """
    state = PartialState()
    size = len(batches[0]["group_ids"])
    rows: Columns = {
        key: torch.cat([batch[key] for batch in batches])
        for key, value in batches[0].items()
        if isinstance(value, Tensor) and value.dim()
    }
    images = [row for batch in batches for row in batch.get(IMAGES) or [{}] * size]
    if any(images):
        rows[IMAGES] = images
    order = rows["group_ids"].argsort(stable=True)
    if size % group_size and group_size % size:
        mine = [_take(rows, order)]
    else:
        pieces = [_take(rows, part) for part in order.split(min(size, group_size))]
        tokens = [unique_tokens(batch_trees(piece)) for piece in pieces]
        weights = gather(torch.tensor(tokens, device=order.device)).tolist()
        plan = _assign(weights, state.num_processes, len(batches))
        first = state.process_index * len(pieces)
        parcels: list[dict[int, Columns]] = [
            {piece: pieces[piece - first] for step in plan for piece in step[rank] if 0 <= piece - first < len(pieces)}
            for rank in range(state.num_processes)
        ]
        received = {piece: part for parcel in exchange(parcels, order.device) for piece, part in parcel.items()}
        mine = [received[piece] for step in plan for piece in step[state.process_index]]
    dealt = _join(mine)
    rest = {key: value for key, value in batches[0].items() if key not in (*rows, IMAGES)}
    return [
        {**rest, **{key: value[step * size : (step + 1) * size] for key, value in dealt.items()}}
        for step in range(len(batches))
    ]


def _assign(weights: Sequence[float], ranks: int, steps: int) -> list[list[list[int]]]:
    """Assigns pieces of work to micro-steps, and within each to ranks."""

    def cost(bin: list[int]) -> float:
        return sum(weights[piece] for piece in bin)

    bins = sorted(_balance(weights, ranks * steps), key=cost, reverse=True)
    loads, plan = [0.0] * ranks, []
    for start in range(0, len(bins), ranks):
        step: list[list[int]] = [[]] * ranks
        idlest = sorted(range(ranks), key=loads.__getitem__)
        for rank, bin in zip(idlest, bins[start:], strict=False):
            step[rank] = bin
            loads[rank] += cost(bin)
        plan.append(step)
    # in the order of the prompts: long conversations must not all come in the first optimiser step
    return sorted(plan, key=lambda step: min(map(min, step)))


def exchange(parcels: list[Any], device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Sends `parcels[rank]` to each rank of a group; returns those for this rank, with tensors on `device`."""
    if len(parcels) == 1:
        return parcels
    blobs = []
    for parcel in parcels:
        buffer = io.BytesIO()
        torch.save(parcel, buffer)
        blobs.append(torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8))
    sizes = torch.tensor([len(blob) for blob in blobs], device=device)
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes, group=group)
    arrived = torch.empty(int(coming.sum()), dtype=torch.uint8, device=device)
    dist.all_to_all_single(arrived, torch.cat(blobs).to(device), coming.tolist(), sizes.tolist(), group)
    return [
        torch.load(io.BytesIO(part.numpy().tobytes()), map_location=device, weights_only=True)
        for part in arrived.cpu().split(coming.tolist())
    ]


def _take(rows: Columns, index: Tensor) -> Columns:
    """Takes some rows, without padding that none of them needs."""
    prompt = int(rows["prompt_mask"][index].sum(dim=1).max())
    completion = int(rows["completion_mask"][index].sum(dim=1).max())
    taken: Columns = {}
    for key, value in rows.items():
        if key == IMAGES:
            taken[key] = [value[row] for row in index.tolist()]
            continue
        part = value[index]
        if key.startswith("prompt_"):
            part = part[:, part.size(1) - prompt :].clone()
        elif value.shape[:2] == rows["completion_ids"].shape:
            part = part[:, :completion].clone()
        taken[key] = part
    return taken


def _join(pieces: list[Columns]) -> Columns:
    images = [row for piece in pieces for row in piece.pop(IMAGES, [{}] * len(piece["group_ids"]))]
    if any("parent" in piece for piece in pieces):  # a rank on which no history was rewritten sent none
        for piece in pieces:
            chain = torch.arange(piece["completion_ids"].size(1), device=piece["completion_ids"].device) - 1
            piece.setdefault("parent", chain.expand_as(piece["completion_ids"]))
    for name, ids in (("prompt_routes", "prompt_ids"), ("routes", "completion_ids")):
        sent = [piece[name] for piece in pieces if name in piece]
        for piece in pieces if sent else []:  # a rank whose conversations all failed sent none
            piece.setdefault(name, sent[0].new_full((*piece[ids].shape, sent[0].size(2)), NO_ROUTE))
    # TRL pads ratios with 1, and its VESPO multiplies those of the padding too
    fills = {"importance_sampling_ratio": 1.0, "prompt_routes": NO_ROUTE, "routes": NO_ROUTE}
    joined: Columns = {
        key: _stack([piece[key] for piece in pieces], key.startswith("prompt_"), fills.get(key, 0.0))
        for key in pieces[0]
    }
    return {**joined, IMAGES: images} if any(images) else joined


def _stack(parts: list[Tensor], left: bool, fill: float) -> Tensor:
    """Stacks rows. Narrower ones are padded with `fill`, prompts on the left."""
    if parts[0].dim() == 1:
        return torch.cat(parts)
    width = max(part.size(1) for part in parts)

    def widened(part: Tensor) -> Tensor:
        more = width - part.size(1)
        return torch.nn.functional.pad(part, (*(0, 0) * (part.dim() - 2), more * left, more * (not left)), value=fill)

    return torch.cat([widened(part) for part in parts])


def _balance(weights: Sequence[float], num_bins: int) -> list[list[int]]:
    """Distributes items over bins of equal count, the largest to the lightest (Graham's rule with a cap)."""
    room = -(-len(weights) // num_bins)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0.0, bin) for bin in range(num_bins)]
    full = len(weights) - num_bins * (room - 1)  # how many bins may hold `room` items, the rest one fewer
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        load, bin = heapq.heappop(heap)
        while len(bins[bin]) == room - 1 and full == 0:
            load, bin = heapq.heappop(heap)
        full -= len(bins[bin]) == room - 1
        bins[bin].append(item)
        if len(bins[bin]) < room:
            heapq.heappush(heap, (load + weights[item], bin))
    return bins
