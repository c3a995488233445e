"""
On-policy distillation: what a teacher is shown before each turn that the policy did not see (`sees`), its log-probs of
the tokens that the policy sampled, computed once per batch, the turns that are distilled (`gate`), and the loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from math import isnan, nan
from typing import Any, TypeAlias

import torch
from accelerate import PartialState
from accelerate.utils import gather, gather_object
from datasets import Dataset
from torch import Tensor
from trl import GRPOTrainer

from mt_grpo.errors import ConfigError, describe_error, find_fault, refuse_first
from mt_grpo.forward import ROW_TOKENS
from mt_grpo.forward.media import media_tokens
from mt_grpo.forward.model import score
from mt_grpo.forward.packing import flatten
from mt_grpo.forward.probe import context_length
from mt_grpo.imports import import_object
from mt_grpo.media import part_text
from mt_grpo.rewards import RewardError, RewardFunc, TeacherAgreement, TeacherLogRatio
from mt_grpo.rewards.builtin import first_answer
from mt_grpo.rollout.token_row import AnswerLeaves
from mt_grpo.runlog.files import whole
from mt_grpo.token_tree import TokenTree
from mt_grpo.training.columns import Rows
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.ranks import everywhere
from mt_grpo.training.rollout_batch import TOKENS_OF_ALL, TOP, Columns, RolloutBatch, longest_path
from mt_grpo.training.teacher import Found, Logprobs, ServerTeacher
from mt_grpo.trajectory import Trajectory

LOGPS = "teacher_per_token_logps"
"""The column of a batch with what a teacher makes of its tokens, `(B, T)`, NaN for those that were not sampled."""

_CLIP = 2.0
"""Where the ratio of a token's probability to the one it was sampled with is cut: TRL's `distillation_is_clip`."""

_ANSWER = "answer"
"""The column with the right answer."""

_FEEDBACK = ("feedback", "verifier_log")
"""Where an environment puts its word on a conversation, in `Outcome.info`; the second is that of a task's tests."""

_SUCCESS = 1.0
"""What the first outcome reward gives a conversation that others may learn from: TRL's `success_reward_threshold`."""

_EXPLAINED = "explained"
"""The gate that opens where log-ratios explain outcomes."""

_ROUNDING = 1e-9

_Gate: TypeAlias = str | Callable[[Trajectory], Sequence[bool]]

logger = logging.getLogger(__name__)


class Distillation:
    """Has a trainer's teacher read its batches; refuses hints and a gate that its run cannot have."""

    def __init__(
        self,
        trainer: GRPOTrainer,
        args: MTGRPOConfig,
        rewards: Sequence[RewardFunc],
        outcomes: Sequence[RewardFunc],
        train_dataset: Rows | None = None,
        eval_dataset: Rows | dict[str, Rows] | None = None,
    ) -> None:
        self._trainer = trainer
        self._sees: list[str] = args.teacher.get("sees", []) if isinstance(args.teacher, dict) else []
        self._warned = False
        self._check_hints(rewards, outcomes)
        evaluated = eval_dataset if isinstance(eval_dataset, dict) else {"evaluation": eval_dataset}
        for name, rows in {"training": train_dataset, **evaluated}.items() if "answer" in self._sees else ():
            columns = (rows.column_names or []) if rows is not None else []
            if columns and _ANSWER not in columns:
                raise ConfigError(
                    f"`teacher: {{sees: [answer]}}` takes the right answer from the column {_ANSWER!r}, which the "
                    f"{name} dataset does not have: its columns are {', '.join(columns)}; name the right one with "
                    f"`column_mapping: {{{_ANSWER}: its name}}`."
                )
        self._gate = _load_gate(args, outcomes)

    def _check_hints(self, rewards: Sequence[RewardFunc], outcomes: Sequence[RewardFunc]) -> None:
        if self.needs_outcomes and not outcomes:
            raise ConfigError(
                "`teacher: {sees: [sibling]}` takes what a member of the group wrote that succeeded, and no outcome "
                "reward says which did: name one in `outcome_reward_funcs`, with weight 0 if it is not to be learnt "
                "from."
            )
        for reward in rewards:
            refuse_first(
                (
                    self.needs_outcomes and isinstance(reward, (TeacherAgreement, TeacherLogRatio)),
                    f"The reward {reward.name!r} is scored together with the outcomes, and a teacher that sees "
                    "`sibling` reads after them: leave one of the two out.",
                ),
                (
                    "feedback" in self._sees and isinstance(reward, TeacherLogRatio),
                    f"The score {reward.name!r} is a baseline, which must not know what comes, and a teacher that "
                    "sees `feedback` knows how a conversation ended: leave one of the two out.",
                ),
            )

    def check_answers(self, rows: Rows | None) -> None:
        """Whether the teacher's context holds the longest answer that it is to see; a stream is not read."""
        if "answer" not in self._sees or not isinstance(rows, Dataset) or _ANSWER not in rows.column_names:
            return
        answers = [first_answer(row[_ANSWER]) for row in rows.select_columns(_ANSWER)]
        longest = max(range(len(answers)), key=lambda place: len(answers[place]), default=None)
        text = "" if longest is None else whole(answers[longest])
        tokens = len(self._trainer._tokenizer.encode(text, add_special_tokens=False))
        if tokens >= self._positions:
            raise ConfigError(
                f"The answer of row {longest} (counted from 0) has {tokens} tokens, and the teacher reads "
                f"{self._positions}, so that `teacher: {{sees: [answer]}}` cannot show it: leave the row out, or name "
                "a teacher with a longer context."
            )

    @property
    def needs_outcomes(self) -> bool:
        """Whether conversations are scored before the teacher reads them."""
        return "sibling" in self._sees

    def as_they_end(self, take: Callable[[Trajectory], None]) -> Callable[[Trajectory], None]:
        """`take` for each conversation that ends, which a teacher on a server begins to read if it has no hints."""
        teacher = self._trainer.teacher
        return teacher.as_they_end(take) if isinstance(teacher, ServerTeacher) and not self._sees else take

    # Reading

    def read(self, batch: RolloutBatch) -> None:
        """Fills in `teacher_logprobs` and `teacher_log_ratios` once, at the temperature of sampling. Collective."""
        trainer, teacher = self._trainer, self._trainer.teacher
        if batch.taught or (self.needs_outcomes and batch.scores is None):
            return
        batch.taught = True
        for trajectory in batch.trajectories:
            trajectory.teacher_hint = None  # a replayed one may have that of another teacher
        trees = everywhere(lambda: [self._shown(each) for each in batch.trajectories])
        hinted = self._give_hints(batch) if self._sees else None
        if hinted is not None:
            trees = [leaves.tree for leaves in hinted]
        longest = everywhere(lambda: self._longest(trees))
        trainer.forwards.prove(max(gather_object([longest])))
        if trainer.shows_media and batch.mode == "train":
            trainer.forwards.prove_shown([trainer.runner.completion(each) for each in batch.trajectories])
        with trainer.step_log.activity.of("teacher"):
            if isinstance(teacher, ServerTeacher):
                found, top = everywhere(lambda: teacher.read(trees))
            else:
                found, top = self._by_model(trees, batch)
        everywhere(lambda: self._check_numbers(found, top))
        for row, (trajectory, logprobs) in enumerate(zip(batch.trajectories, found, strict=True)):
            sampled = trajectory.tree.action_logprobs()
            if hinted is not None and not trajectory.failed:
                read_there = dict(zip(hinted[row].turns, logprobs, strict=True))
                logprobs = [read_there.get(turn, [nan] * len(of_turn)) for turn, of_turn in enumerate(sampled)]
            if top is not None and not trajectory.failed:
                turns = range(len(sampled)) if hinted is None else hinted[row].turns
                of_turns = dict(zip(turns, top[row], strict=True))
                unread = torch.full((0, 2, trainer.args.distillation_topk), nan)
                trajectory.teacher_top = [of_turns.get(turn, unread) for turn in range(len(sampled))]
            trajectory.teacher_logprobs = logprobs
            trajectory.teacher_log_ratios = [
                _mean([one - other for one, other in zip(*of_turn, strict=True) if not isnan(one - other)])
                for of_turn in zip(logprobs, sampled, strict=False)  # of one that failed there are none
            ]

    @torch.no_grad()
    def _by_model(self, trees: Sequence[TokenTree], batch: RolloutBatch) -> Found:
        trainer, args = self._trainer, self._trainer.args
        top = args.distillation_topk or 0
        plan = replace(trainer.forwards.plan, truncation=None, forward=args.forward, top=top)
        size = args.per_device_train_batch_size if batch.mode == "train" else args.per_device_eval_batch_size
        shown = {number: each.inputs for one in batch.trajectories for number, each in one.media.items()}
        media = {**trainer.blank, **shown} if self._sees_media else {}
        found: Logprobs = []
        likeliest: list[list[Tensor]] = []
        model = trainer.teacher or trainer.model
        weights = nullcontext() if trainer.teacher_weights is None else trainer.teacher_weights.lent()
        with trainer.scoring(model), weights:
            for part in self._parts(trees, size):
                # the experts of another model than the policy are others
                flat = [replace(flatten(tree), routes=None) for tree in part]
                scores = score(model, replace(plan, trees=flat, media=media))
                turns, logps = [tree.num_turns for tree in part], scores.logps
                if top:
                    both = torch.stack([scores.entropies.to(logps.dtype), logps[:, 1:]], dim=1).cpu()
                    likeliest += scores.by_turn(turns, both)
                    logps = logps[:, 0]
                found += [[turn.tolist() for turn in tree] for tree in scores.by_turn(turns, logps)]

        def by_tree(parts: list[list[Any]]) -> list[list[Any]]:
            turns = chain.from_iterable(parts)
            return [[next(turns) for _ in range(tree.num_turns)] for tree in trees]

        return by_tree(found), by_tree(likeliest) if top else None

    def _parts(self, trees: Sequence[TokenTree], size: int) -> list[list[TokenTree]]:
        """The trees of each forward: `size` rows, or with hints `ROW_TOKENS`, cut between turns. Collective."""
        parts = [list(trees[start : start + size]) for start in range(0, len(trees), size)]
        if not self._sees:
            return parts
        packs, cut = self._trainer.args.forward == "tree", []
        for part in parts:
            cut.append([TokenTree()])
            for tree in part:
                for turn, action in enumerate(tree.actions()):
                    path = tree.path_of_turn(turn)
                    tokens = sum(each.num_tokens for each in cut[-1]) + len(path)
                    full = len(cut[-1]) > (1 if packs else size) and (tokens > ROW_TOKENS or not packs)
                    if full:
                        cut.append([TokenTree()])
                    if full or not turn or not packs:
                        cut[-1].append(TokenTree())
                    cut[-1][-1].add_turn(path[: len(path) - len(action)], action, [0.0] * len(action))
        return cut + [[TokenTree()]] * (max(gather_object([len(cut)])) - len(cut))

    def _shown(self, trajectory: Trajectory) -> TokenTree:
        """What the teacher reads of a conversation, if it can see what that shows."""
        if trajectory.media:
            trainer, teacher = self._trainer, self._trainer.teacher
            shows = f"The conversation {trajectory.session} shows images, videos or sounds, and a teacher"
            if isinstance(teacher, ServerTeacher):
                raise ConfigError(f"{shows} on a server reads text only: name its `model` alone, or train on text.")
            if not self._sees_media:
                name = trainer.args.teacher["model"]
                raise ConfigError(
                    f"{shows} has to see them as the policy does, which {name!r} does not: name another."
                )
        return TokenTree() if trajectory.failed else trajectory.tree

    @property
    def _sees_media(self) -> bool:
        """Whether a teacher beside the policy sees images, videos and sounds as the policy does."""
        trainer = self._trainer
        models = (trainer.accelerator.unwrap_model(each) for each in (trainer.teacher or trainer.model, trainer.model))
        teacher, policy = (media_tokens(model.config) for model in models)
        return teacher == policy

    @property
    def _positions(self) -> int:
        """Tokens that the teacher reads."""
        trainer, teacher = self._trainer, self._trainer.teacher
        if isinstance(teacher, ServerTeacher):
            return teacher.positions
        return context_length(trainer.accelerator.unwrap_model(teacher or trainer.model).config)

    def _longest(self, trees: list[TokenTree]) -> int:
        longest = longest_path(trees)
        if longest > self._positions:
            raise ConfigError(
                f"A conversation has {longest} tokens, and the teacher {self._trainer.args.teacher['model']!r} reads "
                f"{self._positions}: lower `max_completion_length`, or name a teacher with a longer context."
            )
        return longest

    def _check_numbers(self, found: Logprobs, top: list[list[Tensor]] | None) -> None:
        own, name = self._trainer.model.config.get_text_config().vocab_size, self._trainer.args.teacher["model"]
        refuse_first(
            (
                any((of_turn[:, 0] >= own).any() for turns in top or () for of_turn in turns),
                f"One of the likeliest tokens of the teacher {name!r} is none of the policy's {own}: lower "
                "`distillation_topk`.",
            ),
            (
                any(isnan(logprob) for turns in found for turn in turns for logprob in turn),
                f"The teacher {name!r} computes no number for some tokens: set `dtype: bfloat16` or `float32`, or "
                "name another.",
            ),
        )

    # Hints

    def _give_hints(self, batch: RolloutBatch) -> list[AnswerLeaves]:
        """Gives the trajectories of a batch their hints, and returns the contexts with them. A collective call."""
        runner, siblings = self._trainer.runner, [None] * len(batch.rows)
        if self.needs_outcomes:
            siblings = _siblings(batch, everywhere(lambda: self._successes(batch)))

        def give(trajectory: Trajectory, sibling: str | None) -> AnswerLeaves:
            if trajectory.failed or not trajectory.turns:
                return AnswerLeaves()
            hint = trajectory.teacher_hint = self._hint(trajectory, sibling)
            if hint is None:
                return AnswerLeaves()
            return AnswerLeaves.hinted(trajectory, runner.renderer_of, hint, self._positions)

        given = everywhere(lambda: list(map(give, batch.trajectories, siblings)))
        self._warn_of_missing(batch, given)
        return given

    def _hint(self, trajectory: Trajectory, sibling: str | None) -> str | None:
        shown = {
            "answer": ("The right answer is", first_answer(trajectory.row.get(_ANSWER))),
            "sibling": ("An attempt that was successful:", sibling),
            "feedback": ("What will be said of this attempt:", _feedback(trajectory)),
        }
        parts = [f"{begin}\n{words}" for begin, words in (shown[name] for name in self._sees) if words]
        return whole("\n\n".join(parts)) or None

    def _warn_of_missing(self, batch: RolloutBatch, given: list[AnswerLeaves]) -> None:
        counts = []
        for trajectory, leaves in zip(batch.trajectories, given, strict=True):
            if trajectory.turns and not trajectory.failed:
                hinted = trajectory.teacher_hint is not None
                turns = sum(turn.num_tokens > 0 for turn in trajectory.turns)
                counts.append((not hinted, hinted and len(leaves.turns) < turns))
        counts = gather_object(counts)
        without, cut = (sum(each[column] for each in counts) for column in (0, 1))
        # an evaluation may have one conversation of a row, and so no sibling
        trains = batch.mode == "train"
        if (without or cut) and trains and not self._warned and PartialState().is_main_process:
            self._warned = True
            logger.warning(
                "Of %d conversations of a batch, %d have no hint for their teacher (there is no %s), and of %d some "
                "turns have no place for it, or a context that is too long with it. Nothing is distilled there; "
                "`teacher/coverage` is the share of turns that the teacher reads.",
                len(counts),
                without,
                " and no ".join(self._sees),
                cut,
            )

    def _successes(self, batch: RolloutBatch) -> list[str | None]:
        """What the policy wrote in each conversation of this process that succeeded."""
        assert batch.scores is not None  # see `needs_outcomes`
        written: list[str | None] = []
        for trajectory, outcome in zip(batch.trajectories, batch.scores.outcome[0], strict=True):
            texts = map(self._trainer.runner.renderer.text, filter(None, trajectory.tree.actions()))
            succeeded = outcome is not None and outcome >= _SUCCESS and not trajectory.failed
            written.append("\n\n".join(text.strip() for text in texts) if succeeded else None)
        return written

    # Training

    def add_columns(self, batch: RolloutBatch, output: Columns) -> None:
        """Adds what the teacher makes of the tokens of a batch, as `LOGPS` and `TOP`. A collective call."""
        like, top = output["completion_ids"], self._trainer.args.distillation_topk
        logps = output[LOGPS] = torch.full(like.shape, torch.nan, device=like.device)
        for number, row in enumerate(batch.token_rows):
            logps[number, : len(row.teacher)] = torch.tensor(row.teacher)
        opened = self._open_turns(batch)
        if opened is not None:
            logps[~opened.gather(1, output["turn_ids"])] = torch.nan
        if top:
            likeliest = output[TOP] = torch.full((*like.shape, 2, top), torch.nan, device=like.device)
            for number, row in enumerate(batch.token_rows):
                for begin, of_turn in row.top:
                    likeliest[number, begin : begin + len(of_turn)] = of_turn.to(likeliest)

    def _open_turns(self, batch: RolloutBatch) -> Tensor | None:
        """The turns of this process that are distilled, `(B, K)`; `None` where all are. A collective call."""
        gate, mask = self._gate, batch.rewards.turn_mask
        if gate is None or batch.mode == "eval":
            return None
        metrics = self._trainer._metrics["train"]
        of_all = gather_object([each.teacher_log_ratios for each in batch.trajectories])
        ratios = torch.full(mask.shape, torch.nan, dtype=torch.double, device=mask.device)
        for row, values in enumerate(of_all):
            ratios[row, : len(values)] = torch.tensor([torch.nan if each is None else each for each in values])
        if callable(gate):
            chosen = gather_object(everywhere(lambda: [_chosen(gate, each) for each in batch.trajectories]))
            opened = torch.zeros_like(mask)
            for row, values in enumerate(chosen):
                opened[row, : len(values)] = torch.tensor(values, dtype=torch.bool)
        else:
            streams, size = batch.rewards.outcome_streams, batch.rewards.group_size
            assert streams is not None  # see `_load_gate`
            left, all_of_it = _explained(ratios, streams[0].double(), size)
            opened = (left[1:] < all_of_it[1:]).repeat_interleave(size, dim=0)
            for turn in all_of_it[0].nonzero().flatten().tolist():
                metrics[f"turn_{turn + 1}/explained"].append(1 - (left[0, turn] / all_of_it[0, turn]).item())
            if all_of_it[0].any():
                metrics["teacher/explained"].append(1 - (left[0].sum() / all_of_it[0].sum()).item())
        read = ~ratios.isnan()
        if read.any():
            metrics["teacher/gated"].append((read & ~opened).sum().item() / read.sum().item())
        first = self._trainer.accelerator.process_index * len(batch.rows)
        return opened[first : first + len(batch.rows)]

    def loss(self, inputs: Columns, logps: Tensor, others: Tensor | None = None) -> Tensor:
        """
        The loss of a micro-batch whose gradient is that of the reverse KL divergence of the policy, with the log-probs
        `logps` `(B, T)`, from its teacher on the tokens that were sampled: `(log p - log q) * log p`, without a
        gradient through the first factor, as `distillation_mode: sampled_token` of TRL's `SDPOTrainer`. What other
        weights or kernels sampled is corrected by TRL's ratios. It is divided as the loss of `loss_type`. This is a
        collective call.
        """
        trainer, args = self._trainer, self._trainer.args
        teacher, trained = inputs[LOGPS], inputs["completion_mask"] * inputs["tool_mask"]
        mask = trained * ~teacher.isnan()
        log_ratios = (logps.detach() - teacher.nan_to_num(nan=0.0)) * mask
        sums = gather(torch.stack([log_ratios.sum(), mask.sum()])[None]).sum(dim=0)
        mode = "train" if trainer.model.training else "eval"
        if sums[1] > 0:  # of tokens that no teacher read there is no distance
            trainer._metrics[mode]["teacher/reverse_kl"].append((sums[0] / sums[1]).item())
        loss = log_ratios * logps
        if others is not None:
            # among the likeliest tokens, whose log-probs need not add up to 1
            policy, likeliest = (
                each.log_softmax(dim=-1) for each in (others, inputs[TOP][:, :, 1].nan_to_num(nan=0.0))
            )
            loss = (policy.exp() * (policy - likeliest)).sum(dim=-1) * mask
        if "old_per_token_logps" in inputs:
            loss = loss * (logps.detach() - inputs["old_per_token_logps"]).clamp(-20, 20).exp().clamp(max=_CLIP)
        if "importance_sampling_ratio" in inputs:
            loss = loss * inputs["importance_sampling_ratio"]
        steps = trainer.current_gradient_accumulation_steps if mode == "train" else 1
        if args.loss_type in TOKENS_OF_ALL:
            share = steps / args.steps_per_generation if mode == "train" else 1  # of the batch that was sampled
            tokens = inputs["num_items_in_batch"].clamp(min=1) * share
            return loss.sum() * trainer.accelerator.num_processes / tokens
        if args.loss_type == "bnpo":
            return loss.sum() / mask.sum().clamp(min=1) / steps
        by_row = loss.sum(dim=1)
        if args.loss_type == "dr_grpo":
            by_row = by_row / trainer.max_completion_length
        elif args.loss_type != "luspo":
            by_row = by_row / mask.sum(dim=1).clamp(min=1)
        return by_row.mean() / steps


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


# Hints


def _siblings(batch: RolloutBatch, written: list[str | None]) -> list[Any]:
    """For each row of this process the first other member of its group that succeeded. A collective call."""
    first, size = PartialState().process_index * len(written), batch.group_size
    of_all = gather_object(written)

    def sibling(number: int) -> str | None:
        begin = number - number % size
        others = (of_all[other] for other in range(begin, begin + size) if other != number)
        return next(filter(None, others), None)

    return [sibling(first + row) for row in range(len(written))]


def _feedback(trajectory: Trajectory) -> str:
    """What the environment says of a conversation, else what it replied to the last turn, which no turn has read."""
    for name in _FEEDBACK:
        if (said := trajectory.info.get(name)) is not None:
            return str(said).strip()
    contents = [reply.get("content") for reply in trajectory.turns[-1].replies]
    texts = ("".join(map(part_text, each)) if isinstance(each, list) else str(each or "") for each in contents)
    return "\n\n".join(texts).strip()


# Gates


def _load_gate(args: MTGRPOConfig, outcomes: Sequence[RewardFunc]) -> _Gate | None:
    """`_EXPLAINED`, or a function that says for each turn of a trajectory whether it is distilled; `None`: all are."""
    path = args.teacher.get("gate") if isinstance(args.teacher, dict) else None
    if path is None:
        return None
    if path != _EXPLAINED:
        function: _Gate = import_object(path, what="gate")
        if not callable(function):
            raise ConfigError(f"`teacher: {{gate: {path}}}` is no function of a trajectory: it is {function!r:.80}.")
        return function
    groups = args.generation_batch_size // args.num_generations
    refuse_first(
        (
            not outcomes,
            "`teacher: {gate: explained}` asks which turns tell failures from successes, and no outcome reward says "
            "which those are: name one in `outcome_reward_funcs`, with weight 0 if it is not to be learnt from.",
        ),
        (
            groups < 3,
            f"`teacher: {{gate: explained}}` judges each group by two others or more, and a batch has {groups} of "
            f"{args.num_generations} (`generation_batch_size: {args.generation_batch_size}`): raise "
            "`per_device_train_batch_size` or `steps_per_generation`.",
        ),
    )
    return _EXPLAINED


def _chosen(gate: Callable[[Trajectory], Sequence[bool]], trajectory: Trajectory) -> list[bool]:
    if trajectory.failed:
        return []
    try:
        given = gate(trajectory)
        chosen = list(given) if isinstance(given, Iterable) else []
    except Exception as error:  # whatever the user's function raises
        where = find_fault(error).where
        raise RewardError(
            f"The gate of `teacher` failed with {' '.join(describe_error(error).split())} (on trajectory "
            f"{trajectory.session!r}{f', in {where}' if where else ''})."
        ) from error
    if len(chosen) != len(trajectory.turns) or not all(isinstance(each, bool) for each in chosen):
        raise RewardError(
            f"The gate of `teacher` gave {given!r:.80} for a conversation of {len(trajectory.turns)} turns: return a "
            "bool for each turn."
        )
    return chosen


def _explained(ratios: Tensor, outcomes: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """
    The squared deviations of outcomes from their group's mean, `(1 + B / G, K)`, that a line through the log-ratios
    leaves, and all of them. Each group's line is that of the others. The first row is of all groups; each further one
    leaves out a group, whose own words have no part in it. `ratios` `(B, K)` and `outcomes` `(B,)` are NaN where there
    are none.
    """
    known = ~(ratios + outcomes[:, None]).isnan()
    count = known.view(-1, group_size, known.size(1)).sum(dim=1, keepdim=True).clamp(min=1)

    def centred(values: Tensor) -> Tensor:
        values = torch.where(known, values, 0.0).view(-1, group_size, known.size(1))
        away = values - values.sum(dim=1, keepdim=True) / count
        return torch.where(
            known.view_as(away) & (away.abs() > _ROUNDING * values.abs().amax(dim=1, keepdim=True)), away, 0.0
        )

    x, y = centred(ratios), centred(outcomes[:, None].expand_as(ratios))
    xx, xy, yy = ((one * other).sum(dim=1) for one, other in ((x, x), (x, y), (y, y)))
    own = torch.eye(len(xx) + 1, len(xx), dtype=xx.dtype, device=xx.device).roll(1, dims=0)[:, :, None]

    def of_others(sums: Tensor) -> Tensor:
        return sums.sum(dim=0) - (own * sums).sum(dim=1, keepdim=True) - sums

    spread = of_others(xx)
    slope = torch.where(spread > _ROUNDING * xx.sum(dim=0), of_others(xy) / spread, 0.0)
    left = yy - 2 * slope * xy + slope.square() * xx
    return ((1 - own) * left).sum(dim=1), ((1 - own) * yy).sum(dim=1)
