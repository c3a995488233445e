"""A trainer whose run can be stopped anywhere and resumed: checkpoints, what is read back, and signs of life."""

from __future__ import annotations

import inspect
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import yaml
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import gather_object, is_peft_model
from datasets import Dataset
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Sampler
from transformers import EarlyStoppingCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.distributed import DistributedBackend

from mt_grpo.data.images import naming_rows
from mt_grpo.envs import EnvLike
from mt_grpo.envs.source import tool_names
from mt_grpo.errors import ConfigError
from mt_grpo.preemption import PreemptedError, heard, listening
from mt_grpo.runlog.files import Heartbeat, Silence, to_json
from mt_grpo.runlog.schema import FOLDER
from mt_grpo.training.card import write_card
from mt_grpo.training.checkpoint import (
    BEST,
    MADE_WITH,
    batch_options,
    check_adapter,
    check_checkpoint,
    check_sharding,
    check_weights_fit,
    load_converted,
    load_rollouts,
    made_with,
    remove_oldest,
    resume_point,
    save_rollouts,
    says_what_cannot_be_written,
)
from mt_grpo.training.columns import check_rows_suffice, named_datasets
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.model import check_weights, load_reference, save_reference
from mt_grpo.training.prefetch import PrefetchQueue, SmallerSteps
from mt_grpo.training.preflight import check_batch_sizes, left_by_runs, locked
from mt_grpo.training.ranks import check_same, clear_checkpoint, keep_checkpoint, keep_records
from mt_grpo.training.rollout_batch import Columns
from mt_grpo.training.step_log import FewerPrinter, FewerProgress, StepLog, serving
from mt_grpo.training.step_log.records import versions
from mt_grpo.training.teacher import TeacherWeights
from mt_grpo.trajectory import Row

_RATES = ("lr", "initial_lr")
_OPTIONS = {
    "initial_lr": ("learning_rate",),
    "weight_decay": ("weight_decay",),
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": ("adam_epsilon",),
}
"""The options of a group's entries."""

logger = logging.getLogger(__name__)


def _hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of an optimizer's groups, rates among them, without what some optimizers count in there."""
    plain = optimizer
    while hasattr(plain, "optimizer"):  # accelerate and DeepSpeed wrap it
        plain = plain.optimizer
    names = {*_RATES, *_OPTIONS, *inspect.signature(type(plain)).parameters} - {"params"}
    return [{name: value for name, value in group.items() if name in names} for group in optimizer.param_groups]


def _take_given(
    optimizer: Optimizer, scheduler: object, given: list[dict[str, Any]]
) -> dict[str, tuple[object, object]]:
    """Gives an optimizer and its schedule back the options that a checkpoint replaced; returns what differed."""
    if isinstance(scheduler, AcceleratedScheduler):  # DeepSpeed's
        scheduler = scheduler.scheduler
    changed: dict[str, tuple[object, object]] = {}
    for group, values in zip(optimizer.param_groups, given, strict=True):
        for name, options in _OPTIONS.items():
            if name in group and name in values:
                before, here = (each if len(options) > 1 else (each,) for each in (group[name], values[name]))
                pairs = zip(options, before, here, strict=True)
                changed |= {option: (old, new) for option, old, new in pairs if old != new}
    by_step = isinstance(scheduler, LambdaLR)
    for group, values in zip(optimizer.param_groups, given, strict=True):
        group.update({name: value for name, value in values.items() if by_step or name not in _RATES})
    if isinstance(scheduler, LambdaLR):
        bases = [values["initial_lr"] for values in given]
        rates = [base * of(scheduler.last_epoch) for base, of in zip(bases, scheduler.lr_lambdas, strict=True)]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler.load_state_dict(scheduler.state_dict() | {"base_lrs": bases, "_last_lr": rates})
    return changed


@contextmanager
def _placed(args: MTGRPOConfig) -> Iterator[None]:
    """Names `output_dir` from the root: a tool or a reward may change the current folder of the process."""
    given = args.output_dir
    if Path(given).is_absolute():
        yield
        return
    here, args.output_dir = Path.cwd(), str(Path(given).absolute())
    try:
        yield
    finally:
        args.output_dir = given
        with suppress(OSError):  # it may be gone, which would hide what ended the run
            os.chdir(here)


class EarlyStopping(EarlyStoppingCallback):
    """Transformers' for that evaluation set of several which `metric_for_best_model` is of; a resume counts on."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        """Takes the evaluations without a better one from the checkpoint."""
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        self.early_stopping_patience_counter = saved["attributes"]["early_stopping_patience_counter"] if saved else 0
        super().on_train_begin(args, state, control, **kwargs)

    def on_evaluate(
        self, args: TrainingArguments, state: object, control: object, metrics: dict[str, float], **kwargs: object
    ) -> None:
        if f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}" in metrics:
            super().on_evaluate(args, state, control, metrics, **kwargs)


class ResumableTrainer(GRPOTrainer):
    """TRL's trainer with checkpoints that are whole or absent. `MTGRPOEnvTrainer` sets its attributes."""

    args: MTGRPOConfig
    env: EnvLike
    step_log: StepLog
    _eval_prefix: str | None  # of the metrics of the evaluation under way
    _silence: Silence
    _prefetch: PrefetchQueue | None
    _earlier: list[Path]
    _saved: Path | None = None  # the checkpoint of the latest step that has one
    _steps: SmallerSteps
    shows_media: bool
    _synced_step: int
    _failed_batches: int
    _sampler: Sampler[int] | None
    _begun: tuple[int, int, Any] = (-1, 0, None)
    evaluated_step: int | None
    teacher_weights: TeacherWeights | None
    _hyperparameters: list[dict[str, Any]]

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: object, **kwargs: object) -> Any:
        """Trains as TRL does; `True` goes on from the latest whole checkpoint. Warns of records of another run."""
        check_batch_sizes(self.args)
        check_rows_suffice(self.args, self.train_dataset)
        checkpoint = resume_point(resume_from_checkpoint, self.args)
        if checkpoint is not None:
            zero3 = DistributedBackend(self.accelerator).is_zero3
            shards = {"DeepSpeed ZeRO-3": zero3, "DeepSpeed": self.is_deepspeed_enabled, "FSDP": self.is_fsdp_enabled}
            check_sharding(Path(checkpoint), next((kind for kind, given in shards.items() if given), None))
            adapter = self.model.peft_config["default"].to_dict() if is_peft_model(self.model) else None
            check_adapter(Path(checkpoint), adapter)
            check_weights_fit(Path(checkpoint), self.accelerator.unwrap_model(self.model))
        left = left_by_runs(self.args.output_dir)  # a folder may have been cleared since
        earlier = [path.name for path in self._earlier if path in left]
        if earlier and checkpoint is None and self.is_world_process_zero():
            logger.warning(
                "`output_dir: %s` holds an earlier run (%s), to whose records this one adds, in place of "
                "conversations of the same steps: give each run an `output_dir` of its own.",
                self.args.output_dir,
                ", ".join(earlier[:3]),
            )
        self._earlier = []
        # a run that begins again keeps nothing of one that was interrupted in this process
        self._step, self._buffered_inputs, self._synced_step, self._failed_batches = 0, None, -1, 0
        self._begun, self.evaluated_step, self._initial_global_step = (-1, 0, None), None, 0
        self._saved = None if checkpoint is None else Path(checkpoint).resolve()
        folder = Path(self.args.output_dir).resolve()
        self.step_log.records.resumes = checkpoint is not None and Path(checkpoint).resolve().parent == folder
        ahead = self.args.max_staleness and self.replay is None
        self._prefetch, self._sampler = PrefetchQueue(self) if ahead else None, None  # a stream has no sampler
        signals = [signal.SIGUSR1, *([signal.SIGTERM] if self.args.enable_jit_checkpoint else [])]
        with _placed(self.args), locked(self.args), listening(*signals):
            with (
                self._scraped(),
                self._heartbeat(),
                self._says_how_far(),
                self._prefetch or nullcontext(),
                self._names_rows(),
            ):
                result = super().train(checkpoint, *args, **kwargs)
            keep_records(Path(self.args.output_dir, FOLDER), self.args)
        if self._initial_global_step == self.state.global_step < self.state.max_steps:
            raise ConfigError(
                f"The dataset ended before step {self.state.global_step + 1} of {self.state.max_steps}, so nothing "
                "was trained: give it more rows."
            )
        check_weights(self.model, self.accelerator, self.state.global_step)
        return result

    def _heartbeat(self) -> AbstractContextManager[None]:
        """Signs of life of the run, while it trains."""
        if not self.is_world_process_zero():
            return nullcontext()

        def look() -> dict[str, Any]:
            return {
                "first": self._initial_global_step,
                "step": self.state.global_step,
                "of": self.state.max_steps,
                "waits_for": self.step_log.activity.waits_for,
                "under_way": self.step_log.activity.conversations(),
            }

        return Heartbeat(self.args.output_dir, look).beating()

    def _scraped(self) -> AbstractContextManager[None]:
        """Metrics for Prometheus, while it trains."""
        address = self.args.metrics_address
        if address is None or not self.is_world_process_zero():
            return nullcontext()

        def look() -> dict[str, dict[str, float]]:
            numbers = {
                **self.step_log.logged,
                "step": self.state.global_step,
                "max_steps": self.state.max_steps,
                "conversations_under_way": len(self.step_log.activity.conversations()),
            }
            return {name: {Path(self.args.output_dir).name: value} for name, value in numbers.items()}

        return serving(address, "run", look)

    def _says_how_far(self) -> AbstractContextManager[object]:
        """In logs of a script, a line within a step or an evaluation that takes long."""
        prints = any(isinstance(each, (FewerPrinter, FewerProgress)) for each in self.callback_handler.callbacks)
        if not prints or sys.stdout.isatty() or self._silence.watched or not self.is_world_process_zero():
            return nullcontext()
        return self._silence

    def _names_rows(self, evaluated: object = None) -> AbstractContextManager[None]:
        """Says which row has an image that cannot be shown: of what is `evaluated`, or of the trainer's rows."""
        if not self.shows_media:
            return nullcontext()
        evaluated = self.eval_dataset if evaluated is None or isinstance(evaluated, str) else evaluated
        return naming_rows(named_datasets(None, evaluated) | named_datasets(self.train_dataset))

    def describe_progress(self) -> str:
        """How far the step under way is, or the evaluation."""
        said = self.step_log.activity.describe()
        if self._eval_prefix is not None:  # the model's mode does not tell: it samples in that of evaluation
            return f"evaluation: {said}"
        if trained := len(self.step_log.latest.outputs):
            said += f", {trained} of {self.args.gradient_accumulation_steps} micro-batches done"
        if self._begun[0] < 0:
            return "before the first step"
        # TRL counts a step before its metrics and its checkpoint are written
        return f"step {self._begun[0] + 1}/{self.state.max_steps}: {said}"

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[Row]], num_batches: int, *args: object
    ) -> tuple[list[Columns], Tensor | None]:
        """Those of transformers, which may have been read earlier. An optimiser step begins here."""
        self.end_if_preempted()
        self._begun = self.state.global_step, self._step, self._buffered_inputs
        if self._prefetch is not None:
            epoch_iterator = self._prefetch.read(epoch_iterator, num_batches, self._step, self.state)
        return super().get_batch_samples(epoch_iterator, num_batches, *args)

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler[int] | None:
        self._sampler = super()._get_train_sampler(dataset)
        return self._sampler

    def _init_training_state(self, max_steps: int, updates: int, num_epochs: int, *args: object) -> tuple[int, int]:
        """
        Gives a resumed run the order of rows that its epoch has: each epoch draws it after the one before, and TRL's
        trainer would begin with that of the first. Stops a run that has taken all its steps, where TRL's would take
        one more.
        """
        begin = super()._init_training_state(max_steps, updates, num_epochs, *args)
        self.state.compute_steps(self.args, max_steps)  # a checkpoint has those of its run
        if self.state.global_step < max_steps:
            if self._sampler is not None:
                for _ in range(begin[0]):
                    next(iter(self._sampler))
            return begin
        if self.is_world_process_zero():
            logger.warning(
                "The run had finished: it is at step %d of %d, and takes no further step. Raise `max_steps` to train "
                "on.",
                self.state.global_step,
                max_steps,
            )
        return num_epochs, 0

    def _prepare_for_training(self, max_steps: int, dataloader: DataLoader, resume_from_checkpoint: str | None) -> Any:
        """TRL's. It may give all processes the weights of the first one, so they are compared before."""
        sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        if plugin is None or not plugin.cpu_ram_efficient_loading:  # else the first process alone has loaded them
            models = {"": self.accelerator.unwrap_model(self.model), "reference ": self.ref_model}
            models["teacher "] = self.teacher_model
            weights = {
                f"{name}{each}": weight
                for name, model in models.items()
                if model is not None
                for each, weight in model.state_dict().items()
            }
            mend = "give every host the same files of the model, or the same `model_revision`"
            check_same("weights", weights, mend)
        prepared = super()._prepare_for_training(max_steps, dataloader, resume_from_checkpoint)
        if self.teacher_weights is not None:
            self.teacher_weights.begin(resume_from_checkpoint)
        if resume_from_checkpoint is not None and not sharded:
            state = self.optimizer.state_dict()["state"]
            tensors = {f"{key} {name}": value for key, each in state.items() for name, value in each.items()}
            mend = f"give every host the same files of {resume_from_checkpoint}"
            check_same("states of the optimizer", tensors, mend)
        return prepared

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        folder, accelerator = Path(checkpoint), self.accelerator
        options = batch_options(self.args)
        saved = check_checkpoint(folder, options, accelerator.process_index, accelerator.num_processes)
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        except (ValueError, KeyError) as error:  # of torch
            raise ConfigError(
                f"The optimizer's state in {folder} is not of the weights that this run trains "
                f"({' '.join(str(error).split())[:160]}): resume with what it was made with, or begin a run with its "
                "model (`model_name_or_path`)."
            ) from error
        changed = _take_given(self.optimizer, self.lr_scheduler, self._hyperparameters)
        if any(saved[name] != options[name] for name in BEST):  # the best so far is by another measure
            self.state.best_metric = self.state.best_global_step = self.state.best_model_checkpoint = None
        if self.is_world_process_zero():
            self._warn_of_differences(folder, changed)
        load_reference(folder, self.args, accelerator, self.ref_model)
        self._step, self._buffered_inputs, prefetched = load_rollouts(
            folder, accelerator, options, self.args.replays_routes
        )
        if self._prefetch is not None and prefetched is not None:
            self._prefetch.restore(prefetched)

    def create_scheduler(self, *args: object, **kwargs: object) -> Any:
        """TRL's, which is called when the optimizer is ready and no checkpoint is loaded yet."""
        scheduler = super().create_scheduler(*args, **kwargs)
        if self.optimizer is not None:
            self._hyperparameters = _hyperparameters(self.optimizer)
        return scheduler

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        plain = self.accelerator.unwrap_model(self.model)
        whole = model is None and not is_peft_model(plain)
        if not (whole and load_converted(Path(resume_from_checkpoint), plain)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        plain, best = self.accelerator.unwrap_model(self.model), self.state.best_model_checkpoint
        sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled  # whose files have the model's own names
        if sharded or is_peft_model(plain) or not load_converted(Path(best), plain):
            super()._load_best_model()
        self._synced_step, self.evaluated_step = -1, None  # servers have those of the last step

    def _made_with(self) -> dict[str, str]:
        return made_with(self.args, tool_names(self.env), self.step_log.records.rewards, self.train_dataset)

    def _warn_of_differences(self, folder: Path, changed: dict[str, tuple[object, object]]) -> None:
        """Warns where the run that goes on has other things or options than its checkpoint."""
        path, here = folder / MADE_WITH, self._made_with()
        made = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        other = [
            f"{name}: {made[name]}; here {here[name]}" for name in here if made.get(name, here[name]) != here[name]
        ]
        other += [f"{name}: {before}; here {given}" for name, (before, given) in changed.items()]
        if other:
            logger.warning(
                "The checkpoint %s was made with other %s. The resumed run goes on with what is here.",
                folder,
                " | ".join(other),
            )

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Weights that are tied to others are in no checkpoint, and are not missing."""
        tied = self.accelerator.unwrap_model(self.model).all_tied_weights_keys
        load_result.missing_keys[:] = [key for key in load_result.missing_keys if key not in tied]
        super()._issue_warnings_after_load(load_result)

    # What is saved

    def save_checkpoint(self) -> Path:
        """Writes a checkpoint of the last finished step, once. This is a collective call."""
        folder = self._checkpoint_folder()
        if folder.resolve() != self._saved:  # one that is there may be of before the run went back behind it
            step, *before = self._begun
            if step == self.state.global_step:  # an unfinished step begins again
                self._step, self._buffered_inputs = before
                if self.args.max_staleness:
                    self._steps.undo()
            self._save_checkpoint(self.model, trial=None)
        return folder

    def end_if_preempted(self) -> None:
        """Ends the run, between optimizer steps, if a signal asked a process to. A collective call."""
        asked = [name for name in gather_object([heard()]) if name is not None]
        if not asked:
            return
        kept = "no step was taken"
        if self.state.global_step:
            kept = f"what was learnt up to step {self.state.global_step} is in {self.save_checkpoint()}"
        error = PreemptedError(
            f"The run was asked to end by {asked[0]}: {kept}. Run the same command with `--resume_from_checkpoint "
            "auto` to go on."
        )
        if self.is_world_process_zero():
            logger.warning("%s", error)
        raise error

    def _checkpoint_folder(self, trial: object = None) -> Path:
        return Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        folder = self._checkpoint_folder(trial)
        limit, self.args.save_total_limit = self.args.save_total_limit, None  # earlier ones stay until this is whole
        try:
            with self.step_log.activity.of(folder.name), says_what_cannot_be_written(folder, self.args.output_dir):
                clear_checkpoint(folder, self.args)  # of one that was written before the run went back behind it
                super()._save_checkpoint(model, trial)
                save_reference(folder, self.args, self.accelerator, self.ref_model)
                if self.teacher_weights is not None:
                    self.teacher_weights.save(folder)
                if self.is_world_process_zero():
                    (folder / MADE_WITH).write_text(to_json(self._made_with()), encoding="utf-8")
                options = batch_options(self.args)
                prefetched = None if self._prefetch is None else self._prefetch.state(self.state.global_step)
                save_rollouts(folder, self.accelerator, self._step, self._buffered_inputs, options, prefetched)
                keep_checkpoint(folder, self.args)
                keep_records(Path(self.args.output_dir, FOLDER), self.args)
        except BaseException:  # a checkpoint is whole or absent, whatever stops its writing
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            self.args.save_total_limit = limit
        self._saved = folder.resolve()
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            remove_oldest(folder, limit, self.state.best_model_checkpoint)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        check_weights(self.model, self.accelerator, self.state.global_step)
        super().save_model(output_dir, _internal_call)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Writes the card of the model as it is to `output_dir`; see `write_card`."""
        if not self.is_world_process_zero():
            return
        folder, records = Path(self.args.output_dir), self.step_log.records
        config = folder / "config.yaml"  # which `mt-grpo train` writes
        options = (yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else None) or {}
        write_card(
            folder,
            model_name or folder.resolve().name,
            {**records.about, "versions": versions()},
            records.rewards,
            self.state.log_history,
            step=self.state.global_step,
            options=options | ({"dataset_name": dataset_name} if dataset_name else {}),
            adapter=is_peft_model(self.model),
            tags={*self._tag_names, *([tags] if isinstance(tags, str) else tags or [])},
        )
