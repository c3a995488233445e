"""The trainer: TRL's GRPO with rollouts of several turns and an advantage per token."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from trl import GRPOConfig

from mt_grpo.concurrency import run
from mt_grpo.credit import Rule, call_rule
from mt_grpo.data import had_text_prompts
from mt_grpo.data.images import with_own_opener
from mt_grpo.envs import EnvLike
from mt_grpo.envs.env import ServedEnv
from mt_grpo.envs.source import TRLFactory, source_of
from mt_grpo.errors import ConfigError
from mt_grpo.forward.media import Media, media_tokens
from mt_grpo.forward.probe import context_length, without_dropout
from mt_grpo.imports import did_you_mean
from mt_grpo.options.rules import check_eval_batch
from mt_grpo.rewards import RewardFunc, Scores, score_trajectories
from mt_grpo.rollout import Engine, RolloutError
from mt_grpo.rollout.engines import LocalEngine
from mt_grpo.rollout.engines.transformers import TransformersEngine, prove_engine
from mt_grpo.rollout.policy import Again
from mt_grpo.runlog.files import Silence
from mt_grpo.training import (
    columns,
    environment,
    forward_plan,
    preflight,
    reward_batch,
    rollout_batch,
)
from mt_grpo.training.columns import Rows
from mt_grpo.training.config import MTGRPOConfig, changed
from mt_grpo.training.distillation import Distillation
from mt_grpo.training.model import (
    Activations,
    check_gradient,
    check_loss,
    for_trl,
    lent_model,
    loading_options,
    no_adapter_left,
    open_policy,
    prepare_model,
    processing_of,
    tokenizer_in,
)
from mt_grpo.training.prefetch import STEP_FACTOR, ModelCopy, PrefetchQueue, SmallerSteps, effective_sample_size
from mt_grpo.training.ranks import everywhere, run_here
from mt_grpo.training.replay import Replay
from mt_grpo.training.resuming import EarlyStopping, ResumableTrainer
from mt_grpo.training.reward_batch import ModelReward
from mt_grpo.training.rollout_batch import Columns, EvaluationRows, RolloutBatch
from mt_grpo.training.step_log import Step, StepLog, print_fewer
from mt_grpo.training.step_log.metrics import means_over_rows, route_metrics
from mt_grpo.training.teacher import TeacherWeights, load_teacher
from mt_grpo.trajectory import Row, Trajectory

if TYPE_CHECKING:
    from mt_grpo.weights.sync import WeightSync

T = TypeVar("T")
Reward: TypeAlias = str | Callable[..., object] | RewardFunc | PreTrainedModel
Rewards: TypeAlias = Reward | Sequence[Reward] | None

logger = logging.getLogger(__name__)


@dataclass
class _LossForward:
    """The micro-batch whose loss TRL computes, and what the policy's forward over it gives beside that."""

    inputs: Columns
    router_loss: torch.Tensor | None = None
    logps: torch.Tensor | None = None
    others: torch.Tensor | None = None  # log-probs of the tokens that a teacher finds likeliest


class MTGRPOEnvTrainer(ResumableTrainer):
    """
    Trains an agent over several turns: rollouts in an environment, and an advantage per turn from rewards for turns
    and outcomes. Loss, buffering, samplers, checkpoints and logging are TRL's.

    Args:
        model (`str` or `PreTrainedModel`): The policy; `embedded`, a folder, one with an adapter, or a Hub id.
        env (`EnvLike`, *optional*): What environments are made from; built from `args` where none is given.
        turn_reward_funcs, outcome_reward_funcs (`list`, *optional*): Rewards: objects, names or dotted paths; of
            outcomes also TRL reward functions, and reward models (a folder, a Hub id or an object). Both default to
            those of `args`. One reward needs no list.
        args (`MTGRPOConfig`, *optional*): The options. As in TRL the object itself is the trainer's `args`, so that
            what is set there later counts; a `GRPOConfig` is taken too and copied, see `MTGRPOConfig.of`.
        train_dataset, eval_dataset (`Dataset` or `list`): Rows with a `prompt` (text or messages); other columns reach
            rewards.
        engine (`Engine`, *optional*): Samples the completions. By default it is the server of `args` with `use_vllm`,
            else the model itself. The trainer sends no weights to an engine that is given here. With `use_vllm` the
            loss corrects for the difference between its log-probs and the model's.
        processing_class, callbacks, optimizers, quantization_config, peft_config: As in TRL.
        reward_processing_classes (*optional*): As in TRL: tokenizers of reward models, one for each outcome reward.
        environment_factory (`Callable` or `dict`, *optional*): Environments in TRL's form, see `TRLEnv`. A class with
            `get_reward` gives an outcome reward by itself. A single factory with `max_steps` needs no dataset.
        reward_funcs (*optional*): TRL's name for `outcome_reward_funcs`. Without tools or an environment each
            conversation is then one answer, and nothing is added to the prompt, as in TRL.
        tools (`list`, *optional*): Functions, or one, names or dotted paths, that the model calls in its own format,
            as often as it likes unless `max_env_steps` is set, as in TRL.
        rollout_func (*optional*): TRL's; it is refused with what to write instead.

    Raises:
        ConfigError: If rewards, rows, options, data and environment are lacking or do not fit together; before a model
            is loaded where that can be known.
        RolloutError: In training, if every conversation of two batches in a row fails.
        CreditError: In training, if the credit rule returns something unusable.
        NonFiniteError: In training, if a loss, a gradient or a weight is not finite, before a step or a save uses it.

    Attributes:
        batch (`RolloutBatch`): The latest batch, as far as it is filled in. TRL's methods have no argument for it.
        eval_trajectories (`list[Trajectory]`): Those of this process in the latest evaluation.
        evaluated_step (`int`, *optional*): Steps that the weights of the latest evaluation had taken.
    """

    _tag_names = ["trl", "grpo", "mt-grpo"]
    _name = "MT-GRPO"
    args: MTGRPOConfig

    def __init__(
        self,
        model: str | PreTrainedModel,
        env: EnvLike | None = None,
        turn_reward_funcs: Rewards = None,
        outcome_reward_funcs: Rewards = None,
        args: GRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | list[Row] | None = None,
        eval_dataset: Dataset | IterableDataset | list[Row] | dict[str, Rows] | None = None,
        engine: Engine | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: object = None,
        peft_config: object = None,
        environment_factory: TRLFactory | None = None,
        reward_funcs: Rewards = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase | None] | None = None,
        tools: Sequence[Callable[..., object] | str] | None = None,
        rollout_func: Callable[..., object] | None = None,
    ) -> None:
        if args is None:
            name = Path(model if isinstance(model, str) else model.config.name_or_path).name
            args = MTGRPOConfig(f"{name}-MT-GRPO")
        args = MTGRPOConfig.of(args)
        if rollout_func is not None:
            raise ConfigError(
                "`rollout_func` returns tokens without turns, so there is nothing to credit: write its loop as an "
                "environment (docs/environments.md) or as an agent (docs/any_agent.md)."
            )
        tools = reward_batch.as_list(tools)
        preflight.check_surroundings(args)
        if engine is None and args.use_vllm:
            from mt_grpo.training import servers  # what belongs to servers is loaded for runs that have some

            servers.check_own_servers(args)
        if args.use_vllm or args.max_staleness:
            forward_plan.check_importance_sampling(args)
        self.replay = None if args.replay is None else Replay(args)
        if self.replay is not None:
            train_dataset, eval_dataset = self.replay.rows(), None
        train_dataset, eval_dataset = columns.as_datasets(train_dataset, eval_dataset)
        self.env = environment.check_env(
            env,
            args,
            *(() if self.replay is not None else (train_dataset, eval_dataset)),
            factory=environment_factory,
            tools=tools,
            plain=reward_funcs is not None,
        )
        source = source_of(self.env)
        if self.replay is None:
            for served in source.prototypes():
                if isinstance(served, ServedEnv):
                    run(served.check())
        train_dataset, eval_dataset = columns.with_prompts(train_dataset, eval_dataset, source, args)
        run_rewards = reward_batch.RunRewards(
            args, source, turn_reward_funcs, outcome_reward_funcs, reward_funcs, reward_processing_classes
        )
        self.turn_reward_funcs, self.outcome_reward_funcs = run_rewards.turn, run_rewards.outcome
        self.state_scores, rewards = run_rewards.state, run_rewards.all
        scores = [*rewards, *self.state_scores]
        if self.replay is not None:
            self.replay.check_rewards(rewards)
            self.replay.check_teacher(args, scores)
        else:
            run_rewards.check_scorers(args, engine)
            columns.check_reward_columns(scores, train_dataset, eval_dataset)
        datasets = () if self.replay is not None else (train_dataset, eval_dataset)
        self.distillation: Distillation | None = None
        if args.teacher is not None:
            self.distillation = Distillation(self, args, scores, self.outcome_reward_funcs, *datasets)
        if processing_class is not None:  # before a model is loaded
            environment.prepare_tokenizer(tokenizer_in(processing_class), source)
        # transformers sets it for an adapter, and torch refuses it beside reentrant checkpoints
        if (args.gradient_checkpointing_kwargs or {}).get("use_reentrant") and args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = False
        with no_adapter_left(model, self):
            policy = open_policy(model, args, quantization_config, peft_config)
            processing = processing_of(policy["model"], processing_class, args)
            loaded = isinstance(model, str) and not isinstance(policy["model"], str)
            hidden = {
                "use_vllm": False,  # else TRL connects a client of its own, which needs vLLM to be installed
                "enable_jit_checkpoint": False,  # transformers' ends as if all steps were taken, see `preemption`
                "model_init_kwargs": None if loaded else loading_options(policy["model"], args),
                "reward_weights": run_rewards.weights,
            }
            super().__init__(
                **policy,
                reward_funcs=run_rewards.for_trl,
                reward_processing_classes=run_rewards.tokenizers or [None],
                args=changed(args, **hidden),
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=for_trl(processing),
                callbacks=callbacks,
                optimizers=optimizers,
            )
            args.__dict__.update({name: value for name, value in vars(self.args).items() if name not in hidden})
            self.args = args  # as in TRL: what is set there later counts
            if processing is not None:
                self.processing_class = self.callback_handler.processing_class = processing
            if processing_class is None:
                environment.prepare_tokenizer(tokenizer_in(self.processing_class), source)
            if args.device.type == "cpu" and not args.use_cpu and self.is_world_process_zero():
                logger.warning("There is no GPU here: this run is on the CPU, in float32.")
            self._earlier = preflight.left_by_runs(args.output_dir)
            self.num_completions_to_print = 0  # TRL's own table in the terminal, instead of which there is ours
            self._prepare_models()
            self._prepare_rewards(rewards)
            self._prepare_rollouts(engine)
            self._prepare_step_log()
        self.batch = RolloutBatch("train", [], [])
        self._prefetch: PrefetchQueue | None = None
        self.eval_trajectories: list[Trajectory] = []
        self.evaluated_step: int | None = None
        self._evaluation: EvaluationRows | None = None
        self._eval_prefix = None
        self._loss_forward: _LossForward | None = None  # while TRL computes the loss of a micro-batch
        self._failed_batches = 0

    @property
    def credit_rule(self) -> Rule:
        """The credit rule: that of `args`, or the default for the rewards there are."""
        return self.args.credit_rule(bool(self.turn_reward_funcs))

    # Setting up

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        forward_plan.keep_outputs_exact(self.accelerator)

    def _prepare_models(self) -> None:
        prepare_model(self.model, self.args, self.accelerator)
        self.teacher = load_teacher(self)
        self.teacher_model = self.teacher if isinstance(self.teacher, nn.Module) else None
        if self.distillation is not None:
            self.distillation.check_answers(self.train_dataset)
        self.teacher_weights = TeacherWeights.of(self)
        if self.teacher_weights is not None:
            self.add_callback(self.teacher_weights)
        self.forwards = forward_plan.Forwards(self)
        self._activations = Activations(self.args, self.accelerator.device)

    def _prepare_rewards(self, rewards: list[RewardFunc]) -> None:
        del self.reward_funcs[len(rewards) :], self.reward_processing_classes[len(rewards) :]
        for reward, model, tokenizer in zip(rewards, self.reward_funcs, self.reward_processing_classes, strict=True):
            if isinstance(reward, ModelReward):
                reward.use(model, tokenizer, self.chat_template_kwargs)
        self.reward_func_names = [reward.name for reward in rewards]
        self.right_answers = reward_batch.RightAnswers(self)
        if self.args.reward_weights is None:
            self.reward_weights = torch.tensor([reward.weight for reward in rewards], dtype=torch.float32)
        # TRL recognises a truncated completion by its last token; here the stop reason says it
        self.mask_truncated_completions = False

    def _prepare_rollouts(self, engine: Engine | None) -> None:
        args = self.args
        # TRL's loss then corrects for log-probs of other kernels, or of other weights
        self.use_vllm = args.use_vllm or bool(args.max_staleness)
        self.weight_sync: WeightSync | ModelCopy | None = None
        self._synced_step = -1  # whose weights the servers have
        self._asleep_in_training: WeightSync | None = None  # whose servers sleep while the model is trained
        if self.replay is not None:
            engine = self.replay.engine(self._tokenizer, context_length(self.model.config))
        if args.use_vllm and engine is None:
            from mt_grpo.training import servers

            engine, self.weight_sync = servers.connect(self)
            if servers.colocates(args) and args.vllm_enable_sleep_mode:
                self._asleep_in_training = self.weight_sync
        self._sampling = forward_plan.sampling_params(args)
        engine = engine or environment.own_engine(args, self._tokenizer, self.model, self.accelerator)
        self._unproven = engine if type(engine) is TransformersEngine else None
        data = self.train_dataset, self.eval_dataset
        images = columns.media_encoder(self.processing_class, self.model.config, engine, *data)
        self.shows_media = images is not None
        self._medium_token = next(iter(media_tokens(self.model.config).values()), None)
        several = self.accelerator.num_processes > 1
        self.blank: Media = images.blanks() if images is not None and several else {}
        self.runner = environment.build_runner(self.env, engine, args, images)
        if args.max_staleness:
            if self.weight_sync is not None:
                self.weight_sync.send_in_flight()
            elif isinstance(engine, LocalEngine):
                self.weight_sync = ModelCopy(engine, self.model, self.accelerator, args)
            self._steps = SmallerSteps()
            self.add_callback(self._steps)

    def _prepare_step_log(self) -> None:
        self.step_log = StepLog(self)
        self.add_callback(self.step_log)
        if self.args.early_stopping_patience is not None:
            self.add_callback(EarlyStopping(self.args.early_stopping_patience))
        print_fewer(self.callback_handler.callbacks)
        self._silence = Silence(lambda: print(self.describe_progress(), flush=True))

    # A step of training, in the order in which TRL calls: rows in, sampled, scored, credited, and the loss

    def _prepare_inputs(self, generation_batch: object) -> Columns:
        """TRL's. Rows of a group are put into one micro-batch, where `forward: tree` computes their prefix once."""
        self.forwards.prove(self.max_completion_length or 1)  # before rollouts, and before rows a checkpoint kept
        buffered = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is not buffered:
            if self.args.forward == "tree":
                self._buffered_inputs = rollout_batch.rebalance(self._buffered_inputs, self.num_generations)
            if self.args.groups_without_signal != "keep":
                rollout_batch.share_out(self._buffered_inputs, self.loss_type)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs

    def _generate_and_score_completions(self, inputs: list[Row]) -> Columns:
        """TRL's, with one advantage per token, shape `(B, T)`, in place of one per trajectory."""
        mode = "train" if self.model.training else "eval"
        counts = None if mode == "train" else self._evaluation
        fills = [False] * len(inputs) if counts is None else counts.fills(len(inputs))
        generations = self.num_generations if mode == "train" else self.num_generations_eval
        rows = [columns.with_column_media(row) for row in inputs]
        batch = self.batch = RolloutBatch(mode, rows, fills, self.args.branching(mode), generations)
        k = self._step % self.args.gradient_accumulation_steps
        step = self.step_log.begin(batch, self.state.global_step, k)
        # for TRL's table of completions; what is sampled after is the batch's own rows
        shown = [{name: row[name] for name in row if name not in columns.MEDIA_COLUMNS} for row in rows]
        shown = [row | {"prompt": rollout_batch.as_text(row["prompt"])} for row in shown]
        try:
            with batch.open_environments():
                step.output = super()._generate_and_score_completions(shown)
            if mode == "train" and self.shows_media and not isinstance(sync := self.weight_sync, ModelCopy | None):
                self.forwards.hold_shown(batch, step.output, sync.proof.tolerance)
            if self.args.max_staleness and mode == "train":
                share = batch.staleness.effective = effective_sample_size(step.output)
                step.output[STEP_FACTOR] = torch.tensor(self._steps.factor(share), dtype=torch.double)
            self._credit(step)
        except BaseException:  # whatever fails, conversations that were finished before are not lost
            self.step_log.records.rescue(step)
            raise
        if mode == "eval":
            self.eval_trajectories += batch.counted
        self.step_log.take(step)
        if mode == "train" and self.args.groups_without_signal != "keep":
            rollout_batch.leave_out(step.output, batch.has_signal)
        return step.output

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """Replaces TRL's generation and its tool loop. `prompts` are for people; the batch's rows are sampled."""
        batch = self.batch
        self._rollout(batch)
        if batch.mode == "train" and self.args.groups_without_signal == "resample" and self.replay is None:
            reward_batch.sample_again(batch, self.args.max_resample_times, self._rollout, self._score, self._judge)
        if batch.mode == "train" and not self.right_answers.asked_of("server"):
            self._take_memory_from_servers()
        if self.distillation is not None:
            if self.distillation.needs_outcomes:
                batch.scores = batch.scores or self._score(batch)
            self.distillation.read(batch)
        batch.token_rows = [self.runner.completion(trajectory) for trajectory in batch.trajectories]
        if self.args.replays_routes:
            self.forwards.warn_without_routes(batch)
        else:
            for row in batch.token_rows:
                row.prompt_routes = row.routes = b""
        batch.leave_out(self._tokenizer.pad_token_id, self.args.mask_truncated_completions)
        self.right_answers.hang(batch)
        self.forwards.prove(max(gather_object([batch.longest])))
        if self.shows_media and batch.mode == "train":
            self.forwards.prove_shown(batch.token_rows)
        if self.args.forward != "tree":  # trees were given up: right answers get a forward of their own
            batch.leaves = {}
        self._count(batch)
        return batch.generated(self._medium_token)

    def _take_memory_from_servers(self) -> None:
        """Before the model computes: servers on its GPUs sleep until conversations are sampled again."""
        if self._asleep_in_training is not None:
            self._asleep_in_training.sleep()
            self._synced_step = -1

    def _rollout(self, batch: RolloutBatch, take: Callable[[RolloutBatch], None] | None = None) -> None:
        step, first = self.state.global_step, self.accelerator.process_index * len(batch.rows)
        if (replay := self.replay) is not None:
            everywhere(lambda: replay.fill_in(batch, self, first))
            return
        # generation can happen more than once in an optimiser step; evaluation draws the same numbers every time
        moment = (step, self._step % self.args.gradient_accumulation_steps) if batch.mode == "train" else ()
        requests = batch.requests(first, moment, self.args.seed)
        if self.weight_sync is not None and self._synced_step != step:
            start = time.perf_counter()
            with self.step_log.activity.of("weight sync"):
                self.weight_sync.sync(step)
            self._synced_step, batch.staleness.sync_seconds = step, time.perf_counter() - start
        self._prove_engine()
        queue = None if batch.mode == "eval" or batch.attempt else self._prefetch
        ahead = queue if queue is not None and queue.begin(self._step, step) else None
        sessions = {request.session for request in requests}
        sampling = self.step_log.activity.sampling(batch, self.runner.under_way, sessions)

        def converse() -> Coroutine[object, object, list[Trajectory]]:
            work = partial(
                self.runner.run, requests, self._sampling, keep_environments=True, branching=batch.branching
            )
            if take is None:
                keep = batch.trajectories.append
                teacher = self.distillation
                return work(on_finish=keep if teacher is None else teacher.as_they_end(keep))
            return batch.handing_over(work, take)

        with without_dropout(self.model), self._lent_model(), sampling:
            if ahead is None:
                ran = self._run_on_all_ranks(converse)
            else:
                ran = everywhere(lambda: ahead.take(batch, self._step))
        if self.weight_sync is not None:
            self.weight_sync.check()
        if take is None:
            batch.trajectories = batch.fill_up(ran, lambda index: Trajectory(batch.rows[index]["prompt"]))

    def _lent_model(self) -> AbstractContextManager[None]:
        """Lends the model to an engine that has no weights of its own."""
        if self.weight_sync is not None:
            return nullcontext()
        return lent_model(self.runner.engine, self.model_wrapped, self.args, self.accelerator)

    @contextmanager
    def scoring(self, model: nn.Module) -> Iterator[None]:
        """A context in which a model scores a batch, and the engine does not sample with the trainer's meanwhile."""
        engine = self.runner.engine
        alone: AbstractContextManager[object] = nullcontext()
        if isinstance(engine, TransformersEngine) and self.weight_sync is None:
            alone = engine.update
        with alone, without_dropout(model), self.accelerator.autocast():
            yield

    def _prove_engine(self) -> None:
        """Before the first conversation: whether the model's own engine samples from what is trained."""
        if (engine := self._unproven) is not None:
            proof = self.step_log.activity.of("the proof of the engine")
            with proof, without_dropout(self.model), self._lent_model():
                self._run_on_all_ranks(lambda: prove_engine(engine, self.accelerator.mixed_precision))
            self._unproven = None

    def _run_on_all_ranks(self, begin: Callable[[], Coroutine[object, object, T]]) -> T:
        """Runs a coroutine in the background; a failure of one process ends all."""
        return everywhere(lambda: run_here(begin(), self.accelerator.device))

    def _count(self, batch: RolloutBatch) -> None:
        """Counts tokens as TRL does, and ends the run where nothing can be sampled."""
        if batch.mode == "train":
            sampled = sum(turn.num_tokens for trajectory in batch.trajectories for turn in trajectory.turns)
            tokens = sum(len(row.prompt_ids) for row in batch.token_rows) + sampled
            counts = gather_object([(tokens, all(trajectory.failed for trajectory in batch.counted))])
            self.state.num_input_tokens_seen += sum(number for number, _ in counts)
            failed = all(failed for _, failed in counts)
            self._failed_batches = self._failed_batches + 1 if failed else 0
            if self._failed_batches == 2:  # on every rank; one batch alone may be a bad prompt
                last = next((one for one in batch.counted if one.failed), batch.trajectories[0])
                error = f"{last.error} ({last.where})" if last.where else last.error
                raise RolloutError(f"Every conversation of two batches in a row failed, the last ones with: {error}")
        self._metrics[batch.mode]["num_tokens"] = [self.state.num_input_tokens_seen]

    def _calculate_rewards(
        self, inputs: list[Row], prompts: list[Any], completions: list[Any], completion_ids: list[Any]
    ) -> torch.Tensor:
        """Scores turns and outcomes. Returns one column per reward, with turn rewards summed over turns."""
        batch = self.batch
        if batch.rewards is None:
            self._judge(batch)
        for name, values in batch.extra.items():
            self._log_completion_extra(name, values)
        return batch.rewards_per_func

    def _judge(self, batch: RolloutBatch) -> None:
        """Scores the trajectories of this process, unless they are scored, and credits those of all."""
        batch.scores = batch.scores or self._score(batch)
        weights = self.reward_weights.to(self.accelerator.device)
        batch.rewards, batch.rewards_per_func = reward_batch.gather_rewards(
            batch.trajectories,
            batch.scores,
            weights,
            group_size=batch.group_size,
            branching=batch.branching,
            names=self.reward_func_names,
        )
        batch.credit = call_rule(
            self.credit_rule, batch.rewards, turn_coef=self.args.turn_advantage_coef, scale_rewards=self.scale_rewards
        )

    def _score(self, batch: RolloutBatch) -> Scores:
        extra = {"trainer_state": self.state, "log_extra": batch.add_extra, "log_metric": self._log_metric}
        dataset = self.train_dataset if batch.mode == "train" or self.eval_dataset is None else self.eval_dataset
        batch.add_texts(self._tokenizer, had_text_prompts(dataset))
        with self.step_log.activity.of("rewards"):
            if self.distillation is not None:
                self.distillation.read(batch)
            self.right_answers.score(batch)
            scores = self._run_on_all_ranks(
                lambda: score_trajectories(
                    self.turn_reward_funcs,  # type: ignore[arg-type]  # of the kinds that `load_rewards` was asked for
                    self.outcome_reward_funcs,  # type: ignore[arg-type]
                    batch.counted,
                    extra=extra,
                    state_scores=self.state_scores,  # type: ignore[arg-type]
                )
            )
            self.step_log.warnings.recheck(batch.counted, batch.mode)
        return batch.fill_up_scores(scores)

    def _credit(self, step: Step) -> None:
        """Adds the advantages of turns, and columns for our forward, to the batch that TRL trains on."""
        batch, output = step.batch, step.output
        weights = self.reward_weights.to(self.accelerator.device)
        equal = reward_batch.share_of_equal_groups(batch.rewards_per_func, weights, batch.group_size)
        self._metrics[step.mode]["frac_reward_zero_std"][-1] = equal
        if not self.reward_func_names:  # a teacher alone
            for name in ("reward", "reward_std", "frac_reward_zero_std"):
                del self._metrics[step.mode][name]
        shown = self._logs["advantages"]  # for TRL's table of completions: means over turns
        means = (batch.advantages.sum(dim=1) / batch.rewards.turn_mask.sum(dim=1).clamp(min=1)).tolist()[-len(shown) :]
        for index, mean in enumerate(means, -len(means)):
            shown[index] = mean
        output |= rollout_batch.token_columns(batch.token_rows, output)
        if self.distillation is not None:
            self.distillation.add_columns(batch, output)
        output["group_ids"], output["row_ids"] = step.rows // batch.group_size, step.row_ids
        output["advantages"] = step.advantages.gather(1, output["turn_ids"])

    def compute_loss(self, model: nn.Module, inputs: Columns, *args: object, **kwargs: object) -> torch.Tensor:
        if self.model.training:
            self._take_memory_from_servers()
            if STEP_FACTOR in inputs:
                self._steps.before(self.optimizer, inputs[STEP_FACTOR].item())
        if self.forwards.plan.group is None or not self.model.training:
            return self._loss(model, inputs, *args, **kwargs)
        return forward_plan.loss_of_group(self, model, inputs, lambda part: self._loss(model, part, *args, **kwargs))

    def _loss(self, model: nn.Module, inputs: Columns, *args: object, **kwargs: object) -> torch.Tensor:
        forward = self._loss_forward = _LossForward(inputs)
        try:
            with self._activations.kept(model) if self.model.training else nullcontext():
                loss = super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self._loss_forward = None
        if self.distillation is not None and self.args.distillation_coef and forward.logps is not None:
            loss = loss + self.args.distillation_coef * self.distillation.loss(inputs, forward.logps, forward.others)
        if self.model.training:
            check_loss(loss, inputs, model, self.state.global_step)
        else:  # transformers' mean takes the remainder of the dataset for that of its rows
            mean = self.accelerator.gather(loss.detach()).mean().item()
            if self._evaluation is not None and self.loss_type not in rollout_batch.TOKENS_OF_ALL:
                rows = len(inputs["prompt_ids"]) * self.accelerator.num_processes  # padding rows among them
                mean *= rows / max(1, self._evaluation.sizes[-1])
            self._metrics["eval"]["loss"].append(mean)
        if "loss_factor" not in inputs:
            return loss
        factor, balance = inputs["loss_factor"], 0.0
        if forward.router_loss is not None:  # as TRL adds it; it counts every token, whichever rows are left out
            balance = self.router_aux_loss_coef * forward.router_loss / self.current_gradient_accumulation_steps
        return (loss - balance) * factor + balance

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """
        TRL's, `(B, T)`, 0 where a token is not trained. Old and reference log-probs have no dropout. The old ones come
        first, and the right answers that rewards ask for are scored with them.
        """
        of_loss, forwards = self._loss_forward, self.forwards
        plan = forwards.plan_of_rollouts(self.batch) if of_loss is None else forwards.plan_of_loss(of_loss.inputs)
        with without_dropout(model) if of_loss is None else nullcontext():
            if forwards.trl_scores(plan):
                logps, entropies, router_loss = super()._get_per_token_logps_and_entropies(
                    model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, **kwargs
                )
            else:
                plan = replace(plan, router_loss=bool(kwargs.get("compute_aux_loss")))
                with self.accelerator.autocast():
                    scores = forward_plan.score_batch(model, plan, attention_mask, logits_to_keep, batch_size)
                if plan.leaves:
                    self.batch.answer(scores.leaf_means)
                logps, entropies, router_loss = scores.logps, scores.entropies, scores.router_loss
                if of_loss is not None and plan.candidates:
                    logps, of_loss.others = logps[:, :, 0], logps[:, :, 1:]
                entropies = entropies if compute_entropy else None
        if of_loss is not None:
            of_loss.router_loss, of_loss.logps = router_loss, logps
            if self.model.training:
                self.step_log.trained(of_loss.inputs, logps, entropies)
        return logps, entropies, router_loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: object = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        check_gradient(norm, self.args, self.accelerator, self.state.global_step)
        self.step_log.latest.gradient_norm = norm
        return norm

    # Metrics: TRL's are means over batches, ours are sums until they are logged

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "train_runtime" in logs and self.state.global_step == self._initial_global_step:
            return  # of a training that took no step
        mode = "train" if self.model.training else "eval"
        metrics = self._metrics[mode]
        if mode == "eval" and self._evaluation is not None:  # batches of an evaluation differ in size
            metrics.update(means_over_rows(metrics, self._evaluation.sizes))
        if mode == "train" and self.args.replays_routes:
            routes = route_metrics(self.accelerator.unwrap_model(self.model))
            metrics.update({name: [value] for name, value in routes.items()})
        metrics.update({name: [value] for name, value in self.step_log.metrics.close(mode).items()})
        if mode == "eval" and self._eval_prefix is not None and self._eval_prefix.startswith("eval_"):
            named = {f"{self._eval_prefix.removeprefix('eval_')}_{name}": values for name, values in metrics.items()}
            metrics.clear()  # TRL's names do not say which of several sets they are of
            metrics.update(named)
        super().log(logs, start_time)
        self._silence.broken()

    # Without training

    def get_eval_dataloader(self, eval_dataset: str | Dataset | IterableDataset | None = None) -> DataLoader:
        check_eval_batch(vars(self.args), self.args.world_size)
        if isinstance(eval_dataset, (Dataset, IterableDataset)):
            eval_dataset = with_own_opener(eval_dataset)
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        rows = self._evaluation = EvaluationRows(dataset, self.num_generations_eval, self.accelerator)
        return super().get_eval_dataloader(eval_dataset if rows.dataset is dataset else rows.dataset)

    def evaluate(
        self, eval_dataset: Rows | dict[str, Rows] | str | None = None, *args: object, **kwargs: object
    ) -> dict[str, float]:
        of_several = self._eval_prefix is not None  # transformers' evaluates each of several sets by this method
        if not of_several:
            self.eval_trajectories, self.evaluated_step = [], None
        self._eval_prefix = str(kwargs.get("metric_key_prefix", "eval"))
        try:
            with self._says_how_far(), self._names_rows(eval_dataset):
                metrics = super().evaluate(eval_dataset, *args, **kwargs)
        finally:
            self._eval_prefix = "eval" if of_several else None
        if eval_dataset is None:
            self.evaluated_step = self.state.global_step
            best = self.args.metric_for_best_model
            names = [name.removeprefix("eval_") for name in metrics]
            if best is not None and best.removeprefix("eval_") not in names:
                raise ConfigError(
                    f"`metric_for_best_model: {best}` is nothing that an evaluation measures"
                    f"{did_you_mean(best.removeprefix('eval_'), names)}: name one of its metrics, such as `reward`."
                )
        return metrics

    def rollout(self, num_prompts: int, num_generations: int = 1, again: Again | None = None) -> list[Trajectory]:
        """
        Runs and scores conversations, `num_generations` for each prompt, without training. Prompts are the first rows
        of the evaluation set (the first one of several), or of the training set if there is none. Where conversations
        can be compared, turn rewards are also asked whether they depend on later turns, see `Warnings.causal`. In logs
        a line of standard error says how far it is, wherever nothing was said for a while. With `again` the only
        prompt is its row's, and all conversations begin with its turns.
        """
        dataset = self.train_dataset if self.eval_dataset is None else self.eval_dataset
        dataset = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
        with self._names_rows():
            taken = dataset.take(num_prompts) if again is None else [again.row]
            rows = [columns.with_column_media(row) for row in taken for _ in range(num_generations)]
        batch = RolloutBatch("eval", rows, [False] * len(rows), group_size=num_generations, again=again)
        self.batch = batch
        tells = self.is_world_process_zero() and not sys.stderr.isatty()
        says = Silence(lambda: print(self.step_log.activity.describe(), file=sys.stderr, flush=True))
        with says if tells else nullcontext(), batch.open_environments():
            self._rollout(batch)
            batch.scores = self._score(batch)
            if num_generations > 1:
                self.step_log.warnings.recheck(batch.counted, "audit")
        return batch.trajectories

    def converse(
        self, rows: list[Row], done: list[bool], group_size: int, take: Callable[[RolloutBatch], None]
    ) -> None:
        """
        Runs conversations without training, each of a row, `group_size` in a row of one prompt, but for those that are
        done. Whenever some have ended, they are scored and handed to `take` as a batch, while the others go on.
        """
        batch = self.batch = RolloutBatch("eval", list(map(columns.with_column_media, rows)), done, None, group_size)

        def score(ended: RolloutBatch) -> None:
            with ended.open_environments():
                ended.scores = self._score(ended)
                take(ended)

        with batch.open_environments():
            self._rollout(batch, score)
