"""The teacher of a run: another model, here or on a server, or the policy as it was."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_prepare_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState
from trl import GRPOTrainer
from trl.distributed import DistributedBackend
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import create_model_from_path

from mt_grpo.concurrency import ConcurrencyLimit, Task, consume_exception, in_thread, run
from mt_grpo.errors import MISREAD, ConfigError, ServerGoneError, libraries_may_refuse
from mt_grpo.forward.probe import context_length
from mt_grpo.options.values import SELF
from mt_grpo.runlog.files import written_whole
from mt_grpo.servers.http import RequestFailed, Server
from mt_grpo.token_tree import Sequence as Branch
from mt_grpo.token_tree import TokenTree
from mt_grpo.training.config import changed
from mt_grpo.training.model import (
    OF_POLICY,
    created_with,
    open_policy,
    resolve_base,
    resolve_model,
    source_options,
    wrapped_layers,
)
from mt_grpo.trajectory import Trajectory
from mt_grpo.weights.transport import server_likeliest

Logprobs = list[list[list[float]]]
"""For each conversation and turn those of the sampled tokens."""

Found = tuple[Logprobs, list[list[Tensor]] | None]
"""The log-probs of sampled tokens, and with `distillation_topk` a turn's likeliest tokens, `(tokens, 2, k)`."""

_AT_ONCE = 32
"""Requests that a process sends to a teacher's server at once."""

_PROBE = [37 * place % 256 for place in range(16)]
"""Tokens whose log-probs tell one model of a server from another; in a text they would be alike."""

_APART = 0.5  # nats per token of the probe, of which other kernels and batches make a tenth


def load_teacher(trainer: GRPOTrainer) -> nn.Module | ServerTeacher | None:
    """The teacher: on its server, or a model that is spread as TRL's reference; `None` if it is none or the policy."""
    args, accelerator = trainer.args, trainer.accelerator
    if args.teacher is None:
        return None
    if args.teacher["model"] == SELF:
        _check_top(trainer, SELF, trainer.model)
        return None
    name, url = args.teacher["model"], args.teacher.get("server")
    given = {option: value for option, value in created_with(args).items() if option not in OF_POLICY}
    given["dtype"] = given.get("dtype") or trainer.model.dtype
    args = changed(args, model_init_kwargs=given)
    with libraries_may_refuse(f"The teacher {name!r} cannot be loaded", *MISREAD):
        found = resolve_base(resolve_model(name))
        tokenizer = AutoTokenizer.from_pretrained(found, **source_options(args))
        _check_tokens(name, tokenizer, trainer._tokenizer)
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
    with _layers_of(model, accelerator.state.fsdp_plugin):
        if accelerator.is_fsdp2:  # TRL's shards it as a single unit, whose weights are gathered all at once
            return fsdp2_prepare_model(accelerator, model)
        return prepare_fsdp(model, accelerator)


@contextmanager
def _layers_of(model: PreTrainedModel, plugin: FullyShardedDataParallelPlugin) -> Iterator[None]:
    """A context in which FSDP shards this model's layers: accelerate's plugin keeps the classes of the first model."""
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


def _check_tokens(name: str, teacher: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> None:
    """Whether every token of the policy is one of its teacher's, with the same id."""
    known: Mapping[str, int] = teacher.get_vocab()
    tokens: Mapping[str, int] = policy.get_vocab()
    differing = sorted((number, token) for token, number in tokens.items() if known.get(token) != number)
    if differing:
        named = [
            f"{token!r} is {number} here and {known.get(token, 'unknown')} there" for number, token in differing[:3]
        ]
        raise ConfigError(
            f"The teacher {name!r} has another tokenizer than the policy, and {len(differing)} of its {len(tokens)} "
            f"tokens differ ({'; '.join(named)}): name a teacher of the policy's family."
        )


class ServerTeacher:
    """A teacher that a vLLM server has: each root-to-leaf path of a conversation's tree is one request."""

    def __init__(self, name: str, url: str, top: int | None = None) -> None:
        self._server, self._top = Server(url), top or 0
        self._places = ConcurrencyLimit(_AT_ONCE)
        self._asked: dict[tuple[int, ...], Task] = {}  # by what was sent, as long as its conversation is there
        try:
            models = self._server.get("/v1/models", lambda answer: {each["id"]: each for each in answer["data"]})
            served = next((each for known, each in models.items() if name in (known, each.get("root"))), None)
            if served is None:
                raise ConfigError(
                    f"The teacher's server at {url} serves {', '.join(map(repr, models))}, not {name!r}: name that "
                    "model, or another server."
                )
            self._model, base = served["id"], models.get(served.get("parent"), {})  # an adapter's
            longest = served.get("max_model_len") or base.get("max_model_len")
            if longest is None:
                raise ConfigError(f"The teacher's server at {url} does not say its context (`max_model_len`).")
            self.positions = longest - 1  # a token is sampled after what it reads
            self._first_probe = self._probe()
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

    def _probe(self) -> list[float]:
        return [logprobs[token] for token, logprobs in zip(_PROBE[1:], self._ask(_PROBE), strict=True)]

    async def _answer(self, ids: list[int]) -> Any:
        async with self._places:
            return await in_thread(partial(self._ask, ids), "teacher")

    def _begin(self, tree: TokenTree) -> None:
        """Begins to read a conversation that has ended, in the event loop in which others go on."""
        for path in _sampled(tree):
            ids = _asked_for(path)
            if tuple(ids) not in self._asked:
                task = self._asked[tuple(ids)] = asyncio.ensure_future(self._answer(ids))
                task.add_done_callback(consume_exception)
                weakref.finalize(tree, self._asked.pop, tuple(ids), None).atexit = False

    def as_they_end(self, take: Callable[[Trajectory], None]) -> Callable[[Trajectory], None]:
        """`take` for each conversation that ends, which the teacher then begins to read."""

        def taken(trajectory: Trajectory) -> None:
            take(trajectory)
            if not trajectory.failed:
                self._begin(trajectory.tree)

        return taken

    def read(self, trees: Sequence[TokenTree]) -> Found:
        """The log-probs of conversations; `ServerGoneError` where the server gives none, or has another model."""
        paths = [(number, path) for number, tree in enumerate(trees) for path in _sampled(tree)]

        async def answers_of_all() -> list[Any]:
            asked = []
            for _, path in paths:
                ids = _asked_for(path)
                task = self._asked.get(tuple(ids))
                asked.append(self._answer(ids) if task is None or task.cancelled() else task)
            return await asyncio.gather(*asked)

        try:
            answers = run(answers_of_all())
            again = self._probe()
        except RequestFailed as error:
            raise ServerGoneError(
                f"The teacher's server does not read a conversation: {error} Start it again, or name `model` alone."
            ) from error
        apart = sum(abs(one - other) for one, other in zip(again, self._first_probe, strict=True)) / len(again)
        if not apart <= _APART:
            raise ServerGoneError(
                f"The teacher's server at {self._server.url} has another model than when the run began: its log-probs "
                f"of the same tokens are {apart:.1f} apart. Start it again with {self._model!r}."
            )
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


TEACHER = "teacher.tensors"
"""The file of a checkpoint with the weights of a teacher that the policy was; named as a reference is."""


class TeacherWeights(TrainerCallback):
    """The float32 weights of the policy as it began, or their exponential mean as in TRL's `SDPOTrainer`."""

    def __init__(self, trainer: GRPOTrainer, given: dict[str, Any]) -> None:
        self._kind = given["teacher_model_kind"]
        self._rate, self._every = given.get("teacher_update_rate", 0.05), given.get("teacher_sync_steps", 1)
        self._trainer = trainer
        self.weights: dict[str, Tensor] = {}
        backend = DistributedBackend(trainer.accelerator)
        if backend.is_zero3 or (backend.is_fsdp and not trainer.accelerator.is_fsdp2):
            raise ConfigError(
                f"`teacher: {{teacher_model_kind: {self._kind}}}` lends the policy other weights, which "
                f"{'DeepSpeed ZeRO-3' if backend.is_zero3 else 'FSDP 1'} does not let it: shard with FSDP2 "
                "(`--accelerate_config fsdp2`) or ZeRO-2, or set `teacher_model_kind: live`."
            )

    @classmethod
    def of(cls, trainer: GRPOTrainer) -> TeacherWeights | None:
        """The weights of a run's teacher, where it is the policy as it was."""
        given = trainer.args.teacher or {}
        return None if given.get("teacher_model_kind", "live") == "live" else cls(trainer, given)

    def _trained(self) -> dict[str, nn.Parameter]:
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # else a forward without a backward leaves some gathered
                module.reshard()
        return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    def begin(self, checkpoint: str | None) -> None:
        """Takes the weights of a policy that is about to be trained, or those of a checkpoint. A collective call."""
        self.weights = {name: weight.detach().to(torch.float32, copy=True) for name, weight in self._trained().items()}
        if checkpoint is None:
            return
        file = Path(checkpoint, TEACHER)
        saved = load_file(file) if file.exists() else {}
        if {name: weight.shape for name, weight in saved.items()} != {
            name: weight.shape for name, weight in self.weights.items()
        }:
            raise ConfigError(
                f"The checkpoint {checkpoint} has no weights of a teacher ({TEACHER}), or those of another policy, so "
                f"`teacher_model_kind: {self._kind}` cannot go on from it: resume one that was saved with it, or "
                "set `teacher_model_kind: live`."
            )
        for name, weight in self.weights.items():
            whole = saved[name].to(weight.device)
            if isinstance(weight, DTensor):
                whole = distribute_tensor(whole, weight.device_mesh, weight.placements)
            weight.copy_(whole)

    @torch.no_grad()
    def on_step_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        if self._kind == "ema" and state.global_step % self._every == 0:
            for name, weight in self._trained().items():
                self.weights[name].mul_(1 - self._rate).add_(weight, alpha=self._rate)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """A context in which the policy has these weights, once there are some."""
        own = {name: weight.detach().clone() for name, weight in self._trained().items() if self.weights}
        self._put(self.weights)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, weights: dict[str, Tensor]) -> None:
        trained = self._trained()
        for name, weight in weights.items():
            trained[name].copy_(weight)

    def save(self, folder: Path) -> None:
        """Writes the weights as a whole to a checkpoint. This is a collective call."""
        main = self._trainer.accelerator.is_main_process
        whole: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            each = weight.full_tensor() if isinstance(weight, DTensor) else weight
            if main:
                whole[name] = each.cpu().contiguous()
        if main:
            with written_whole(folder / TEACHER) as partial:
                save_file(whole, partial)
