"""`mt-grpo merge`: the model that a run trained, as one folder that loads without the run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
import warnings
from pathlib import Path

from accelerate.utils.constants import FSDP_MODEL_NAME
from peft import PeftModel
from transformers import AutoConfig, AutoProcessor
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import CONFIG_NAME
from transformers.utils.logging import disable_progress_bar
from trl.trainer.utils import create_model_from_path

from mt_grpo.app.recipe_file import CONFIG, load_schema, read_file
from mt_grpo.app.request import check_new, read_words, whole_number
from mt_grpo.errors import MISREAD, ConfigError, libraries_may_refuse
from mt_grpo.imports import in_home
from mt_grpo.options.table import Values
from mt_grpo.options.values import parse_mapping
from mt_grpo.runlog import Run, open_run
from mt_grpo.runlog.files import folders_made
from mt_grpo.training.card import write_card
from mt_grpo.training.checkpoint import adapter_settings, find_trained
from mt_grpo.training.model import resolve_base, resolve_model

USAGE = {
    "merge": """usage: mt-grpo merge RUN [--to FOLDER] [--checkpoint N] [--trust_remote_code]

writes the model that the run in the folder RUN trained as one that loads without the run: an adapter is merged into
its base, full weights are copied; with tokenizer, chat template, generation config, and a card

  --to FOLDER          the folder to make (RUN/merged)
  --checkpoint N       the model of RUN/checkpoint-N instead of the last one
  --trust_remote_code  run code that comes with the model, where it needs some
"""
}

_WEIGHTS = (
    "model*.safetensors",
    "model*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
)
_COPIED = (CONFIG_NAME, "generation_config.json", "*.py", *_WEIGHTS)
"""Files of a model with full weights. What encodes its text is loaded and saved."""


def merge(arguments: list[str]) -> int:
    """`mt-grpo merge RUN`."""
    (folder,), given = read_words("merge", arguments, one="the `output_dir` of a run")
    run = in_home(folder)
    checkpoint = whole_number(given, "--checkpoint", 1)
    disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)
    trained = find_trained(run, checkpoint)
    to = in_home(given.get("--to") or str(run / "merged"))
    check_new(str(to), "--to")
    with folders_made(to.parent):
        done = _merge_model(run, trained, to, "--trust_remote_code" in given)
    print(f"{to}: {done}")
    return 0


def _merge_model(run: Path, trained: Path, to: Path, trusts: bool) -> str:
    """Writes the model in `trained`, of a run, to a folder, which is there whole or not at all. Says what it is."""
    record = open_run(run, begun=True)
    config = run / CONFIG
    options = read_file(str(config))[0] if config.is_file() else {}
    load_schema().check(options, config)
    _check_weights(trained, run)
    partial = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
    try:
        with libraries_may_refuse(f"The model in {trained} cannot be merged", *MISREAD):
            what = _write_model(trained, partial, {**record.about.get("options", {}), **options}, trusts)
        step = _step_of(trained, record)
        if record.about:
            name = f"{run.resolve().name}{'' if trained == run else f'-{trained.name}'}"
            rewards = record.about.get("rewards") or []
            write_card(partial, name, record.about, rewards, record.metrics(), step=step, options=options)
        if config.is_file():
            shutil.copy(config, partial / CONFIG)
        os.umask(umask := os.umask(0))
        partial.chmod(0o777 & ~umask)
        os.replace(partial, to)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    size = sum(file.stat().st_size for file in to.iterdir())
    return f"the model of step {step}, {what}, {size / 1e6:.1f} MB"


def _write_model(trained: Path, to: Path, options: Values, trusts: bool) -> str:
    settings = adapter_settings(trained)
    if settings is None:
        for pattern in _COPIED:
            for file in trained.glob(pattern):
                shutil.copy(file, to / file.name)
        what = "full weights"
    else:
        dtype = options.get("dtype") or "auto"
        if isinstance(loading := parse_mapping(options.get("model_init_kwargs"), "model_init_kwargs"), dict):
            dtype = loading.get("dtype") or dtype
        name = resolve_base(str(trained))
        base = create_model_from_path(name, dtype=dtype, device_map=None, trust_remote_code=trusts)
        model = PeftModel.from_pretrained(base, str(trained)).merge_and_unload(safe_merge=True)
        model.save_pretrained(to)
        what = f"its adapter merged into {settings['base_model_name_or_path']} ({model.dtype})".replace("torch.", "")
    AutoConfig.from_pretrained(to, trust_remote_code=trusts)
    AutoProcessor.from_pretrained(trained, trust_remote_code=trusts).save_pretrained(to)
    return what


def _check_weights(trained: Path, run: Path) -> None:
    """Refuses a folder whose weights only another program can put together, with its command."""
    if any(any(trained.glob(pattern)) for pattern in (*_WEIGHTS, "adapter_model*")):
        resolve_model(str(trained))  # refuses damage
        return
    fsdp = trained / f"{FSDP_MODEL_NAME}_0"
    if fsdp.is_dir():
        command = shlex.join(["accelerate", "merge-weights", str(fsdp), str(trained)])
        raise ConfigError(
            f"{trained} has its weights in pieces, as FSDP writes them: put them together with `{command}`, and copy "
            f"{CONFIG_NAME} of its base model there; then run this command again."
        )
    if (trained / "zero_to_fp32.py").is_file():
        words = ["python", str(trained / "zero_to_fp32.py"), str(trained), str(trained), "--safe_serialization"]
        command = shlex.join(words)
        raise ConfigError(
            f"{trained} has its weights in pieces, as DeepSpeed writes them: put them together with `{command}`, and "
            "run this command again."
        )
    raise ConfigError(f"There are no weights of a model in {trained}, the folder of the run {run}.")


def _step_of(trained: Path, run: Run) -> int:
    """Optimiser steps after which a model was kept."""
    state = trained / TRAINER_STATE_NAME
    if state.is_file():
        try:
            return int(json.loads(state.read_text(encoding="utf-8"))["global_step"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            raise ConfigError(f"{state} is damaged: bring it back, or merge another checkpoint.") from None
    return max((int(row["step"]) for row in run.metrics()), default=0)
