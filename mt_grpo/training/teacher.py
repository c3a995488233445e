"""
The teacher of a run: another model, or the policy with a hint, whose log-probs of the tokens that the policy sampled,
each in the context in which it was sampled, are computed once per batch, and the loss that they make: on-policy
distillation.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import isnan, nan
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_prepare_model, gather, gather_object
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOTrainer
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import create_model_from_path

from mt_grpo.concurrency import ConcurrencyLimit, Task, consume_exception, in_thread, run
from mt_grpo.errors import ConfigError, libraries_may_refuse
from mt_grpo.forward.media import media_tokens
from mt_grpo.forward.model import score
from mt_grpo.forward.packing import FlatTree, flatten
from mt_grpo.forward.probe import context_length
from mt_grpo.options.values import SELF
from mt_grpo.rollout import TokenRow
from mt_grpo.servers.http import RequestFailed, ServerControl
from mt_grpo.token_tree import Sequence as Branch
from mt_grpo.token_tree import TokenTree
from mt_grpo.training.config import changed
from mt_grpo.training.forward_plan import prove_forward
from mt_grpo.training.hints import needs_outcomes
from mt_grpo.training.model import (
    OF_POLICY,
    open_policy,
    resolve_base,
    resolve_model,
    source_options,
    without_dropout,
    wrapped_layers,
)
from mt_grpo.training.ranks import everywhere
from mt_grpo.training.rollout_batch import TOKENS_OF_ALL, TOP, Columns, RolloutBatch, longest_path
from mt_grpo.trajectory import Trajectory
from mt_grpo.weights.proof import server_likeliest

LOGPS = "teacher_per_token_logps"
"""The column of a batch with what a teacher makes of its tokens, `(B, T)`, NaN for those that were not sampled."""

CLIP = 2.0
"""Where the ratio of a token's probability to the one it was sampled with is cut: TRL's `distillation_is_clip`."""

Logprobs = list[list[list[float]]]
"""For each conversation and turn those of the sampled tokens."""

_Found = tuple[Logprobs, list[list[Tensor]] | None]
"""The log-probs of sampled tokens, and with `distillation_topk` a turn's likeliest tokens, `(tokens, 2, k)`."""

_AT_ONCE = 32
"""Requests that a process sends to a teacher's server at once."""

_NAMED = 3
"""Tokens that a sentence about another tokenizer names at most."""


def load_teacher(trainer: GRPOTrainer) -> nn.Module | ServerTeacher | None:
    """
    The teacher of a run: on its server, or as a model, frozen and spread over processes as TRL spreads its reference
    model, and loaded with the policy's options but those that say where the policy is; `None` without one, or where it
    is the policy itself.

    Raises:
        ConfigError: If it is not there, has other tokens than the policy, or reads too few.
    """
    args, accelerator = trainer.args, trainer.accelerator
    if args.teacher is None:
        return None
    if args.teacher["model"] == SELF:
        _check_top(trainer, SELF, trainer.model)
        return None
    name, url = args.teacher["model"], args.teacher.get("server")
    given = dict(args.model_init_kwargs or {})
    for of_policy in OF_POLICY:
        given.pop(of_policy, None)
    if accelerator.num_processes > 1:
        given["device_map"] = None
    given.setdefault("trust_remote_code", args.trust_remote_code)
    given["dtype"] = given.get("dtype") or trainer.model.dtype
    args = changed(args, model_init_kwargs=given)
    with libraries_may_refuse(f"The teacher {name!r} cannot be loaded"):
        found = resolve_base(resolve_model(name))
        tokenizer = AutoTokenizer.from_pretrained(found, **source_options(args))
        check_tokens(name, tokenizer, trainer._tokenizer)
        if url is not None:
            server = ServerTeacher(name, url, args.distillation_topk)
            _check_length(trainer, name, server.positions)
            return server
        model = open_policy(name, args, None, None)["model"]
        if isinstance(model, str):
            model = create_model_from_path(model, **given)
    _check_length(trainer, name, context_length(model.config))
    _check_top(trainer, name, model)
    model.requires_grad_(False).eval()
    if trainer.is_deepspeed_enabled:
        return prepare_deepspeed(model, accelerator)
    if not trainer.is_fsdp_enabled:
        return accelerator.prepare_model(model, evaluation_mode=True)
    with layers_of(model, accelerator.state.fsdp_plugin):
        if accelerator.is_fsdp2:  # TRL's shards it as a single unit, whose weights are gathered all at once
            return fsdp2_prepare_model(accelerator, model)
        return prepare_fsdp(model, accelerator)


@contextmanager
def layers_of(model: PreTrainedModel, plugin: FullyShardedDataParallelPlugin) -> Iterator[None]:
    """
    A context in which FSDP shards the layers of a model that is not the policy: accelerate's plugin keeps the classes
    of the first model that it has prepared.
    """
    names, policy = plugin.transformer_cls_names_to_wrap, plugin.auto_wrap_policy
    plugin.transformer_cls_names_to_wrap = wrapped_layers(model) or names
    plugin.auto_wrap_policy = policy.func if isinstance(policy, partial) else policy
    try:
        yield
    finally:
        plugin.transformer_cls_names_to_wrap, plugin.auto_wrap_policy = names, policy


def _check_length(trainer: GRPOTrainer, name: str, positions: int) -> None:
    most = trainer.args.max_completion_length
    if most is not None and most >= positions:
        raise ConfigError(
            f"The teacher {name!r} reads {positions} tokens, and a conversation may have {most} after its prompt "
            "(`max_completion_length`): lower that, or name a teacher with a longer context."
        )


def _check_top(trainer: GRPOTrainer, name: str, teacher: PreTrainedModel) -> None:
    """Whether each of the teacher's likeliest tokens is one of the policy's."""
    top, own = trainer.args.distillation_topk, trainer.model.config.get_text_config().vocab_size
    others = teacher.config.get_text_config().vocab_size
    if top and (top > own or own != others):
        raise ConfigError(
            f"`distillation_topk: {top}` compares the logits of two models, of which the policy has {own}, and the "
            f"teacher {name!r} {others}: let it be no larger, name a teacher with as many, or leave it out."
        )


class ServerTeacher:
    """
    A teacher that a vLLM server has. Each root-to-leaf path of a conversation's tree is one request.

    Args:
        name (`str`): The model, by the server's name for it, or as the server loaded it.
        url (`str`): The server's address.

    Raises:
        ConfigError: If the server is not there, serves another model, or gives no log-probs of prompts.
    """

    def __init__(self, name: str, url: str, top: int | None = None) -> None:
        self._server, self._top = ServerControl(url), top or 0
        self._places = ConcurrencyLimit(_AT_ONCE)
        self._asked: dict[tuple[int, ...], Task] = {}  # by what was sent, as long as its conversation is there
        try:
            models = self._server.get("/v1/models", lambda answer: answer["data"])
            served = next((each for each in models if name in (each["id"], each.get("root"))), None)
            if served is None:
                raise ConfigError(
                    f"The teacher's server at {url} serves {', '.join(repr(each['id']) for each in models)}, not "
                    f"{name!r}: name that model, or another server."
                )
            self._model = served["id"]
            parts = [served, *(each for each in models if each["id"] == served.get("parent"))]  # an adapter's base
            longest = next((each["max_model_len"] for each in parts if each.get("max_model_len")), None)
            if longest is None:
                raise ConfigError(f"The teacher's server at {url} does not say its context (`max_model_len`).")
            self.positions = longest - 1  # a token is sampled after what it reads
            self._ask([0, 0])
        except RequestFailed as error:
            if error.unreachable:
                raise ConfigError(
                    f"The teacher's server is not up: {error} Start it, or name `model` alone."
                ) from error
            raise ConfigError(
                f"The teacher's server at {url} gives no log-probs of prompts (`prompt_logprobs: {self._top}`), as a "
                f"vLLM server does{f' with `--max-logprobs {top}`' if top else ''}: {error}"
            ) from error

    def _ask(self, ids: list[int]) -> list[dict[int, float]]:
        return server_likeliest(self._server, self._model, ids, self._top)

    async def _answer(self, ids: list[int]) -> Any:
        async with self._places:
            return await in_thread(partial(self._ask, ids), "teacher")

    def ask(self, tree: TokenTree) -> None:
        """Begins to read a conversation that has ended, in the event loop in which others go on."""
        for path in _sampled(tree):
            ids = _asked_for(path)
            if tuple(ids) not in self._asked:
                task = self._asked[tuple(ids)] = asyncio.ensure_future(self._answer(ids))
                task.add_done_callback(consume_exception)
                weakref.finalize(tree, self._asked.pop, tuple(ids), None).atexit = False

    def read(self, trees: Sequence[TokenTree]) -> _Found:
        """As `_by_model`."""
        paths = [(number, path) for number, tree in enumerate(trees) for path in _sampled(tree)]

        async def answers_of_all() -> list[Any]:
            asked = []
            for _, path in paths:
                ids = _asked_for(path)
                task = self._asked.get(tuple(ids))
                asked.append(self._answer(ids) if task is None or task.cancelled() else task)
            return await asyncio.gather(*asked)

        answers = run(answers_of_all())
        found: Logprobs = [[[] for _ in range(tree.num_turns)] for tree in trees]
        likeliest: list[list[list[Any]]] = [[[] for _ in range(tree.num_turns)] for tree in trees]
        for (number, path), answer in zip(paths, answers, strict=True):
            labels = zip(path.tokens[1:], path.mask[1:], path.turns[1:], answer, strict=False)
            for token, sampled, turn, logprobs in labels:
                if sampled:
                    found[number][turn].append(logprobs[token])
                    likeliest[number][turn].append(list(zip(*list(logprobs.items())[: self._top], strict=True)))
        if not self._top:
            return found, None
        return found, [[torch.tensor(turn).view(-1, 2, self._top) for turn in turns] for turns in likeliest]


def _sampled(tree: TokenTree) -> list[Branch]:
    """The branches of a tree in which something was sampled."""
    return [path for path in tree.sequences() if any(path.mask)]


def _asked_for(path: Branch) -> list[int]:
    """The tokens of a branch up to the last one that was sampled."""
    return path.tokens[: len(path.mask) - path.mask[::-1].index(1)]


def as_they_end(trainer: GRPOTrainer, take: Callable[[Trajectory], None]) -> Callable[[Trajectory], None]:
    """`take`, for conversations that have ended; a teacher on a server that sees no more than they begins to read."""
    teacher = trainer.teacher
    if not isinstance(teacher, ServerTeacher) or "sees" in trainer.args.teacher:
        return take

    def taken(trajectory: Trajectory) -> None:
        take(trajectory)
        if not trajectory.failed:
            teacher.ask(trajectory.tree)

    return taken


def check_tokens(name: str, teacher: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> None:
    """Whether every token of the policy is one of its teacher's, with the same id."""
    known: Mapping[str, int] = teacher.get_vocab()
    tokens: Mapping[str, int] = policy.get_vocab()
    differing = sorted((number, token) for token, number in tokens.items() if known.get(token) != number)
    if differing:
        named = [
            f"{token!r} is {number} here and {known.get(token, 'unknown')} there"
            for number, token in differing[:_NAMED]
        ]
        raise ConfigError(
            f"The teacher {name!r} has another tokenizer than the policy, and {len(differing)} of its {len(tokens)} "
            f"tokens differ ({'; '.join(named)}): name a teacher of the policy's family."
        )


def read(trainer: GRPOTrainer, batch: RolloutBatch) -> None:
    """
    Fills in `teacher_logprobs` and `teacher_log_ratios` of a batch's trajectories, once. The log-probs have the
    temperature of sampling, and no truncation. This is a collective call: every process brings the same number of
    rows, and makes the same number of forwards, whatever is in them.
    """
    args, teacher = trainer.args, trainer.teacher
    if args.teacher is None or batch.taught or (needs_outcomes(args) and batch.scores is None):
        return
    batch.taught = True
    for trajectory in batch.trajectories:
        trajectory.teacher_hint = None  # a replayed one may have that of another teacher
    trees = everywhere(lambda: [_shown(trainer, each) for each in batch.trajectories])
    hinted = trainer.hints.give(trainer, batch, _positions(trainer)) if "sees" in args.teacher else None
    if hinted is not None:
        trees = [leaves.tree for leaves in hinted]
    longest = everywhere(lambda: _longest(trainer, trees))
    prove_forward(trainer, max(gather_object([longest])))
    with trainer.step_log.activity.of("teacher"):
        if isinstance(teacher, ServerTeacher):
            found, top = everywhere(lambda: teacher.read(trees))
        else:
            found, top = _by_model(trainer, trees, batch)
    everywhere(lambda: _check_numbers(trainer, found, top))
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
def _by_model(trainer: GRPOTrainer, trees: Sequence[TokenTree], batch: RolloutBatch) -> _Found:
    args, top = trainer.args, trainer.args.distillation_topk or 0
    shown = {number: each.inputs for trajectory in batch.trajectories for number, each in trajectory.media.items()}
    media = {**trainer.blank, **shown}
    plan = replace(trainer.forward_plan, truncation=None, forward=args.forward, top=top, media=media)
    size = args.per_device_train_batch_size if batch.mode == "train" else args.per_device_eval_batch_size
    found: Logprobs = []
    likeliest: list[list[Tensor]] = []
    model = trainer.teacher or trainer.model
    weights = nullcontext() if trainer.teacher_weights is None else trainer.teacher_weights.lent()
    with weights, without_dropout(model, True), trainer.accelerator.autocast():
        for start in range(0, len(trees), size):
            part = trees[start : start + size]
            flat = [_without_routes(tree) for tree in part]
            # a forward also where there is nothing to score, so that ranks with other trees stay in step
            flat += [] if any(len(each.tokens) for each in flat) else [_without_routes(_one_token())]
            scores = score(model, replace(plan, trees=flat))
            turns, logps = [tree.num_turns for tree in part], scores.logps
            if top:
                both = torch.stack([scores.entropies.to(logps.dtype), logps[:, 1:]], dim=1).cpu()
                likeliest += scores.by_turn(turns, both)
                logps = logps[:, 0]
            found += [[turn.tolist() for turn in tree] for tree in scores.by_turn(turns, logps)]
    return found, likeliest if top else None


def _shown(trainer: GRPOTrainer, trajectory: Trajectory) -> TokenTree:
    if trajectory.media:
        teacher = trainer.teacher
        shows = f"The conversation {trajectory.session} shows images, videos or sounds, and a teacher"
        if isinstance(teacher, ServerTeacher):
            raise ConfigError(f"{shows} on a server reads text only: name its `model` alone, or train on text.")
        unwrap = trainer.accelerator.unwrap_model
        if teacher is not None and media_tokens(unwrap(teacher).config) != media_tokens(unwrap(trainer.model).config):
            name = trainer.args.teacher["model"]
            raise ConfigError(f"{shows} has to see them as the policy does, which {name!r} does not: name another.")
    return TokenTree() if trajectory.failed else trajectory.tree


def _longest(trainer: GRPOTrainer, trees: list[TokenTree]) -> int:
    longest, positions = longest_path(trees), _positions(trainer)
    if longest > positions:
        raise ConfigError(
            f"A conversation has {longest} tokens, and the teacher {trainer.args.teacher['model']!r} reads "
            f"{positions}: lower `max_completion_length`, or name a teacher with a longer context."
        )
    return longest


def _positions(trainer: GRPOTrainer) -> int:
    """Tokens that the teacher reads."""
    teacher = trainer.teacher
    if isinstance(teacher, ServerTeacher):
        return teacher.positions
    return context_length(trainer.accelerator.unwrap_model(teacher or trainer.model).config)


def _check_numbers(trainer: GRPOTrainer, found: Logprobs, top: list[list[Tensor]] | None) -> None:
    own = trainer.model.config.get_text_config().vocab_size
    if any((of_turn[:, 0] >= own).any() for turns in top or () for of_turn in turns):
        raise ConfigError(
            f"One of the likeliest tokens of the teacher {trainer.args.teacher['model']!r} is none of the policy's "
            f"{own}: lower `distillation_topk`."
        )
    if any(isnan(logprob) for turns in found for turn in turns for logprob in turn):
        raise ConfigError(
            f"The teacher {trainer.args.teacher['model']!r} computes no number for some tokens: set `dtype: bfloat16` "
            "or `float32`, or name another."
        )


def _without_routes(tree: TokenTree) -> FlatTree:
    """A tree for another model than the policy, whose experts are others."""
    return replace(flatten(tree), routes=None)


def _one_token() -> TokenTree:
    tree = TokenTree()
    tree.add_turn([0], [], [])
    return tree


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def top_column(rows: list[TokenRow], like: Tensor, top: int) -> Tensor:
    """The teacher's likeliest tokens in the place of each token of a batch, as `TOP`; `like` is `(B, T)`."""
    column = torch.full((*like.shape, 2, top), torch.nan, device=like.device)
    for number, row in enumerate(rows):
        for begin, of_turn in row.top:
            column[number, begin : begin + len(of_turn)] = of_turn.to(column)
    return column


def token_column(rows: list[TokenRow], like: Tensor) -> Tensor:
    """What the teacher makes of a batch's tokens, as `LOGPS`; `like` is `(B, T)`."""
    column = torch.full(like.shape, torch.nan, device=like.device)
    for number, row in enumerate(rows):
        column[number, : len(row.teacher)] = torch.tensor(row.teacher)
    return column


def _divergence(policy: Tensor, teacher: Tensor) -> Tensor:
    """The reverse KL divergence `(B, T)` among `k` tokens, from their log-probs `(B, T, k)`, which need not add up."""
    policy, teacher = (values.log_softmax(dim=-1) for values in (policy, teacher.nan_to_num(nan=0.0)))
    return (policy.exp() * (policy - teacher)).sum(dim=-1)


def distillation_loss(trainer: GRPOTrainer, inputs: Columns, logps: Tensor, others: Tensor | None = None) -> Tensor:
    """
    The loss of a micro-batch whose gradient is that of the reverse KL divergence of the policy, with the log-probs
    `logps` `(B, T)`, from its teacher on the tokens that were sampled: `(log p - log q) * log p`, without a gradient
    through the first factor, as `distillation_mode: sampled_token` of TRL's `SDPOTrainer`. What other weights or
    kernels sampled is corrected by TRL's ratios. It is divided as the loss of `loss_type`. This is a collective call.
    """
    args, teacher, trained = trainer.args, inputs[LOGPS], inputs["completion_mask"] * inputs["tool_mask"]
    mask = trained * ~teacher.isnan()
    log_ratios = (logps.detach() - teacher.nan_to_num(nan=0.0)) * mask
    sums = gather(torch.stack([log_ratios.sum(), mask.sum()])[None]).sum(dim=0)
    mode = "train" if trainer.model.training else "eval"
    if sums[1] > 0:  # of tokens that no teacher read there is no distance
        trainer._metrics[mode]["teacher/reverse_kl"].append((sums[0] / sums[1]).item())
    loss = log_ratios * logps
    if others is not None:
        loss = _divergence(others, inputs[TOP][:, :, 1]) * mask
    if "old_per_token_logps" in inputs:
        loss = loss * (logps.detach() - inputs["old_per_token_logps"]).clamp(-20, 20).exp().clamp(max=CLIP)
    if "importance_sampling_ratio" in inputs:
        loss = loss * inputs["importance_sampling_ratio"]
    steps = trainer.current_gradient_accumulation_steps if mode == "train" else 1
    if args.loss_type in TOKENS_OF_ALL:
        share = steps / args.steps_per_generation if mode == "train" else 1  # of the batch that was sampled
        return loss.sum() * trainer.accelerator.num_processes / (inputs["num_items_in_batch"].clamp(min=1) * share)
    if args.loss_type == "bnpo":
        return loss.sum() / mask.sum().clamp(min=1) / steps
    by_row = loss.sum(dim=1)
    if args.loss_type == "dr_grpo":
        by_row = by_row / trainer.max_completion_length
    elif args.loss_type != "luspo":
        by_row = by_row / mask.sum(dim=1).clamp(min=1)
    return by_row.mean() / steps
