"""The model that a run begins with, whatever its name stands for: the embedded one, a folder, an adapter, a Hub id."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME
from trl.trainer.utils import create_model_from_path

from mt_grpo.data import embedded
from mt_grpo.data.hub import check_hub
from mt_grpo.errors import ConfigError
from mt_grpo.imports import looks_like_path
from mt_grpo.training.checkpoint import adapter_settings
from mt_grpo.training.config import MTGRPOConfig

logger = logging.getLogger(__name__)


def resolve_model(name: str, revision: str | None = None) -> str:
    """
    What a model's name stands for: the folder of the embedded model for `embedded`; any other name as it is, once it
    is certain that there is such a folder, or that the Hub can be asked.

    Args:
        name (`str`): `embedded`, a folder or a Hub id.
        revision (`str`, *optional*): Revision on the Hub.

    Raises:
        ConfigError: If there is no such folder, no model is in it, or it is not cached and the Hub cannot be reached.
    """
    if name == "embedded":
        return str(Path(embedded.__file__).parent / "model")
    path = Path(name).expanduser()
    if path.exists():
        if not any((path / file).is_file() for file in (CONFIG_NAME, ADAPTER_CONFIG_NAME)):
            raise ConfigError(
                f"There is no model in {name!r}: name a folder with a {CONFIG_NAME} or an {ADAPTER_CONFIG_NAME}, such "
                "as the `output_dir` of a run that has ended, or one of its checkpoints."
            )
        return str(path)
    if looks_like_path(name):
        raise ConfigError(f"The model {name!r} cannot be loaded: there is no such folder (from {Path.cwd()}).")
    cached = (try_to_load_from_cache(name, file, revision=revision) for file in (CONFIG_NAME, ADAPTER_CONFIG_NAME))
    if not any(isinstance(file, str) for file in cached):
        check_hub(f"The model {name!r}")
    return name


def resolve_base(name: str) -> str:
    """
    The model whose configuration and architecture a resolved name has: the base of an adapter, else the name itself.

    Raises:
        ConfigError: If an adapter's base is not there.
    """
    settings = adapter_settings(name)
    if settings is None:
        return name
    base = settings["base_model_name_or_path"]
    try:
        return resolve_model(base, settings.get("revision"))
    except ConfigError as error:
        raise ConfigError(f"The adapter in {name!r} was trained on the model {base!r}. {error}") from error


@contextmanager
def opened(
    model: str | PreTrainedModel, args: MTGRPOConfig, quantization_config: Any, peft_config: Any
) -> Iterator[dict[str, Any]]:
    """
    What TRL's trainer takes as its model: `model`, `quantization_config` and `peft_config`. The adapter in a folder is
    loaded on its base and trained on, whatever adapter the options describe.
    """
    name = resolve_model(model, (args.model_init_kwargs or {}).get("revision")) if isinstance(model, str) else None
    if name is None or adapter_settings(name) is None:
        yield {"model": name or model, "quantization_config": quantization_config, "peft_config": peft_config}
        return
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
    kept, args.model_init_kwargs = args.model_init_kwargs, None  # they were used, and TRL would say that they are not
    try:
        yield {"model": policy, "quantization_config": None, "peft_config": None}
    finally:
        args.model_init_kwargs = kept
