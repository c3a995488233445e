"""The engine that samples from the trainer's own model, and the copy for sampling while the model is trained."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from trl.distributed import DistributedBackend
from trl.models import unwrap_model_for_generation

from mt_grpo.errors import ConfigError, WeightSyncError
from mt_grpo.rollout import Engine
from mt_grpo.rollout.engine import LocalEngine
from mt_grpo.rollout.engines.transformers import TransformersEngine
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.forward_plan import check_sequence_ratio
from mt_grpo.weights.proof import EXACT, NARROW, compare, probe_ids, trainer_logprobs, with_halved_weights


def check_importance_sampling(args: MTGRPOConfig) -> None:
    """Makes TRL's own check, which TRL makes only for its own client, and `check_sequence_ratio`."""
    check_sequence_ratio(args)
    by_token = ("token_truncate", "token_mask")
    if (
        args.loss_type == "vespo"
        and args.vllm_importance_sampling_correction
        and args.vllm_importance_sampling_mode not in by_token
    ):
        raise ConfigError(
            f"`loss_type: vespo` needs `vllm_importance_sampling_mode` to be one of {', '.join(by_token)}, not "
            f"{args.vllm_importance_sampling_mode!r}."
        )


def replays_routes(args: MTGRPOConfig) -> bool:
    """Whether the forward of a run replays the routes of a mixture that its engine gives."""
    return args.router_replay and args.forward == "tree"


def own_engine(args: MTGRPOConfig, tokenizer: Any, model: Any, accelerator: Accelerator) -> TransformersEngine:
    """An engine that samples from the trainer's own model."""
    backend = DistributedBackend(accelerator)
    sharded = backend.is_fsdp or (backend.is_zero3 and not args.ds3_gather_for_generation)
    if sharded and accelerator.num_processes > 1:
        raise ConfigError(
            "A model with sharded weights cannot sample by itself, since processes take different numbers of turns: "
            "set `use_vllm: true`, or shard with DeepSpeed ZeRO-3 and `ds3_gather_for_generation: true`."
        )
    return TransformersEngine(accelerator.unwrap_model(model), tokenizer, record_routes=replays_routes(args))


class ModelCopy:
    """
    The weights that an engine in this process samples with while the trainer changes its own: a copy, which is brought
    up to date between two batches of the engine. Conversations go on with it. It has those methods of a
    `WeightSync` that a trainer calls.
    """

    def __init__(self, engine: TransformersEngine, model: Any, accelerator: Accelerator, args: MTGRPOConfig) -> None:
        self._engine, self._model = engine, model
        self._copy = copy.deepcopy(model).requires_grad_(False).eval()
        for module in self._copy.modules():
            # what extends a forward may hold on to the model that it extends, as TRL's does
            vars(module).pop("forward", None)
        if args.cast_lm_head_to_fp32:
            head = self._copy.get_output_embeddings()
            head.register_forward_pre_hook(lambda layer, states: (states[0].to(layer.weight.dtype),))
        self._verify_every, self._num_syncs = args.verify_sync_every, 0
        self._probe = probe_ids(model.config.get_text_config().vocab_size)
        narrow = accelerator.mixed_precision != "no" or next(model.parameters()).dtype != torch.float32
        self._tolerance = NARROW if narrow else EXACT
        engine.use_model(self._copy)
        engine.context = accelerator.autocast
        before = self._answers()
        with with_halved_weights(self._copy):
            if compare(self._answers(), before).difference < 2 * self._tolerance:
                raise ConfigError(
                    f"A copy of this {type(model).__name__} does not answer with weights of its own, so that it "
                    "cannot sample while the model is trained: set `use_vllm: true`, or leave `max_staleness` at 0."
                )

    def send_in_flight(self) -> None:
        """Conversations go on anyway."""

    @torch.no_grad()
    def sync(self, step: int) -> None:
        """Takes over the trainer's weights as they are after optimiser step `step`."""
        with self._engine.update:
            for mine, theirs in zip(_tensors(self._copy), _tensors(self._model), strict=True):
                mine.copy_(theirs)
            self._engine.weight_version = step
            if self._num_syncs % self._verify_every == 0:
                with self._engine.context():
                    expected = trainer_logprobs(self._model, self._probe)
                difference = compare(self._answers(), expected).difference
                if difference > self._tolerance:
                    raise WeightSyncError(
                        f"The copy of the model that conversations are sampled with differs from the model by "
                        f"{difference:.2e} nats a token, and {self._tolerance:.1e} is allowed: set `use_vllm: true`, "
                        "or leave `max_staleness` at 0."
                    )
            self._num_syncs += 1

    def _answers(self) -> list[float]:
        with self._engine.context():
            return trainer_logprobs(self._copy, self._probe)

    def check(self) -> None:
        """Nobody else writes to it."""

    def close(self) -> None:
        """There is nothing to give back."""


def _tensors(model: Any) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def own_weights(engine: Engine, model: Any, args: MTGRPOConfig, accelerator: Accelerator) -> ModelCopy | None:
    """
    The weights that an engine in this process samples with if conversations run while the model is trained; `None` for
    an engine that has its model elsewhere.
    """
    if not isinstance(engine, LocalEngine):
        return None
    if not isinstance(engine, TransformersEngine):
        raise ConfigError(
            f"`max_staleness: {args.max_staleness}` samples while the model is trained, and {type(engine).__name__} "
            "samples from the model that is trained: set `use_vllm: true`, or leave `max_staleness` at 0."
        )
    backend = DistributedBackend(accelerator)
    if backend.is_fsdp or backend.is_zero3:
        raise ConfigError(
            f"`max_staleness: {args.max_staleness}` without a server samples from a copy of the model, and the "
            "weights of this one are sharded: set `use_vllm: true`, or leave `max_staleness` at 0."
        )
    return ModelCopy(engine, accelerator.unwrap_model(model), accelerator, args)


@contextmanager
def lent_model(engine: Engine, model: Any, args: MTGRPOConfig, accelerator: Accelerator) -> Iterator[None]:
    """Lends the trainer's model, in the state in which TRL generates, to an engine that samples in this process."""
    if not isinstance(engine, LocalEngine):
        yield
        return
    options: dict[str, Any] = {"gather_deepspeed3_params": args.ds3_gather_for_generation}
    known = inspect.signature(unwrap_model_for_generation).parameters
    if "gradient_checkpointing_kwargs" in known:  # TRL 1.15 has no such argument
        options["gradient_checkpointing_kwargs"] = args.gradient_checkpointing_kwargs
    with unwrap_model_for_generation(model, accelerator, **options) as unwrapped:
        engine.use_model(unwrapped)
        yield
