"""The model that a run trains: finds it by its name, switches its dropout, and loads and saves its reference."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from accelerate import Accelerator
from huggingface_hub import try_to_load_from_cache
from peft import PeftModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME
from trl.distributed import DistributedBackend
from trl.trainer.utils import create_model_from_path

from mt_grpo.data import embedded
from mt_grpo.data.loaders import check_hub
from mt_grpo.errors import ConfigError
from mt_grpo.imports import looks_like_path
from mt_grpo.training.checkpoint import adapter_settings
from mt_grpo.training.config import MTGRPOConfig

REFERENCE = "reference.safetensors"
"""The file of a checkpoint with the reference of `sync_ref_model`."""

OF_SOURCE = ("trust_remote_code", "revision", "code_revision", "token", "subfolder", "cache_dir", "local_files_only")
"""Options of loading a model that say where it is, and not how it computes."""

logger = logging.getLogger(__name__)


def resolve_model(name: str, revision: str | None = None, subfolder: str | None = None) -> str:
    """
    What a model's name stands for: the folder of the embedded model for `embedded`; any other name as it is, once it
    is certain that there is such a folder, or that the Hub can be asked.
    """
    if name == "embedded":
        return str(Path(embedded.__file__).parent / "model")
    path = Path(name).expanduser()
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
    cached = (try_to_load_from_cache(name, file, revision=revision) for file in files)
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
    """
    The model whose configuration and architecture a resolved name has: the base of an adapter, else the name itself.
    """
    settings = adapter_settings(name)
    if settings is None:
        return name
    base = settings["base_model_name_or_path"]
    try:
        return resolve_model(base, settings.get("revision"))
    except ConfigError as error:
        raise ConfigError(f"The adapter in {name!r} was trained on the model {base!r}. {error}") from error


def subfolder_of(args: MTGRPOConfig) -> str | None:
    """Where the model is in its folder, or in the Hub's repository."""
    found: str | None = (args.model_init_kwargs or {}).get("subfolder")
    return found


def served_model(name: str, args: MTGRPOConfig) -> str:
    """A resolved name as a vLLM server takes it, which looks into no subfolder."""
    subfolder = subfolder_of(args)
    if subfolder is None:
        return name
    if not Path(name).is_dir():
        raise ConfigError(
            f"A vLLM server loads no subfolder of a repository of the Hub ({subfolder!r} of {name!r}): fetch it (`hf "
            f"download {name} --local-dir FOLDER`), and name the folder as the model."
        )
    return str(Path(name, subfolder))


def source_options(args: MTGRPOConfig, revision: str | None = None) -> dict[str, Any]:
    """Options with which a model's configuration, tokenizer and processor are found, as its weights are."""
    given = args.model_init_kwargs or {}
    found = {name: given[name] for name in OF_SOURCE if given.get(name) is not None}
    return {"trust_remote_code": args.trust_remote_code, **({"revision": revision} if revision else {}), **found}


def loading_options(model: Any, args: MTGRPOConfig) -> dict[str, Any] | None:
    """
    `model_init_kwargs` for TRL's trainer, with the class of a named model where the options say where it is: TRL reads
    the class from a configuration that it looks for by the name alone.
    """
    given = args.model_init_kwargs
    if not isinstance(model, str) or given is None or not given.keys() & set(OF_SOURCE) - {"trust_remote_code"}:
        return given
    config = AutoConfig.from_pretrained(model, **source_options(args))
    known = getattr(transformers, (config.architectures or [""])[0], None)
    shows = "AutoModelForImageTextToText" in (getattr(config, "auto_map", None) or {})
    return given | {"architecture": known or (AutoModelForImageTextToText if shows else AutoModelForCausalLM)}


def open_policy(
    model: str | PreTrainedModel, args: MTGRPOConfig, quantization_config: Any, peft_config: Any
) -> dict[str, Any]:
    """
    What TRL's trainer takes as its model: `model`, `quantization_config` and `peft_config`. The adapter in a folder is
    loaded on its base, with all options of loading, and trained on, whatever adapter the options describe.
    """
    given = args.model_init_kwargs or {}
    name = resolve_model(model, given.get("revision"), subfolder_of(args)) if isinstance(model, str) else None
    if name is None or adapter_settings(name) is None:
        return {"model": name or model, "quantization_config": quantization_config, "peft_config": peft_config}
    if peft_config is not None and args.process_index == 0:
        logger.warning(
            "The adapter in %s is trained on as it was made; the options of an adapter have no effect.", name
        )
    options = dict(args.model_init_kwargs or {})
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
    if args.world_size > 1:
        options["device_map"] = None
    options.setdefault("trust_remote_code", args.trust_remote_code)
    policy = PeftModel.from_pretrained(create_model_from_path(resolve_base(name), **options), name, is_trainable=True)
    return {"model": policy, "quantization_config": None, "peft_config": None}


def prepare_model(model: nn.Module, args: MTGRPOConfig, accelerator: Accelerator) -> None:
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
        here = {type(module).__name__ for module in model.modules()}
        found = [name for name in model._no_split_modules or () if name in here]
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = found or None
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


@contextmanager
def without_dropout(model: nn.Module, wanted: bool) -> Iterator[None]:
    """A context in evaluation mode, if `wanted`."""
    training = model.training
    if wanted:
        model.eval()
    try:
        yield
    finally:
        if wanted:
            model.train(training)


def save_reference(folder: Path, args: MTGRPOConfig, accelerator: Accelerator, reference: nn.Module | None) -> None:
    """Writes a synced reference as a whole to a checkpoint. This is a collective call if it is sharded."""
    if not args.sync_ref_model or DistributedBackend(accelerator).is_zero3:
        return
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(accelerator.unwrap_model(reference), options=options)
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        partial = (folder / REFERENCE).with_suffix(".partial")
        save_file({name: tensor.clone().contiguous() for name, tensor in weights.items()}, partial)
        partial.replace(folder / REFERENCE)


def load_reference(folder: Path, args: MTGRPOConfig, accelerator: Accelerator, reference: nn.Module | None) -> None:
    """Loads what `save_reference` wrote into the reference."""
    if not args.sync_ref_model:
        return
    if not (folder / REFERENCE).exists():
        raise ConfigError(
            f"The checkpoint {folder} has no synced reference ({REFERENCE}), so `sync_ref_model: true` cannot go on "
            "from it: resume one that was saved with it, or leave `sync_ref_model` out."
        )
    set_model_state_dict(
        accelerator.unwrap_model(reference),
        load_file(folder / REFERENCE),
        options=StateDictOptions(full_state_dict=True),
    )
