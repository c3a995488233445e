"""
The model that a run trains: finding it by its name, its processor and its reference, errors for numbers that are not
finite, and which activations are kept for the backward.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from accelerate import Accelerator, PartialState
from accelerate.utils import gather, gather_object
from huggingface_hub import try_to_load_from_cache
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME
from trl.distributed import DistributedBackend
from trl.models import get_act_offloading_ctx_manager, unwrap_model_for_generation
from trl.trainer.utils import create_model_from_path

from mt_grpo.data import check_hub, embedded
from mt_grpo.errors import ConfigError, UserError, libraries_may_refuse
from mt_grpo.forward.lm_head import replaced
from mt_grpo.imports import in_home, looks_like_path
from mt_grpo.rollout.engines import Engine, LocalEngine
from mt_grpo.runlog.files import written_whole
from mt_grpo.training.checkpoint import adapter_settings
from mt_grpo.training.config import MTGRPOConfig

_REFERENCE = "reference.tensors"
"""The file of a checkpoint with the reference of `sync_ref_model`. vLLM reads all `*.safetensors` as the model's."""
_BEFORE = "reference.safetensors"
"""Its name in checkpoints that were written before."""

OF_POLICY = ("revision", "code_revision", "subfolder")
"""Options of `model_init_kwargs` that say where the policy is, and no other model."""

OF_SOURCE = ("trust_remote_code", "revision", "code_revision", "token", "subfolder", "cache_dir", "local_files_only")
"""Options of loading a model that say where it is, and not how it computes."""

logger = logging.getLogger(__name__)
_EMBEDDED = {"embedded": "model", "embedded-terminal": "terminal_model"}


def resolve_model(name: str, revision: str | None = None, subfolder: str | None = None) -> str:
    """Our folder of `embedded` or `embedded-terminal`; else the name, if it is there or the Hub can be asked."""
    if name in _EMBEDDED:
        return str(Path(embedded.__file__).parent / _EMBEDDED[name])
    path = in_home(name)
    files = [str(Path(subfolder or "", file)) for file in (CONFIG_NAME, ADAPTER_CONFIG_NAME)]
    if path.exists():
        if not any((path / file).is_file() for file in files):
            raise ConfigError(
                f"There is no model in {str(Path(name, subfolder or ''))!r}: name a folder with a {CONFIG_NAME} or an "
                f"{ADAPTER_CONFIG_NAME}, such as the `output_dir` of a run that has ended, or one of its checkpoints."
            )
        _check_weights(name, path / (subfolder or ""))
        return str(path)
    if looks_like_path(name):
        raise ConfigError(f"The model {name!r} cannot be loaded: there is no such folder (from {Path.cwd()}).")
    with libraries_may_refuse(f"The model {name!r} cannot be loaded"):  # no name that the Hub has
        cached = [try_to_load_from_cache(name, file, revision=revision) for file in files]
    if not any(isinstance(file, str) for file in cached):
        check_hub(f"The model {name!r}")
    return name


def _check_weights(name: str, folder: Path) -> None:
    """Refuses a model with a damaged file of weights, such as an interrupted copy. Reads its beginning only."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"The model {name!r} cannot be loaded, since its {file.name} is damaged ({error}): bring it back, or "
                "name another model."
            ) from None


def resolve_base(name: str) -> str:
    """The model whose configuration and architecture a resolved name has: an adapter's base, or itself."""
    settings = adapter_settings(name)
    if settings is None:
        return name
    base = settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"The {ADAPTER_CONFIG_NAME} in {name!r} has no `base_model_name_or_path`: write the model there that the "
            "adapter is of."
        )
    try:
        return resolve_model(base, settings.get("revision"))
    except ConfigError as error:
        raise ConfigError(f"The adapter in {name!r} was trained on the model {base!r}. {error}") from error


def subfolder_of(args: MTGRPOConfig) -> str | None:
    """Where the model is in its folder, or in the Hub's repository."""
    found: str | None = (args.model_init_kwargs or {}).get("subfolder")
    return found


def created_with(args: MTGRPOConfig) -> dict[str, Any]:
    """The options with which TRL creates a model of a run."""
    spread = {"device_map": None} if args.world_size > 1 else {}
    return {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {}), **spread}


def source_options(args: MTGRPOConfig, revision: str | None = None) -> dict[str, Any]:
    """Options with which a model's configuration, tokenizer and processor are found, as its weights are."""
    given = args.model_init_kwargs or {}
    found = {name: given[name] for name in OF_SOURCE if given.get(name) is not None}
    return {"trust_remote_code": args.trust_remote_code, **({"revision": revision} if revision else {}), **found}


def loading_options(model: str | PreTrainedModel, args: MTGRPOConfig) -> dict[str, Any] | None:
    """`model_init_kwargs` for TRL's trainer, with the model's class, which TRL looks for by the name alone."""
    given = args.model_init_kwargs
    if not isinstance(model, str) or given is None or not given.keys() & set(OF_SOURCE) - {"trust_remote_code"}:
        return given
    config = AutoConfig.from_pretrained(model, **source_options(args))
    known = getattr(transformers, (config.architectures or [""])[0], None)
    shows = "AutoModelForImageTextToText" in (getattr(config, "auto_map", None) or {})
    return given | {"architecture": known or (AutoModelForImageTextToText if shows else AutoModelForCausalLM)}


def open_policy(
    model: str | PreTrainedModel, args: MTGRPOConfig, quantization_config: object, peft_config: object
) -> dict[str, Any]:
    """What TRL's trainer takes as its model; an adapter in a folder is loaded on its base, and trained on."""
    given = args.model_init_kwargs or {}
    name = resolve_model(model, given.get("revision"), subfolder_of(args)) if isinstance(model, str) else None
    settings = None if name is None else adapter_settings(name)
    if name is None or settings is None:
        return {"model": name or model, "quantization_config": quantization_config, "peft_config": peft_config}
    files = SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
    if "peft_type" not in settings or not any(Path(name, file).exists() for file in files):
        raise ConfigError(
            f"The adapter in {name!r} is not whole: it needs {files[0]}, and a `peft_type` in its "
            f"{ADAPTER_CONFIG_NAME}; bring them back, or name another model."
        )
    if peft_config is not None and args.process_index == 0:
        logger.warning(
            "The adapter in %s is trained on as it was made; the options of an adapter have no effect.", name
        )
    options = created_with(args)
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
    policy = PeftModel.from_pretrained(create_model_from_path(resolve_base(name), **options), name, is_trainable=True)
    return {"model": policy, "quantization_config": None, "peft_config": None}


def load_policy(name: str, args: MTGRPOConfig, quantization_config: object) -> Any:
    """The policy as TRL's trainer would load it, for what needs no trainer."""
    model = open_policy(name, args, quantization_config, None)["model"]
    if not isinstance(model, str):
        return model
    options = created_with(args) | (loading_options(model, args) or {})
    return create_model_from_path(model, **options, quantization_config=quantization_config)


def prepare_model(model: PreTrainedModel, args: MTGRPOConfig, accelerator: Accelerator) -> None:
    """Prepares a policy for training, and refuses a run that could not be resumed, or would lose gradients."""
    if args.disable_dropout:
        # dropout that layers hold as numbers and apply themselves, as attention does; TRL sees to layers of dropout
        for module in model.modules():
            for name, value in vars(module).items():
                if "dropout" in name and isinstance(value, float):
                    setattr(module, name, 0.0)
    backend = DistributedBackend(accelerator)
    if backend.is_fsdp and accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap is None:
        # a model of text, of a family that also sees, has none of the layers that see, which accelerate would look for
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = wrapped_layers(model) or None
    if args.sync_ref_model and args.save_strategy != "no" and backend.is_zero3:
        raise ConfigError(
            "A synced reference (`sync_ref_model: true`) cannot be saved under DeepSpeed ZeRO-3, so a run could not "
            'be resumed: shard with FSDP or ZeRO-2, or set `save_strategy: "no"`.'
        )
    # a reentrant checkpoint stops the gradients of what layers hand on beside their output: keys and values that later
    # layers share (Gemma 3n, Gemma 4 E2B and E4B)
    reentrant = args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    if reentrant and any(vars(module).get("is_kv_shared_layer") for module in model.modules()):
        raise ConfigError(
            "`gradient_checkpointing_kwargs: {use_reentrant: true}` loses gradients of this model, whose layers share "
            "keys and values: leave it out. TRL sets it for an adapter under DeepSpeed ZeRO-3: shard with FSDP2 or "
            "ZeRO-2, or set `gradient_checkpointing: false`."
        )


def wrapped_layers(model: PreTrainedModel) -> list[str]:
    """The classes of a model's layers that FSDP shards one by one."""
    here = {type(module).__name__ for module in model.modules()}
    return [name for name in model._no_split_modules or () if name in here]


def save_reference(folder: Path, args: MTGRPOConfig, accelerator: Accelerator, reference: nn.Module | None) -> None:
    """Writes a synced reference as a whole to a checkpoint. This is a collective call if it is sharded."""
    if not args.sync_ref_model or DistributedBackend(accelerator).is_zero3:
        return
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: Mapping[str, Any] = get_model_state_dict(accelerator.unwrap_model(reference), options=options)
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        with written_whole(folder / _REFERENCE) as partial:
            save_file({name: tensor.clone().contiguous() for name, tensor in weights.items()}, partial)


def load_reference(folder: Path, args: MTGRPOConfig, accelerator: Accelerator, reference: nn.Module | None) -> None:
    """Loads what `save_reference` wrote into the reference."""
    if not args.sync_ref_model:
        return
    file = next((each for each in (folder / _REFERENCE, folder / _BEFORE) if each.exists()), None)
    if file is None:
        raise ConfigError(
            f"The checkpoint {folder} has no synced reference ({_REFERENCE}), so `sync_ref_model: true` cannot go on "
            "from it: resume one that was saved with it, or leave `sync_ref_model` out."
        )
    weights: dict[str, Any] = load_file(file)
    set_model_state_dict(accelerator.unwrap_model(reference), weights, options=StateDictOptions(full_state_dict=True))


_REFERENCE_ADAPTER = "ref"
"""The adapter in which TRL's trainer keeps the reference of a model that comes with an adapter."""


@contextmanager
def no_adapter_left(model: object, trainer: object) -> Iterator[None]:
    """If the trainer is refused in the block, removes the adapters that TRL added to the model."""
    had_reference = isinstance(model, PeftModel) and _REFERENCE_ADAPTER in model.peft_config
    trained = (
        {id(each) for each in model.parameters() if each.requires_grad} if isinstance(model, nn.Module) else set()
    )
    try:
        yield
    except BaseException:
        made = vars(trainer).get("model")
        if isinstance(model, PeftModel):
            if _REFERENCE_ADAPTER in model.peft_config and not had_reference:
                model.delete_adapter(_REFERENCE_ADAPTER)
        elif isinstance(model, nn.Module) and isinstance(made, PeftModel) and isinstance(made.base_model, BaseTuner):
            made.base_model.unload()
            for each in model.parameters():
                each.requires_grad_(id(each) in trained)
        raise


Processing: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin


def tokenizer_in(processing_class: Processing) -> PreTrainedTokenizerBase:
    """The tokenizer of a processor, with the processor's chat template, or a tokenizer itself."""
    if not isinstance(processing_class, ProcessorMixin):
        return processing_class
    tokenizer = processing_class.tokenizer
    if processing_class.chat_template is not None:
        tokenizer.chat_template = processing_class.chat_template
    return tokenizer


def processing_of(model: str | PreTrainedModel, given: Processing | None, args: MTGRPOConfig) -> Processing:
    """The processor or tokenizer of a run, which TRL would not find everywhere, and never one of sounds."""
    if given is not None:
        return given
    name = model if isinstance(model, str) else model.config.name_or_path
    return AutoProcessor.from_pretrained(name, truncation_side="left", padding_side="left", **source_options(args))


def for_trl(processing_class: Processing) -> Processing:
    """The tokenizer of a processor of sounds alone, since TRL takes every processor for one of images."""
    shows = not isinstance(processing_class, ProcessorMixin) or "image_processor" in vars(processing_class)
    return processing_class if shows else tokenizer_in(processing_class)


_INGREDIENTS = ("advantages", "old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio")
"""The inputs of a loss, besides the log-probs of the model that is trained."""


class NonFiniteError(UserError, RuntimeError):
    """A number that would spoil the weights. The message is one sentence: what it was and where it comes from."""


def check_loss(loss: Tensor, inputs: Mapping[str, object], model: nn.Module, step: int) -> None:
    """Checks the loss of a micro-batch. This is a collective call."""
    losses = gather(loss.detach().float().reshape(1))
    if not losses.isfinite().all():
        causes = gather_object([_cause(inputs, model)])  # on every process: weights may be sharded
        rank = int((~losses.isfinite()).nonzero()[0])
        raise NonFiniteError(
            f"The loss of step {step + 1} is {losses[rank]}, since {causes[rank]}; no weight was changed by it."
        )


def check_gradient(norm: Tensor | float | None, args: MTGRPOConfig, accelerator: Accelerator, step: int) -> None:
    """Checks the norm of a gradient, but in float16, whose scaler leaves out a step that overflows. Collective."""
    if norm is None or args.fp16:  # DeepSpeed may know none
        return
    norms = gather(torch.tensor([float(norm)], device=accelerator.device))
    if not norms.isfinite().all():
        raise NonFiniteError(
            f"The gradient of step {step + 1} has the norm {norms[~norms.isfinite()][0]}, though its loss is finite, "
            "since a derivative overflowed in the backward pass; it was not stepped: train in bfloat16 or float32, or "
            "lower `learning_rate`."
        )


def _cause(inputs: Mapping[str, Any], model: nn.Module) -> str:
    name = _spoilt_weight(model)
    if name is not None:
        return f"the weight {name!r} is not finite since an earlier step, or was loaded so: lower `learning_rate`"
    trained = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    for name in _INGREDIENTS:
        value = inputs.get(name)
        if value is not None and not value.masked_select(trained).isfinite().all():
            return f"`{name}` of its batch are not finite"
    return (
        "the model's own log-probabilities, their ratio to the old ones, or its product with an advantage overflowed: "
        "lower `learning_rate` or the rewards, or train in bfloat16 or float32"
    )


def _spoilt_weight(model: nn.Module) -> str | None:
    """The name of a trained weight that is not finite in this process's part."""
    for name, parameter in model.named_parameters():
        # under ZeRO-3 the parameter itself is empty
        own = parameter.to_local() if isinstance(parameter, DTensor) else getattr(parameter, "ds_tensor", parameter)
        if parameter.requires_grad and not own.isfinite().all():
            return name
    return None


def check_weights(model: nn.Module, accelerator: Accelerator, step: int) -> None:
    """Checks every trained weight; each process checks its own shards. This is a collective call."""
    spoilt = _spoilt_weight(model)
    if gather(torch.tensor([int(spoilt is not None)], device=accelerator.device)).sum():
        raise NonFiniteError(
            f"Weights hold NaN or infinity after step {step}{f' ({spoilt})' if spoilt else ''}, so they are not "
            "saved: go back to an earlier checkpoint, with a smaller `learning_rate` or `max_grad_norm`."
        )


class Activations:
    """How a run keeps activations."""

    def __init__(self, args: MTGRPOConfig, device: torch.device) -> None:
        if args.activation_offloading and device.type == "cpu":
            raise ConfigError(
                "`activation_offloading: true` moves activations from a GPU to the machine's memory, and this run is "
                "on a CPU: leave it out."
            )
        self._args = args
        self._warned = args.gradient_checkpointing_layers == 1
        self._offloading: AbstractContextManager[object] | None = None

    @contextmanager
    def kept(self, model: nn.Module) -> Iterator[None]:
        """For a forward of the model with a loss; its backward is outside, so that nothing of it is moved again."""
        if self._args.activation_offloading and self._offloading is None:
            self._offloading = get_act_offloading_ctx_manager(model, warn_if_no_head=False)
        with _layers_in_groups(model, self._args.gradient_checkpointing_layers) as groups:
            with self._offloading or nullcontext():
                yield
        if not self._warned and groups.largest < 2 and PartialState().is_main_process:
            logger.warning(
                "The layers of this model do not take just what the layer before them returns, so "
                "`gradient_checkpointing_layers: %d` has no effect: each keeps its input.",
                self._args.gradient_checkpointing_layers,
            )
        self._warned = True


Run = Callable[[Tensor], Any]


@contextmanager
def _layers_in_groups(model: nn.Module, size: int) -> Iterator[_Groups]:
    """A context in which a forward keeps one input for each `size` checkpointed layers that follow upon each other."""
    groups, name = _Groups(size), "_gradient_checkpointing_func"
    with ExitStack() as stack:
        for layer in model.modules() if size > 1 else ():
            if name in vars(layer):
                stack.enter_context(replaced(vars(layer), name, groups.of(layer, vars(layer)[name])))
        yield groups


class _Groups:
    """The groups of one forward, made as its layers are called."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.largest = 0
        self._group: _Group | None = None
        self._last: Tensor | None = None  # what the layer before returned, and its version
        self._version = 0

    def of(self, layer: nn.Module, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """What checkpoints a layer as `checkpoint` does, and keeps its input in its group."""

        def in_group(run: Run, *args: Any) -> Any:
            states, *others = args
            if any(other is not None for other in others) or not torch.is_grad_enabled():
                return checkpoint(run, *args)
            run = partial(_with, run, others)  # Gemma 4 hands over None where it has no inputs of layers
            group = self._group
            if group is None or len(group.layers) == self._size or not self._follows(states):
                group = self._group = _Group(states)
                group.layers.append((layer, run))
                output = checkpoint(run, states)
            else:
                group.layers.append((layer, run))
                with torch.autograd.graph.saved_tensors_hooks(*group.hooks(states)):
                    output = checkpoint(run, states)
            self.largest = max(self.largest, len(group.layers))
            self._last = output if isinstance(output, Tensor) else output[0]
            self._version = self._last._version
            return output

        return in_group

    def _follows(self, states: Tensor) -> bool:
        """Whether they are what the last layer returned, unchanged. A wrapper may have made a view of them."""
        last = self._last
        return (
            last is not None
            and states.data_ptr() == last.data_ptr()
            and states.shape == last.shape
            and states.dtype == last.dtype
            and states._version == self._version
        )


def _with(run: Callable[..., object], others: list[None], states: Tensor) -> Any:
    return run(states, *others)


class _Group:
    """Layers that follow upon each other."""

    def __init__(self, first: Tensor) -> None:
        self.layers: list[tuple[nn.Module, Run]] = []
        self._first = first.detach()
        kind, on_gpu = first.device.type, first.device.type != "cpu"
        self._device = torch.get_device_module(kind)
        self._devices = [first.device] if on_gpu else []
        self._random = torch.get_rng_state()
        self._random_of_devices = [self._device.get_rng_state(device) for device in self._devices]
        self._cast: dict[str, Any] = {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        self._inputs: list[Tensor] = []  # of the layers after the first one, in the group's backward

    def hooks(self, states: Tensor) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """For what autograd saves around the group's latest layer: its input is let go, and made again."""
        place, pointer, shape = len(self.layers) - 2, states.data_ptr(), states.shape

        def pack(tensor: Tensor) -> Tensor | None:
            return None if tensor.data_ptr() == pointer and tensor.shape == shape else tensor

        def unpack(kept: Tensor | None) -> Tensor:
            if kept is not None:
                return kept
            if len(self._inputs) <= place:
                self._inputs = self._run()
            made = self._inputs[place]
            del self._inputs[place:]  # a backward comes from the last layer
            return made

        return pack, unpack

    def _run(self) -> list[Tensor]:
        """The inputs of all layers but the first one, with the numbers that were drawn in the forward."""
        states, inputs = self._first, []
        kind = self._cast["device_type"]
        with torch.random.fork_rng(self._devices, device_type=kind), torch.no_grad(), torch.autocast(**self._cast):
            torch.set_rng_state(self._random)
            for device, random in zip(self._devices, self._random_of_devices, strict=True):
                self._device.set_rng_state(random, device)
            for layer, run in self.layers[:-1]:
                if isinstance(layer, FSDPModule):
                    layer.unshard()
                output = run(states)
                if isinstance(layer, FSDPModule):
                    layer.reshard()
                states = output if isinstance(output, Tensor) else output[0]
                inputs.append(states)
        return inputs


@contextmanager
def lent_model(engine: Engine, model: nn.Module, args: MTGRPOConfig, accelerator: Accelerator) -> Iterator[None]:
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
