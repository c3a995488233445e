"""One batch as it passes through the methods that TRL calls, and the rows that only pad the last one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather
from datasets import Dataset, IterableDataset
from torch import Tensor

from mt_grpo.credit import Credit, RewardBatch
from mt_grpo.media import media_to_digests, part_text
from mt_grpo.rewards import Scores, completion_ids, spread
from mt_grpo.rollout import RolloutRequest, TokenRow, derive_seed
from mt_grpo.rollout.branching import Branching
from mt_grpo.rollout.token_row import AnswerLeaves
from mt_grpo.runlog.files import to_json
from mt_grpo.token_tree import TokenTree
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.trajectory import Message, Trajectory, visible


@dataclass
class Staleness:
    """How a batch came to be trained: how old its samples are, and what was waited for."""

    turns: list[tuple[int, int]] = field(default_factory=list)
    ready: float = 0.0
    wait_seconds: float = 0.0
    sync_seconds: float = 0.0
    effective: float | None = None


@dataclass
class RolloutBatch:
    """
    The rows that this process samples and scores together. It is filled in step by step. Lists have an entry per row.

    Args:
        mode (`str`): `"train"` or `"eval"`.
        rows (`list[dict]`): Rows of the dataset. A prompt occurs once per answer.
        fills (`list[bool]`): Whether a row only fills up the last batch of an evaluation; it is not sampled.
        branching (`Branching`, *optional*): How its conversations branch, where they do.
        group_size (`int`, *optional*, defaults to 1): Conversations of a prompt.
        trajectories (`list[Trajectory]`): Those that are finished, as they end; once all are, those of the rows.
        token_rows (`list[TokenRow]`): The trajectories as tokens.
        rewards (`RewardBatch`, *optional*): Rewards of the trajectories of all processes.
        rewards_per_func (`Tensor`, *optional*): The same with a column per reward, shape `(B, num_rewards)`; NaN where
            one does not apply.
        extra (`dict`): What reward functions log per row (`log_extra`), by name.
        scores (`Scores`, *optional*): The scores of the trajectories of this process.
        credit (`Credit`, *optional*): The advantages of the trajectories of all processes, shape `(B, K)`, and the
            parts that a rule of a user's own says.
        attempt (`int`): How often the rows were sampled before.
        discarded (`list[list[Trajectory]]`): Those of this process whose place later ones took, by attempt.
        sampled_again (`int`): Groups that were sampled again, counted as often as they were.
        leaves (`dict[str, list[AnswerLeaves]]`): By reward, the right answers that the policy's next forward scores.
        answered (`set[str]`): Rewards whose right answers were scored.
        staleness (`Staleness`): How it came to be trained.
    """

    mode: str
    rows: list[dict[str, Any]]
    fills: list[bool]
    branching: Branching | None = None
    group_size: int = 1
    trajectories: list[Trajectory] = field(default_factory=list)
    token_rows: list[TokenRow] = field(default_factory=list)
    rewards: RewardBatch | None = None
    rewards_per_func: Tensor | None = None
    extra: dict[str, list[Any]] = field(default_factory=dict)
    scores: Scores | None = None
    credit: Credit | None = None
    attempt: int = 0
    discarded: list[list[Trajectory]] = field(default_factory=list)
    sampled_again: int = 0
    leaves: dict[str, list[AnswerLeaves]] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    staleness: Staleness = field(default_factory=Staleness)

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
    def leaf_trees(self) -> list[list[TokenTree]]:
        """The trees of `leaves`, by row and reward."""
        return [[each.tree for each in of_row] for of_row in zip(*self.leaves.values(), strict=True)]

    @property
    def counted(self) -> list[Trajectory]:
        """The trajectories that were run. What stands for a padding row has no stop reason."""
        return [trajectory for trajectory in self.trajectories if trajectory.stop_reason is not None]

    def add_texts(self, tokenizer: Any, rows_had_text: bool) -> None:
        """
        Adds what reward functions in TRL's form get where prompts are text, or were before they became messages:
        prompt and completion as text.
        """
        for row, trajectory in zip(self.rows, self.trajectories, strict=True):
            prompt = row["prompt"]
            if isinstance(prompt, str) or rows_had_text:
                said = tokenizer.decode(completion_ids(trajectory), skip_special_tokens=True)
                asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
                if isinstance(asked, list):  # beside images
                    asked = "".join(part.get("text", "") for part in asked)
                trajectory.texts = asked, said

    def add_extra(self, name: str, values: Sequence[Any]) -> list[Any]:
        """Takes what a reward function logs of the conversations that it judged; returns it per row."""
        self.extra[name] = fill_up(spread(values, self.counted), self.fills)
        return self.extra[name]

    def requests(self, first: int, moment: tuple[int, ...], seed: int) -> list[RolloutRequest]:
        """
        The conversations to run. `first` is the first row's number among those of all processes. The run's `seed` and
        the `moment` of the run decide what is drawn.
        """
        requests = []
        moment = (*moment, self.attempt) if self.attempt else moment
        for number, (row, fills) in enumerate(zip(self.rows, self.fills, strict=True), first):
            if fills:
                continue
            session = "-".join([self.mode, *(f"{part:06d}" for part in (*moment, number))])
            columns = {name: value for name, value in row.items() if name != "prompt"}
            prompt = row["prompt"]
            draw = derive_seed(seed, self.mode, *moment, number, media_to_digests(prompt))
            requests.append(RolloutRequest(prompt, session, columns, draw))
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

    def leave_out_routes(self) -> None:
        """Forgets which experts the tokens went to."""
        for row in self.token_rows:
            row.prompt_routes = row.routes = b""

    def leave_out(self, pad_token_id: int, mask_truncated: bool) -> None:
        """
        Masks the completions that must not be trained on: those of conversations that failed, and, with
        `mask_truncated`, those that were cut off. A completion without tokens gets a masked one, for valid shapes.
        """
        for trajectory, row in zip(self.trajectories, self.token_rows, strict=True):
            if not row.ids:
                row.ids, row.logprobs = [pad_token_id], [float("nan")]
                row.mask, row.turns, row.parent = [0], [0], [-1]
            elif trajectory.failed or (mask_truncated and trajectory.stop_reason.is_truncated):
                row.mask = [0] * len(row.mask)

    def generated(self, media_token: int | None = None) -> tuple[Any, ...]:
        """
        The result of TRL's `_generate`. Its completions are for TRL's table, which people read. TRL decodes the ids,
        so those of images are `media_token` here, see `token_columns`.
        """

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
    """
    A prompt or a completion for TRL's table of completions, in which each value of a message has one type: text, with
    parts in words. What is none, such as the calls of a message, is JSON: their arguments are what the model likes.
    """
    if isinstance(said, str):
        return str(visible(said))
    return [{name: _text(name, value) for name, value in message.items()} for message in said]


def _text(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if name == "content" and isinstance(value, list):
        value = "\n".join(map(part_text, value))
    return str(visible(value if isinstance(value, str) else to_json(value)))


def branching(args: MTGRPOConfig, mode: str) -> Branching | None:
    """How the conversations of a batch branch; `None` where they do not, as in an evaluation."""
    return Branching(args.branch_at, args.num_branches) if args.branch_at is not None and mode == "train" else None


class EvaluationRows:
    """
    Tells the rows of a dataset from padding rows, with which accelerate fills up the last batch of an evaluation.
    """

    def __init__(self, dataset: Dataset | IterableDataset, generations: int, accelerator: Accelerator) -> None:
        self.dataset = dataset
        """What to load: counts its rows as they are read, where their number is not known."""
        self._generations, self._accelerator = generations, accelerator
        self._batches = 0
        self.sizes: list[int] = []
        """Rows of all processes that count, per batch."""
        streams = isinstance(dataset, IterableDataset)
        # accelerate gives each process shards of its own where there are enough: they are not filled up
        self._filled = accelerator.num_processes > 1 and not (
            streams and dataset.num_shards >= accelerator.num_processes and not accelerator.split_batches
        )
        self._rows = 0 if streams else len(dataset)
        if streams and self._filled:
            self.dataset = dataset.map(self._count, with_indices=True)

    def _count(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        self._rows = index + 1
        return row

    def fills(self, size: int) -> list[bool]:
        """
        For each row of this process's next batch, of `size` rows, whether it is a padding row. This is a collective
        call.
        """
        first = (self._batches * self._accelerator.num_processes + self._accelerator.process_index) * size
        self._batches += 1
        fills = [self._filled and first + index >= self._rows * self._generations for index in range(size)]
        counts = gather(torch.tensor([size - sum(fills)], device=self._accelerator.device))
        self.sizes.append(int(counts.sum()))
        return fills


def fill_up(values: list[Any], fills: list[bool], absent: Callable[[int], Any] = lambda index: None) -> list[Any]:
    """Adds to the values of the rows that count `absent(index)` for each row that only fills up."""
    rest = iter(values)
    return [absent(index) if fill else next(rest) for index, fill in enumerate(fills)]


def fill_up_scores(scores: Scores, fills: list[bool]) -> Scores:
    """Adds to the scores of the rows that count `None` for the others."""
    return Scores(
        [fill_up(values, fills, lambda index: []) for values in scores.turn],
        [fill_up(values, fills) for values in scores.outcome],
        [fill_up(values, fills, lambda index: []) for values in scores.state],
    )
