"""Checkpoints: conversations that wait to be trained, beside what TRL saves; whether one is whole, and fits a run."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from accelerate.utils.constants import FSDP_MODEL_NAME
from datasets import Dataset, IterableDataset
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, TrainingArguments
from transformers.core_model_loading import revert_weight_conversion
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from mt_grpo.errors import ConfigError, UserError
from mt_grpo.media import media_to_digests
from mt_grpo.options.table import Values
from mt_grpo.runlog.files import to_json, written_whole
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.ranks import copy_folder, several_hosts

logger = logging.getLogger(__name__)

_BATCH_OPTIONS = (
    "num_generations",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "use_vllm",
    "distillation_topk",
)
"""Options that decide the shape of the rollouts in a checkpoint, and how many rows of the dataset were used."""
_LASTING = ("seed", "shuffle_dataset", "optim")
"""Options that a checkpoint's state is bound to: the order of its rows, and what its optimizer remembers."""
_SCHEDULE = ("lr_scheduler_type", "lr_scheduler_kwargs", "learning_rate")
_MEASURED = ("reduce_lr_on_plateau", "greedy")
"""Schedules that decide by evaluations. What they decided is in the checkpoint, and no function of the step."""
BEST = ("metric_for_best_model", "greater_is_better")

MADE_WITH = "made_with.json"
"""What a checkpoint says about the run that made it: tools, rewards with their weights, and data."""
ABANDONED = "abandoned-"  # before the name of a checkpoint that a run left behind when it went back
ROWS = 8  # rows at each end of a dataset by which it is known again

_SHARDED = "global_step*", "*_fsdp_*", "optimizer_*", "optimizer.bin"
"""What DeepSpeed and FSDP leave in a checkpoint, in place of a file of the optimizer."""


def _read_mapping(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError("it is no mapping")
    return value


def _read_trainer_state(path: Path) -> None:
    if not all(isinstance(_read_mapping(path).get(name), int) for name in ("global_step", "train_batch_size")):
        raise ValueError("it does not say at which step the run was")


def _read_tensors(path: Path) -> None:
    with safe_globals():  # states of random generators hold arrays
        torch.load(path, mmap=True, map_location="cpu", weights_only=True)


class CheckpointError(UserError, OSError):
    """A checkpoint or a model cannot be written. The message is one sentence fit for the user."""


def batch_options(args: MTGRPOConfig) -> dict[str, Any]:
    """What a checkpoint says of its run's options, for a run that resumes from it."""
    names = (*_BATCH_OPTIONS, *_LASTING, *_SCHEDULE, *BEST, "beta", "max_staleness")
    options = {name: getattr(args, name) for name in names}
    options |= {"replay": args.replay is not None, "teacher": args.teacher is not None}
    options["optim"] = str(getattr(args.optim, "value", args.optim)).removesuffix("_fused")  # the same state
    options["lr_scheduler_type"] = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    return options


def save_rollouts(
    folder: Path, accelerator: Accelerator, step: int, batches: object, options: Values, prefetched: Any = None
) -> None:
    """Saves the rollouts that this process has still to train on. It is the last write to a checkpoint."""
    state = {"step": step, "buffered_inputs": batches, "processes": accelerator.num_processes, "options": options}
    if prefetched is not None:
        state["ahead"] = prefetched
    folder.mkdir(parents=True, exist_ok=True)  # where only the model is saved, the main process alone has made it
    with written_whole(_path(folder, accelerator.process_index)) as partial:
        torch.save(state, partial)


def load_rollouts(
    folder: Path, accelerator: Accelerator, options: dict[str, Any], with_routes: bool = True
) -> tuple[int, Any, Any]:
    """What `save_rollouts` saved for this process. Call `check_checkpoint` first."""
    path, device = _path(folder, accelerator.process_index), torch.device(accelerator.device)
    path = path if path.exists() else _path(folder, 0)
    state = _read(path, map_location="cpu" if device.type == "cpu" else device)  # of several ranks it is `cpu:0`
    saved = options | {"max_staleness": 0, "teacher": False} | state.get("options", {})
    if state["processes"] != accelerator.num_processes:
        ratio = options["gradient_accumulation_steps"] / saved["gradient_accumulation_steps"]
        return round(state["step"] * ratio), None, None
    for batch in state["buffered_inputs"] or []:
        if "parents" in batch:  # as older checkpoints name the column
            batch["parent"] = batch.pop("parents")
        if not with_routes:
            for name in ("prompt_routes", "routes"):
                batch.pop(name, None)
    before, here = saved["max_staleness"], options["max_staleness"]
    batches = state["buffered_inputs"] if bool(before) == bool(here) else None
    return state["step"], batches, state.get("ahead") if before <= here else None


def made_with(
    args: MTGRPOConfig, tools: Sequence[str], rewards: Sequence[Mapping[str, object]], rows: Dataset | IterableDataset
) -> dict[str, str]:
    """What a run learns from, in words."""
    return {
        "tools": ", ".join(tools) or "none",
        "rewards": ", ".join(f"{reward['name']} ({reward['weight']:g})" for reward in rewards),
        "system_prompt": repr(args.system_prompt),
        "data": _known_by(rows),
    }


def _known_by(rows: Dataset | IterableDataset) -> str:
    """A dataset as its number of rows, and a digest of those at its ends."""
    if isinstance(rows, IterableDataset):
        return "a stream"
    ends = sorted({*range(min(ROWS, len(rows))), *range(max(0, len(rows) - ROWS), len(rows))})
    digest = crc32(to_json([media_to_digests(rows[index]) for index in ends]).encode("utf-8", "backslashreplace"))
    return f"{len(rows)} rows ({digest:08x})"


def check_checkpoint(folder: Path, options: dict[str, Any], rank: int, processes: int) -> dict[str, Any]:
    """Checks that a run can resume from a checkpoint."""
    path = _path(folder, rank)
    path = path if path.exists() else _path(folder, 0)
    if not path.exists():
        raise ConfigError(
            f"The checkpoint {folder} has no conversations, so another trainer wrote it: begin a run with its model "
            "(`model_name_or_path`)."
        )
    state = _read(path, mmap=True)
    if why := _damage(folder):
        raise ConfigError(why)
    if "options" not in state and rank == 0:
        logger.warning(
            "The checkpoint %s does not say with which batch sizes it was made, so nobody checks that this run has "
            "the same.",
            folder,
        )
    saved: dict[str, Any] = options | {"max_staleness": 0, "teacher": False} | state.get("options", {})
    exact = [*_BATCH_OPTIONS, *_LASTING]
    if options["replay"]:
        exact.remove("shuffle_dataset")  # its prompts come in the order in which the run's conversations are read
    if state["processes"] != processes:
        _check_processes(folder, saved, state["processes"], options, processes)
        exact = [name for name in exact if name not in SPLIT]
        if rank == 0:
            logger.warning(
                "The checkpoint %s was made by %d processes, and this run has %d: what was sampled and not yet "
                "trained is sampled again.",
                folder,
                state["processes"],
                processes,
            )
    if {saved["lr_scheduler_type"], options["lr_scheduler_type"]}.intersection(_MEASURED):
        exact += _SCHEDULE
    other = [name for name in exact if saved[name] != options[name]]
    # whether there are log-probs of the reference model, and of the teacher
    other += [name for name in ("beta", "teacher") if bool(saved[name]) != bool(options[name])]
    if other:
        made, here = (", ".join(f"`{name}: {values[name]}`" for name in other) for values in (saved, options))
        raise ConfigError(
            f"The checkpoint {folder} was made with {made}, and this run has {here}: resume with what it was made "
            "with, or begin a run with its model (`model_name_or_path`)."
        )
    return saved


SPLIT = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
"""Options that say how processes share a batch."""


def _check_processes(folder: Path, saved: Values, before: int, options: Values, processes: int) -> None:
    """Whether other processes take the same steps: as many conversations in a step and a batch."""

    def sizes(values: Values, number: int) -> tuple[int, int]:
        rows = values["per_device_train_batch_size"] * number
        return rows * values["gradient_accumulation_steps"], rows * values["steps_per_generation"]

    if any(folder.glob(_SHARDINGS["DeepSpeed"])):
        raise ConfigError(
            f"The checkpoint {folder} was made by {before} processes under DeepSpeed, whose state only as many can "
            f"read, and this run has {processes}: launch it with `--num_processes {before}`, or begin a run with its "
            "model (`model_name_or_path`)."
        )
    made, here = sizes(saved, before), sizes(options, processes)
    if made == here:
        return
    size, rest = divmod(saved["per_device_train_batch_size"] * before, processes)
    wanted = {name: saved[name] for name in SPLIT} | {"per_device_train_batch_size": size}
    if rest:
        rows = options["per_device_train_batch_size"] * processes
        wanted = {SPLIT[0]: options[SPLIT[0]], SPLIT[1]: made[0] // rows, SPLIT[2]: made[1] // rows}
    mend = " ".join(f"--{name} {wanted[name]}" for name in SPLIT if wanted[name] != options[name])
    possible = all(wanted.values()) and sizes(wanted, processes) == made
    mend = f"go on with `{mend}`, or" if possible else "go on"
    raise ConfigError(
        f"The checkpoint {folder} was made by {before} processes, with {made[0]} conversations in a step, {made[1]} "
        f"in a batch that is sampled, and this run of {processes} has {here[0]} and {here[1]}: {mend} with as many "
        f"processes as wrote it (`--num_processes {before}`)."
    )


_SHARDINGS = {
    "DeepSpeed ZeRO-3": "global_step*/zero_pp_rank_*_model_states.pt",
    "DeepSpeed": "global_step*",
    "FSDP": f"{FSDP_MODEL_NAME}*",
}
"""What a checkpoint has whose processes shared the weights or the optimizer's state."""


def check_sharding(folder: Path, here: str | None) -> None:
    """Whether a checkpoint was written by processes that share weights as those of a run do."""
    saved = next((kind for kind, pattern in _SHARDINGS.items() if any(folder.glob(pattern))), None)
    if saved == here:
        return
    made, runs = (f"under {kind}" if kind else "without sharding" for kind in (saved, here))
    configs = {None: "without it, as with `MULTI_GPU`", "DeepSpeed": "`zero2`", "FSDP": "`fsdp2`"}
    model = "its model"
    if saved == "FSDP" and (folder / f"{FSDP_MODEL_NAME}_0").is_dir():
        model = f"what `accelerate merge-weights {folder / FSDP_MODEL_NAME}_0 FOLDER` makes of it"
    raise ConfigError(
        f"The checkpoint {folder} was written {made}, and this run trains {runs}: launch it with an accelerate "
        f"configuration {configs.get(saved, '`zero3`')} as the run that wrote it, or begin a run with {model}."
    )


def check_adapter(folder: Path, adapter: dict[str, Any] | None) -> None:
    """Whether a checkpoint has the adapter, or the whole model, that a run trains."""
    saved = adapter_settings(folder)
    if saved is not None and adapter is None:
        differs = (
            "an adapter, and this run trains the whole model: resume with `use_peft: true` and the options of the "
            "adapter that it was made with"
        )
    elif saved is None and adapter is not None and any(folder.glob("model*.safetensors")):
        differs = (
            "a whole model, and this run trains an adapter: resume without `use_peft`, or begin a run with its model "
            "(`model_name_or_path`)"
        )
    elif saved is not None and adapter is not None and saved.get("r") != adapter.get("r"):
        differs = (
            f"an adapter of rank {saved.get('r')}, and this run's has {adapter.get('r')}: resume with what it was "
            "made with (`lora_r`)"
        )
    else:
        return
    raise ConfigError(f"The checkpoint {folder} is of {differs}.")


def check_weights_fit(folder: Path, model: torch.nn.Module) -> None:
    """Whether a checkpoint's weights are a model's, by names and shapes; sharded ones are passed over."""
    files = [*folder.glob("model*.safetensors"), *folder.glob("adapter_model*.safetensors")]
    saved = {name: shape for file in files for name, shape in _shapes(file).items()}
    known = {name.replace(".default.", "."): list(each.shape) for name, each in model.named_parameters()}
    if isinstance(model, PreTrainedModel) and not saved.keys() & known.keys():  # see `load_converted`
        shapes = {name: each.detach().to("meta") for name, each in model.named_parameters()}
        known = {name: list(each.shape) for name, each in revert_weight_conversion(model, shapes).items()}
    both = [name for name in known if name in saved and known[name] != [0]]
    other = next((name for name in both if known[name] != saved[name]), None)
    if other is not None:
        what = f"`{other}` has the shape {saved[other]} there and {known[other]} here"
    elif saved and not both and any(shape != [0] for shape in known.values()):
        what = f"`{next(iter(saved))}` is there and not here"
    else:
        return
    raise ConfigError(
        f"The checkpoint {folder} is of another model ({what}): resume with the `model_name_or_path` that it was made "
        "with, or begin a run of its own (another `output_dir`)."
    )


def load_converted(folder: Path, model: PreTrainedModel) -> bool:
    """Loads weights whose names in files transformers changes, which its trainer would pass over; tells if it did."""
    saved = {name for file in folder.glob("model*.safetensors") for name in _shapes(file)}
    if not saved - model.state_dict().keys():
        return False
    model.load_state_dict(type(model).from_pretrained(folder).state_dict())
    return True


def _shapes(file: Path) -> dict[str, list[int]]:
    with _naming_damage(file), safe_open(file, framework="pt") as tensors:
        return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118


def adapter_settings(folder: str | Path) -> dict[str, Any] | None:
    """What peft saved with the adapter in a folder; `None` where there is no adapter."""
    path = Path(folder) / ADAPTER_CONFIG_NAME
    if not path.is_file():
        return None
    try:
        return _read_mapping(path)
    except ValueError as error:
        raise ConfigError(
            f"{path} does not describe an adapter ({error}): bring the file back, or name another model."
        ) from None


def _find_checkpoint(wanted: str | bool | None, output_dir: str) -> str | None:
    """The folder that `resume_from_checkpoint` names: `true` the latest whole one, `auto` also none."""
    if wanted is None or str(wanted).lower() == "false":
        return None
    if str(wanted).lower() not in ("true", "auto"):
        folder = Path(str(wanted))
        if not folder.is_dir():
            raise ConfigError(
                f"`resume_from_checkpoint: {wanted}` is no folder: name one, or `true` for the latest in `output_dir`."
            )
        if not (folder / TRAINER_STATE_NAME).exists() and not any(folder.glob("rollouts-rank*.pt")):
            there = ", ".join(map(str, _checkpoints(folder))) or "of which this folder has none"
            raise ConfigError(f"`resume_from_checkpoint: {wanted}` is no checkpoint: name one, {there}.")
        if why := _damage(folder):
            raise ConfigError(why)
        return str(wanted)
    latest = latest_checkpoint(output_dir)
    if latest is not None:
        for folder in _checkpoints(output_dir):
            if _step(folder) > _step(latest) and (why := _damage(folder)):
                logger.warning("%s So the run goes on from the checkpoint before, %s.", why, latest)
    if latest is None and str(wanted).lower() == "true":
        raise ConfigError(
            f"There is no checkpoint in `output_dir: {output_dir}` to resume from; `save_strategy: steps` leaves some."
        )
    return None if latest is None else str(latest)


def resume_point(wanted: str | bool | None, args: TrainingArguments) -> str | None:
    """
    The checkpoint that `resume_from_checkpoint` names, of which every host then has a copy. Where the latest one is
    asked for, it is the latest of any host: a launcher may give the first place to another one. Files go only where
    another host has the whole checkpoint. This is a collective call.
    """
    if not several_hosts(args):
        return _find_checkpoint(wanted, args.output_dir)
    found, error = None, None
    try:
        found = _find_checkpoint(wanted, args.output_dir)
    except ConfigError as refusal:
        error = str(refusal)
    answers = gather_object([(found, error, found is not None and is_whole(Path(found)))])
    folders = [folder for folder, _, _ in answers if folder is not None]
    if not folders:
        errors = [sentence for _, sentence, _ in answers if sentence is not None]
        if errors:
            raise ConfigError(errors[0])
        return None
    chosen = max(folders, key=_step)  # the first of equals
    wholes = [folder == chosen and whole for folder, _, whole in answers]
    source = wholes.index(True) if any(wholes) else [folder for folder, _, _ in answers].index(chosen)
    copy_folder(Path(chosen), source, args.local_process_index == 0, mirrors=any(wholes))
    return chosen


def _step(folder: str | Path) -> int:
    number = Path(folder).name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def latest_checkpoint(output_dir: str) -> Path | None:
    """The folder of the latest whole checkpoint in an output folder, where there is one."""
    return next(filter(is_whole, reversed(_checkpoints(output_dir))), None)


def _checkpoints(output_dir: str | Path) -> list[Path]:
    """Folders of checkpoints, whole or not, by their steps."""
    found = Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    folders = [path for path in found if path.name.rsplit("-", 1)[1].isdecimal() and path.is_dir()]
    return sorted(folders, key=_step)


def find_trained(run: Path, checkpoint: int | None = None) -> Path:
    """The folder of a run's model: of a step's checkpoint, the run's own, or its latest checkpoint."""
    if not run.is_dir():
        raise ConfigError(f"There is no folder {run}: name the `output_dir` of a run.")
    if checkpoint is not None:
        folder = run / f"{PREFIX_CHECKPOINT_DIR}-{checkpoint}"
        if not folder.is_dir():
            there = ", ".join(str(_step(each)) for each in _checkpoints(run)) or "none"
            raise ConfigError(f"{run} has no checkpoint {checkpoint}; those that it has: {there}.")
        return folder
    if any((run / name).is_file() for name in (CONFIG_NAME, ADAPTER_CONFIG_NAME)):
        return run
    latest = latest_checkpoint(str(run))
    if latest is None:
        raise ConfigError(
            f"There is no trained model in {run}: it is no run's `output_dir`, or the run has neither ended nor kept "
            "a checkpoint (`save_strategy: steps` keeps some)."
        )
    return latest


def set_aside(output_dir: str | Path, step: int) -> list[str]:
    """Renames checkpoints of later steps than `step`, to which a run goes back, and returns their new names."""
    names = []
    for path in _checkpoints(output_dir):
        if _step(path) > step:
            aside, times = path.with_name(f"{ABANDONED}{path.name}"), 1
            while aside.exists():
                times += 1
                aside = path.with_name(f"{ABANDONED}{path.name}-{times}")
            with suppress(FileNotFoundError):  # another host was first in a shared folder
                names.append(path.rename(aside).name)
    return names


def remove_oldest(saved: Path, limit: int | None, best: str | None) -> None:
    """
    Removes checkpoints as long as a run has more than `limit`, not `saved` or the best one: those set aside first,
    then those after `saved`, of an earlier run, then by their steps. Clocks and copies change the times of folders.
    """
    aside = sorted(saved.parent.glob(f"{ABANDONED}{PREFIX_CHECKPOINT_DIR}-*"), key=lambda path: path.stat().st_mtime)
    there = [*aside, *sorted(_checkpoints(saved.parent), key=lambda path: _step(path) <= _step(saved))]
    beyond = len(there) - limit if limit and limit > 0 else 0
    stay = {saved.resolve(), Path(best or saved).resolve()}
    for path in [path for path in there if path.resolve() not in stay][: max(0, beyond)]:
        shutil.rmtree(path, ignore_errors=True)


def is_whole(folder: Path) -> bool:
    """Whether every process had finished writing a checkpoint, and what they wrote can be read."""
    return (folder / TRAINER_STATE_NAME).exists() and _path(folder, 0).exists() and _damage(folder) is None


def _damage(folder: Path) -> str | None:
    """What keeps the rollouts of a checkpoint from being read, in a sentence; `None` where nothing does."""
    try:
        for pattern, read in _READERS.items():
            for file in folder.glob(pattern):
                with _naming_damage(file):
                    read(file)
    except ConfigError as error:
        return str(error)
    gone = _gone(folder)
    return None if gone is None else f"The checkpoint {folder} is damaged, its {gone} is gone: {_instead(folder)}."


def _gone(folder: Path) -> str | None:
    """A file that a checkpoint lacks, without which the trainer would raise, or go on otherwise unsaid."""
    if not (folder / TRAINER_STATE_NAME).exists():  # another host may have the rest
        return None
    if _path(folder, 0).exists():
        for rank in range(_read(_path(folder, 0), mmap=True)["processes"]):
            if not _path(folder, rank).exists():
                return _path(folder, rank).name
    sharded = any(map(any, map(folder.glob, _SHARDED)))
    if not sharded and not any(map(any, map(folder.glob, ("*model*.safetensors", "*model*.bin")))):
        return "model.safetensors"
    states = OPTIMIZER_NAME, SCHEDULER_NAME, _RNG
    there = [any(folder.glob(pattern)) for pattern in states]
    if sharded or not any(there) or all(there):  # `save_only_model` leaves none of them
        return None
    return states[there.index(False)].replace("*", "")


@contextmanager
def _naming_damage(file: Path) -> Iterator[None]:
    """Refuses a file of a checkpoint that cannot be read, and says what to resume from instead."""
    try:
        yield
    except ConfigError:
        raise
    # torch's reader trusts most of what it reads, and raises anything where that is damaged
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"The checkpoint {file.parent} is damaged, its {file.name} cannot be read ({why[:120]}): "
            f"{_instead(file.parent)}."
        ) from None


def _instead(folder: Path) -> str:
    """What to do where a checkpoint is damaged."""
    before = [str(each) for each in _checkpoints(folder.parent) if each != folder]
    return f"resume from another one ({', '.join(before)})" if before else "begin the run anew"


def _read(path: Path, map_location: Any = "cpu", **options: Any) -> dict[str, Any]:
    with _naming_damage(path):
        state: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=True, **options)
        if not isinstance(state, dict) or not isinstance(state["processes"], int):
            raise ValueError("it is of another program")
    return state


_RNG = "rng_state*.pth"
_READERS: dict[str, Callable[[Path], Any]] = {
    "rollouts-rank*.pt": partial(_read, mmap=True),
    **dict.fromkeys(("*.safetensors", "*.tensors"), _shapes),
    TRAINER_STATE_NAME: _read_trainer_state,
    **dict.fromkeys((OPTIMIZER_NAME, SCHEDULER_NAME, _RNG), _read_tensors),
    **dict.fromkeys((CONFIG_NAME, ADAPTER_CONFIG_NAME, MADE_WITH), _read_mapping),
}
"""How to tell whether files of a checkpoint can be read, by their pattern."""


@contextmanager
def says_what_cannot_be_written(folder: Path, output_dir: str | Path) -> Iterator[None]:
    """Turns the errors of writing a model or a checkpoint into a sentence."""
    try:
        yield
    except Exception as error:  # the library tokenizers raises no narrower one
        torch_writes = any(name in str(error) for name in ("PytorchStreamWriter", "inline_container"))
        known = isinstance(error, OSError | SafetensorError) or type(error) is Exception or torch_writes
        if isinstance(error, UserError) or not known:
            raise  # of training, not of writing
        why = error.strerror or error if isinstance(error, OSError) else error
        there = next(path for path in (Path(output_dir), *Path(output_dir).absolute().parents) if path.exists())
        free = shutil.disk_usage(there).free / 1e9
        whole = [each for each in reversed(_checkpoints(output_dir)) if each != folder and is_whole(each)][:1]
        last = f"go on from the last whole checkpoint (`--resume_from_checkpoint {whole[0]}`)" if whole else ""
        raise CheckpointError(
            f"{folder} cannot be written: {' '.join(str(why).split())[:160]} ({free:.1f} GB are free there): free "
            f"space or choose another `output_dir`, and {last or 'begin anew, since there is no whole checkpoint'}."
        ) from error


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rollouts-rank{rank}.pt"
