"""Makes the trainer's engine, its own model or vLLM servers, and the transport of weights to the servers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from trl.distributed import DistributedBackend
from trl.models import unwrap_model_for_generation

from mt_grpo.errors import ConfigError
from mt_grpo.rollout import Engine
from mt_grpo.rollout.engine import LocalEngine
from mt_grpo.rollout.engines.transformers import TransformersEngine
from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.rollout.engines.vllm.http import ServerSetupError
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.forward import check_sequence_ratio
from mt_grpo.weights.transport import TRANSPORTS, WeightTransport
from mt_grpo.weights.updates import WeightSyncError

_EVERYWHERE = "0.0.0.0"


def server_urls(args: MTGRPOConfig) -> list[str]:
    """
    URLs of a run's servers: those of `vllm_server_base_url`, separated by commas, or else the one of
    `vllm_server_host` and `vllm_server_port`.
    """
    if args.vllm_server_base_url:
        return [url.strip().rstrip("/") for url in args.vllm_server_base_url.split(",")]
    host = "127.0.0.1" if args.vllm_server_host == _EVERYWHERE else args.vllm_server_host
    return [f"http://{host}:{args.vllm_server_port}"]


def transport_of(args: MTGRPOConfig) -> type[WeightTransport]:
    """The transport that `weight_sync` names; `auto` is the one that works everywhere."""
    return TRANSPORTS["safetensors" if args.weight_sync == "auto" else args.weight_sync]


def check_importance_sampling(args: MTGRPOConfig) -> None:
    """
    Makes TRL's own check, which TRL makes only for its own client, and `check_sequence_ratio`.

    Raises:
        ConfigError: If the loss needs a correction per token and the chosen one is not, or if the correction would be
            of another distribution than the one that is sampled from.
    """
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
    """
    An engine that samples from the trainer's own model.

    Raises:
        ConfigError: If its weights are sharded: each forward is then a collective, and processes take different
            numbers of turns.
    """
    backend = DistributedBackend(accelerator)
    sharded = backend.is_fsdp or (backend.is_zero3 and not args.ds3_gather_for_generation)
    if sharded and accelerator.num_processes > 1:
        raise ConfigError(
            "A model with sharded weights cannot sample by itself, since processes take different numbers of turns: "
            "set `use_vllm: true`, or shard with DeepSpeed ZeRO-3 and `ds3_gather_for_generation: true`."
        )
    return TransformersEngine(accelerator.unwrap_model(model), tokenizer, record_routes=replays_routes(args))


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


def server_client(args: MTGRPOConfig, tokenizer: Any, model: str) -> VLLMServerClient:
    """
    The client of a run's servers, not yet connected.

    Args:
        args (`MTGRPOConfig`): The run's options.
        tokenizer: The trainer's tokenizer.
        model (`str`): Name or path of the model that the servers must hold.
    """
    return VLLMServerClient(
        server_urls(args),
        tokenizer,
        model=model,
        server_timeout=args.vllm_server_timeout,
    )


def weight_sync(
    args: MTGRPOConfig, client: VLLMServerClient, get_model: Callable[[], Any], accelerator: Accelerator
) -> WeightTransport:
    """
    The transport of weights to the servers that the options choose.

    Raises:
        ServerSetupError: If a server cannot be used, e.g. because another run uses it.
    """
    transport = transport_of(args)
    try:
        sync = transport(
            client, get_model, accelerator, verify_every=args.verify_sync_every, **transport.options(args)
        )
        sync.begin()
    except WeightSyncError as error:
        raise ServerSetupError(str(error)) from error
    return sync
