"""The trainer: TRL's GRPO with rollouts of several turns and an advantage per token."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOConfig

from mt_grpo.credit import audit_rewards, estimate
from mt_grpo.data import had_text_prompts
from mt_grpo.envs import EnvSource
from mt_grpo.envs.source import tool_names
from mt_grpo.rewards import RewardFunc, Scores, load_rewards, score_trajectories
from mt_grpo.rollout import Engine, RolloutError
from mt_grpo.training.answers import check_scorers, score_answers
from mt_grpo.training.batch import TokenColumns
from mt_grpo.training.checkpointed import CheckpointedTrainer
from mt_grpo.training.checks import check_surroundings
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.dropout import disable_dropout, without_dropout
from mt_grpo.training.environment import build_runner, check_env, open_environments, prepare_tokenizer
from mt_grpo.training.evaluation import fill_up, fill_up_scores
from mt_grpo.training.factories import Factory, add_own_rewards, rows_of
from mt_grpo.training.forward import completion_logps, keep_outputs_exact, prepare_forward, prove_forward
from mt_grpo.training.microbatches import rebalance
from mt_grpo.training.policy import opened
from mt_grpo.training.processes import everywhere, run_here
from mt_grpo.training.reference import check_reference
from mt_grpo.training.reward_batch import gather_rewards, share_of_equal_groups
from mt_grpo.training.reward_columns import check_reward_columns
from mt_grpo.training.reward_models import ModelReward, as_in_trl, with_models
from mt_grpo.training.rollout_batch import RolloutBatch, branching
from mt_grpo.training.sampling import sampling_params
from mt_grpo.training.servers import (
    check_importance_sampling,
    lent_model,
    own_engine,
    server_client,
    weight_sync,
    without_client_of_trl,
)
from mt_grpo.training.signal import has_signal, leave_out, sample_again, share_out
from mt_grpo.training.step_log.metrics import (
    audit_metrics,
    credit_metrics,
    mismatch_metrics,
    reward_metrics,
    rollout_metrics,
    show_advantages,
)
from mt_grpo.training.step_log.records import RunRecords
from mt_grpo.training.step_log.warnings import RewardWatch
from mt_grpo.training.trl_arguments import (
    as_list,
    as_rows,
    check_no_images,
    check_rollout_func,
    no_adapter_left,
    outcomes_of,
    tokenizers_of,
    widened,
)
from mt_grpo.trajectory import Trajectory, visible
from mt_grpo.weights.transport import WeightSync

Reward = str | Callable[..., Any] | RewardFunc | PreTrainedModel
Rewards = Reward | Sequence[Reward] | None


class MTGRPOEnvTrainer(CheckpointedTrainer):
    """
    Trains an agent over several turns: rollouts in an environment, and an advantage per turn from rewards for turns
    and outcomes. Loss, buffering, samplers, checkpoints and logging are TRL's.

    Args:
        model (`str` or `PreTrainedModel`): The policy; `embedded`, a folder, one with an adapter, or a Hub id.
        env (`EnvSource`, *optional*): What environments are made from; built from `args` where none is given.
        turn_reward_funcs (`list`, *optional*): Turn rewards: `TurnReward`s, names or dotted paths.
        outcome_reward_funcs (`list`, *optional*): Outcome rewards: `OutcomeReward`s, names, dotted paths, TRL reward
            functions, or reward models (a folder, a Hub id or an object). Both default to those of `args`. One reward
            needs no list.
        args (`MTGRPOConfig`, *optional*): The options; a `GRPOConfig` is taken too, see `widened`.
        train_dataset, eval_dataset (`Dataset`): Rows with a `prompt` (text or messages); other columns reach rewards.
            A list of rows is taken too.
        engine (`Engine`, *optional*): Samples the completions. By default it is the server of `args` with `use_vllm`,
            else the model itself. The trainer sends no weights to an engine that is given here. With `use_vllm` the
            loss corrects for the difference between its log-probs and the model's.
        processing_class, callbacks, optimizers, quantization_config, peft_config: As in TRL.
        environment_factory (`Callable` or `dict`, *optional*): Environments in TRL's form, see `TRLEnv`. A class with
            `get_reward` gives an outcome reward by itself. A single factory with `max_steps` needs no dataset.
        reward_funcs (*optional*): TRL's name for `outcome_reward_funcs`. Without tools or an environment each
            conversation is then one answer, and nothing is added to the prompt, as in TRL.
        reward_processing_classes (*optional*): As in TRL: tokenizers of reward models, one for each outcome reward.
        tools (`list`, *optional*): Functions that the model calls in its own format, as often as it likes unless
            `max_env_steps` is set, as in TRL. Names and dotted paths are tools too.
        rollout_func (*optional*): TRL's; it is refused with what to write instead.

    Raises:
        ConfigError: If there is no reward function, no dataset, or a reward needs a column that the dataset lacks.
        RolloutError: In training, if every conversation of two batches in a row fails.
        CreditError: In training, if the credit rule returns something unusable.
        NonFiniteError: In training, if a loss, a gradient or a weight is not finite, before a step or a save uses it.
    """

    _tag_names = ["trl", "grpo", "mt-grpo"]
    _name = "MT-GRPO"
    args: MTGRPOConfig

    def __init__(
        self,
        model: str | PreTrainedModel,
        env: EnvSource | None = None,
        turn_reward_funcs: Rewards = None,
        outcome_reward_funcs: Rewards = None,
        args: GRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | list[dict[str, Any]] | None = None,
        eval_dataset: Dataset | IterableDataset | list[dict[str, Any]] | dict[str, Any] | None = None,
        engine: Engine | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        environment_factory: Factory | None = None,
        reward_funcs: Rewards = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase | None] | None = None,
        tools: Sequence[Callable[..., Any] | str] | None = None,
        rollout_func: Callable[..., Any] | None = None,
    ) -> None:
        if args is None:
            name = Path(model if isinstance(model, str) else model.config.name_or_path).name
            args = MTGRPOConfig(f"{name}-MT-GRPO")
        args = widened(args)
        check_rollout_func(rollout_func)
        args.check_credit()
        check_surroundings(args)
        train_dataset, eval_dataset = as_rows(train_dataset, "train_dataset"), as_rows(eval_dataset, "eval_dataset")
        check_no_images(train_dataset, eval_dataset)
        given = {"factory": environment_factory, "tools": tools, "plain": reward_funcs is not None}
        self.env = check_env(env, args, train_dataset, eval_dataset, **given)
        train_dataset = rows_of(train_dataset, self.env, args)
        outcomes = outcomes_of(reward_funcs, outcome_reward_funcs, args.outcome_reward_funcs)
        rewards = self._load_rewards(turn_reward_funcs, outcomes, args)
        tokenizers = tokenizers_of(reward_processing_classes, outcomes, rewards, self.turn_reward_funcs)
        check_scorers(rewards, args, engine)
        check_reward_columns([*rewards, *self.state_scores], train_dataset, eval_dataset)
        self.watch = RewardWatch(rewards, args, self.state_scores, tool_names(self.env))
        with no_adapter_left(model):
            with without_client_of_trl(args), opened(model, args, quantization_config, peft_config) as policy:
                super().__init__(
                    **policy,
                    reward_funcs=[as_in_trl(reward) for reward in rewards],  # TRL loads models; they are called here
                    reward_processing_classes=tokenizers,
                    args=args,
                    train_dataset=train_dataset,
                    eval_dataset=eval_dataset,
                    processing_class=processing_class,
                    callbacks=[*(callbacks or []), self.watch],
                    optimizers=optimizers,
                )
            self._prepare_models()
            self._prepare_credit(rewards)
            self._prepare_rollouts(engine)
        self._batch: RolloutBatch | None = None  # the latest: TRL's methods have no argument for it
        self._loss_columns: TokenColumns | None = None  # of the micro-batch whose loss TRL's forward computes
        self.eval_trajectories: list[Trajectory] = []  # of this process, in the latest evaluation

    # Setting up

    def _load_rewards(self, turns: Rewards, outcomes: Rewards, args: MTGRPOConfig) -> list[RewardFunc]:
        turns = args.turn_reward_funcs if turns is None else as_list(turns)
        self.turn_reward_funcs = load_rewards(turns or [], "turn")
        self.outcome_reward_funcs = load_rewards(with_models(outcomes or [], args), "outcome")
        self.state_scores = load_rewards([args.state_score] if args.state_score else [], "state")
        listed = [*self.turn_reward_funcs, *self.outcome_reward_funcs]
        self.outcome_reward_funcs += add_own_rewards(listed, self.env, args)
        return [*self.turn_reward_funcs, *self.outcome_reward_funcs]

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        keep_outputs_exact(self.accelerator)

    def _prepare_models(self) -> None:
        if self.args.disable_dropout:
            disable_dropout(self.model)
        check_reference(self.args, self.accelerator)
        self._distribution = prepare_forward(self)

    def _prepare_credit(self, rewards: list[RewardFunc]) -> None:
        for reward, model, tokenizer in zip(rewards, self.reward_funcs, self.reward_processing_classes, strict=True):
            if isinstance(reward, ModelReward):
                reward.use(model, tokenizer, self.chat_template_kwargs)
        self.reward_func_names = [reward.name for reward in rewards]
        if self.args.reward_weights is None:
            self.reward_weights = torch.tensor([reward.weight for reward in rewards], dtype=torch.float32)
        self._estimator = partial(estimate, self.args.advantage_estimator)
        # TRL recognises a truncated completion by its last token; here the stop reason says it
        self.mask_truncated_completions = False

    def _prepare_rollouts(self, engine: Engine | None) -> None:
        args = self.args
        prepare_tokenizer(self._tokenizer, self.env)
        self.use_vllm = args.use_vllm  # TRL's loss then corrects for the engine's different log-probs
        self.weight_sync: WeightSync | None = None
        self._last_loaded_step = -1
        if args.use_vllm:
            check_importance_sampling(args)
        if args.use_vllm and engine is None:
            engine = server_client(args, self._tokenizer, self.model.config.name_or_path)
            self._run_on_all_ranks(engine.connect)
            self.weight_sync = weight_sync(args, engine, lambda: self.model, self.accelerator)
        self._sampling = sampling_params(args)
        engine = engine or own_engine(args, self._tokenizer, self.model, self.accelerator)
        self.runner = build_runner(self.env, engine, args)
        self.records = RunRecords(self)
        self._failed_batches = 0

    # A step of training, in the order in which TRL calls: rows in, sampled, scored, credited, and the loss

    def train(self, *args: Any, **kwargs: Any) -> Any:
        # a run that begins again keeps nothing of one that was interrupted in this process
        self._step, self._buffered_inputs, self._last_loaded_step, self._failed_batches = 0, None, -1, 0
        return super().train(*args, **kwargs)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """TRL's. Rows of a group are put into one micro-batch, where `forward: tree` computes their prefix once."""
        prove_forward(self, self.max_completion_length or 1)  # before rollouts, and before rows a checkpoint kept
        buffered = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is not buffered:
            if self.args.forward == "tree":
                self._buffered_inputs = rebalance(self._buffered_inputs, self.num_generations)
            if self.args.groups_without_signal != "keep":
                share_out(self._buffered_inputs, self.loss_type)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's, with one advantage per token, shape `(B, T)`, in place of one per trajectory."""
        mode = "train" if self.model.training else "eval"
        batch = self._batch = RolloutBatch(mode, inputs, self._filling(mode, len(inputs)), branching(self.args, mode))
        # for TRL's table of completions; what is sampled after is the batch's own rows
        shown = [{**row, "prompt": visible(row["prompt"])} for row in inputs]
        try:
            with open_environments(batch):
                output = super()._generate_and_score_completions(shown)
        except BaseException:  # whatever fails, conversations that were finished before are not lost
            self.records.rescue(batch)
            raise
        self.watch.see(self.records.write(batch), mode, self.accelerator.is_main_process)
        if mode == "eval":
            self.eval_trajectories += batch.counted
        return self._credit(batch, output)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """Replaces TRL's generation and its tool loop."""
        batch = self._batch
        self._rollout(batch)
        if batch.mode == "train" and self.args.groups_without_signal == "resample":
            sample_again(batch, self.args.max_resample_times, self._rollout, self._score, self._judge)
        batch.token_rows = [self.runner.completion(trajectory) for trajectory in batch.trajectories]
        batch.leave_out(self._tokenizer.pad_token_id, self.args.mask_truncated_completions)
        prove_forward(self, max(gather_object([batch.longest])))
        self._log_rollouts(batch)
        return batch.generated()

    def _rollout(self, batch: RolloutBatch) -> None:
        step, first = self.state.global_step, self.accelerator.process_index * len(batch.rows)
        # generation can happen more than once in an optimiser step; evaluation draws the same numbers every time
        moment = (step, self._step % self.args.gradient_accumulation_steps) if batch.mode == "train" else ()
        requests = batch.requests(first, moment, self.args.seed)
        if self.weight_sync is not None and self._last_loaded_step != step:
            self.activity.during("weight sync", self.weight_sync.sync, step)
            self._last_loaded_step = step
        lent = lent_model(self.runner.engine, self.model_wrapped, self.args, self.accelerator)
        with without_dropout(self.model, True), lent, self.activity.sampling(batch, self.runner.under_way):
            given = requests, self._sampling, batch.trajectories.append, True, batch.branching
            run = self._run_on_all_ranks(lambda: self.runner.run(*given))
        if self.weight_sync is not None:
            self.weight_sync.check()
        batch.trajectories = fill_up(run, batch.fills, lambda index: Trajectory(batch.rows[index]["prompt"]))

    def _run_on_all_ranks(self, begin: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Runs a coroutine in the background; a failure of one process ends all."""
        return everywhere(lambda: run_here(begin(), self.accelerator.device))

    def _log_rollouts(self, batch: RolloutBatch) -> None:
        if batch.mode == "train":
            sampled = sum(turn.num_tokens for trajectory in batch.trajectories for turn in trajectory.turns)
            tokens = sum(len(row.prompt_ids) for row in batch.token_rows) + sampled
            self.state.num_input_tokens_seen += sum(gather_object([tokens]))
        self._metrics[batch.mode]["num_tokens"] = [self.state.num_input_tokens_seen]
        metrics = rollout_metrics(batch.counted)
        self._record(batch.mode, metrics)
        if batch.mode == "train":
            failed = metrics.means()["rollouts/failed"] == 1
            self._failed_batches = self._failed_batches + 1 if failed else 0
            if self._failed_batches == 2:  # on every rank, since metrics are of all; one alone may be a bad prompt
                last = next((one for one in batch.counted if one.failed), batch.trajectories[0])
                error = f"{last.error} ({last.where})" if last.where else last.error
                raise RolloutError(f"Every conversation of two batches in a row failed, the last ones with: {error}")

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids: list[Any]
    ) -> torch.Tensor:
        """Scores turns and outcomes. Returns one column per reward, with turn rewards summed over turns."""
        batch = self._batch
        if batch.rewards is None:
            self._judge(batch)
        for name, values in batch.extra.items():
            self._log_completion_extra(name, values)
        if batch.mode == "eval":  # its batches differ in size
            weights = self.reward_weights.to(self.accelerator.device)
            self._record("eval", reward_metrics(batch.rewards_per_func, weights, self.reward_func_names))
        return batch.rewards_per_func

    def _judge(self, batch: RolloutBatch) -> None:
        """Scores the trajectories of this process, unless they are scored, and credits those of all."""
        batch.scores = batch.scores or self._score(batch)
        generations = self.num_generations if batch.mode == "train" else self.num_generations_eval
        weights = self.reward_weights.to(self.accelerator.device)
        given = batch.trajectories, batch.scores, weights, generations, batch.branching
        batch.rewards, batch.rewards_per_func = gather_rewards(*given)
        options = {"turn_coef": self.args.turn_advantage_coef, "scale_rewards": self.scale_rewards}
        batch.advantages = self._estimator(batch.rewards, **options)

    def _score(self, batch: RolloutBatch) -> Scores:
        extra = {
            "trainer_state": self.state,
            "log_extra": batch.add_extra,
            "log_metric": self._log_metric,
        }
        dataset = self.train_dataset if batch.mode == "train" else self.eval_dataset
        batch.add_texts(self._tokenizer, had_text_prompts(dataset))
        given = self.turn_reward_funcs, self.outcome_reward_funcs, batch.counted, extra, self.state_scores
        with self.activity.of("rewards"):
            score_answers(self, batch)
            scores = self._run_on_all_ranks(lambda: score_trajectories(*given))
            self.watch.recheck(batch.counted, batch.mode)
        return fill_up_scores(scores, batch.fills)

    def _credit(self, batch: RolloutBatch, output: dict[str, Any]) -> dict[str, Any]:
        """Adds the advantages of turns, and columns for our forward, to the batch that TRL trains on."""
        advantages = batch.advantages
        self._log_credit(batch, advantages)
        first = self.accelerator.process_index * len(batch.rows)
        rows = torch.arange(first, first + len(batch.rows), device=advantages.device)
        self.conversations.observe(batch, advantages[rows])
        columns = TokenColumns.of_rollouts(batch.token_rows, output["completion_ids"])
        output["group_ids"] = rows // batch.rewards.group_size
        output["row_ids"] = self.records.credit(batch, advantages[rows], rows)
        output["turn_ids"], output["advantages"] = columns.turn_ids, advantages[rows].gather(1, columns.turn_ids)
        if columns.parent is not None:
            output["parent"] = columns.parent
        if "importance_sampling_ratio" in output:
            self._record(batch.mode, mismatch_metrics(output, advantages.shape[1]))
        if batch.mode == "train" and self.args.groups_without_signal != "keep":
            leave_out(output, has_signal(batch))
        return output

    def _log_credit(self, batch: RolloutBatch, advantages: torch.Tensor) -> None:
        weights = self.reward_weights.to(self.accelerator.device)
        equal = share_of_equal_groups(batch.rewards_per_func, weights, batch.rewards.group_size)
        self._metrics[batch.mode]["frac_reward_zero_std"][-1] = equal
        self._record(batch.mode, credit_metrics(batch.rewards, advantages))
        show_advantages(self._logs["advantages"], batch.rewards, advantages)
        if batch.mode == "train":
            audit = audit_rewards(batch.rewards, advantages)
            self._record("train", audit_metrics(audit, batch.sampled_again))
            self.audits.observe(audit, self.reward_func_names, self.watch.causal)
            self.watch.observe(batch, advantages, self.accelerator.is_main_process)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        self._loss_columns = TokenColumns.of_inputs(inputs)
        try:
            with self.records.loss_of(inputs):
                return super().compute_loss(model, inputs, *args, **kwargs) * inputs.get("loss_factor", 1.0)
        finally:
            self._loss_columns = None

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """TRL's, `(B, T)`, 0 where a token is not trained. Old and reference log-probs have no dropout."""
        with without_dropout(model, self._loss_columns is None):
            if self.args.forward == "padded":
                given = model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy
                return self.records.observed(super()._get_per_token_logps_and_entropies(*given, **kwargs))
            columns = self._loss_columns or TokenColumns.of_rollouts(
                self._batch.token_rows, input_ids[:, -logits_to_keep:]
            )
            with self.accelerator.autocast():
                logps, entropies = completion_logps(
                    model, input_ids, attention_mask, columns, self.args, self._distribution, batch_size
                )
        return self.records.observed((logps, entropies if compute_entropy else None, None))

    # Without training

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.eval_trajectories = []
        return super().evaluate(*args, **kwargs)

    def rollout(self, num_prompts: int, num_generations: int = 1) -> list[Trajectory]:
        """
        Runs and scores conversations, `num_generations` for each prompt, without training. Prompts are the first rows
        of the evaluation set, or of the training set if there is none. Where conversations can be compared, turn
        rewards are also asked whether they depend on later turns, see `RewardWatch.causal`.
        """
        dataset = self.train_dataset if self.eval_dataset is None else self.eval_dataset
        rows = [row for row in dataset.take(num_prompts) for _ in range(num_generations)]
        batch = RolloutBatch("eval", rows, [False] * len(rows))
        with open_environments(batch):
            self._rollout(batch)
            self._score(batch)
            if num_generations > 1:
                self.watch.recheck(batch.counted, "audit")
        return batch.trajectories
