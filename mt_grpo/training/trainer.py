"""The trainer: TRL's GRPO with rollouts of many turns and an advantage for every token."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather, gather_object
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from mt_grpo.credit import get_estimator
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rewards import RewardError, RewardFunc, Scores, load_rewards, score_trajectories
from mt_grpo.rollout import Engine, Limits, RolloutError, RolloutRequest, RolloutRunner, Sampling, derive_seed
from mt_grpo.rollout.transformers_engine import TransformersEngine
from mt_grpo.rollout.vllm_http import ServerGoneError
from mt_grpo.training.balance import regroup
from mt_grpo.training.build import build_env, prepare_tokenizer
from mt_grpo.training.config import ConfigError, MTGRPOConfig
from mt_grpo.training.forward import batch_logps, keep_outputs_exact, prepare_forward
from mt_grpo.training.proof import prove_forward
from mt_grpo.training.records import (
    UNFINISHED,
    MetricsCallback,
    TrajectoryWriter,
    completion_metrics,
    credit_metrics,
    mismatch_metrics,
    rollout_metrics,
)
from mt_grpo.training.resume import load_rollouts, save_rollouts
from mt_grpo.training.reward_batch import gather_rewards
from mt_grpo.training.rows import scored_columns
from mt_grpo.training.servers import check_importance_sampling, own_engine, server_client, weight_sync
from mt_grpo.training.turn_by_turn import turn_by_turn_logps
from mt_grpo.training.weight_push import WeightSyncError
from mt_grpo.training.weight_sync import WeightSync
from mt_grpo.trajectory import Trajectory

Reward = str | Callable[..., Any] | RewardFunc


class MTGRPOEnvTrainer(GRPOTrainer):
    """
    Trains an agent over many turns: rollouts in an environment, rewards for turns and outcomes, and credit that
    reaches the tokens of the turn that earned it. Loss, buffering, sampling, checkpoints and logging are TRL's.

    Args:
        model (`str` or `PreTrainedModel`): The policy.
        env (`MultiTurnToolEnv`, *optional*): The environment; built from `args` where none is given.
        turn_reward_funcs (`list`, *optional*): Turn rewards: `TurnReward`s, names or dotted paths.
        outcome_reward_funcs (`list`, *optional*): Outcome rewards: `OutcomeReward`s, names, dotted paths or TRL
            reward functions. Both default to those of `args`.
        args (`MTGRPOConfig`, *optional*): Configuration.
        train_dataset, eval_dataset (`Dataset`): Rows with a `prompt` (text or messages); other columns reach rewards.
        engine (`Engine`, *optional*): Where completions come from; where none is given, the server of `args` with
            `use_vllm`, else the model itself. One that is given gets no weights; with `use_vllm` the loss corrects
            for the difference between its log-probs and the model's.
        processing_class, callbacks, optimizers, quantization_config, peft_config: As in TRL.

    Raises:
        ConfigError: If there is no reward function at all, or no dataset.
        RolloutError: In training, if every conversation of two batches in a row fails.
    """

    _tag_names = ["trl", "grpo", "mt-grpo"]
    _name = "MT-GRPO"
    args: MTGRPOConfig

    def __init__(
        self,
        model: str | PreTrainedModel,
        env: MultiTurnToolEnv | None = None,
        turn_reward_funcs: Sequence[Reward] | None = None,
        outcome_reward_funcs: Sequence[Reward] | None = None,
        args: MTGRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset] | None = None,
        engine: Engine | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = MTGRPOConfig(f"{Path(name).name}-MT-GRPO")
        turn_rewards = args.turn_reward_funcs if turn_reward_funcs is None else turn_reward_funcs
        outcome_rewards = args.outcome_reward_funcs if outcome_reward_funcs is None else outcome_reward_funcs
        self.turn_reward_funcs = load_rewards(list(turn_rewards or []), "turn")
        self.outcome_reward_funcs = load_rewards(list(outcome_rewards or []), "outcome")
        rewards = [*self.turn_reward_funcs, *self.outcome_reward_funcs]
        if not rewards:
            raise ConfigError("There is no reward: name one in `outcome_reward_funcs` or `turn_reward_funcs`.")
        self.env = env or build_env(args)
        # TRL's own transport is neither needed nor asked: the engine samples, and `weight_sync` brings it the weights
        use_vllm, args.use_vllm = args.use_vllm, False
        super().__init__(
            model=model,
            reward_funcs=[reward.score for reward in rewards],  # TRL counts and names them; they are called here
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=[*(callbacks or []), MetricsCallback()],
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        prepare_forward(self)
        self._scored: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None
        self.reward_func_names = [reward.name for reward in rewards]
        if args.reward_weights is None:
            self.reward_weights = torch.tensor([reward.weight for reward in rewards], dtype=torch.float32)
        # TRL recognises a truncated completion by its last token; here the stop reason says it
        self._mask_truncated, self.mask_truncated_completions = self.mask_truncated_completions, False
        prepare_tokenizer(self._tokenizer, self.env)
        self._estimator = get_estimator(args.advantage_estimator)
        self._event_loop = asyncio.new_event_loop()
        self.use_vllm = args.use_vllm = use_vllm  # the loss corrects for what the engine computes otherwise
        self.weight_sync: WeightSync | None = None
        self._last_loaded_step = -1
        if use_vllm:
            check_importance_sampling(args)
        if use_vllm and engine is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            engine = server_client(args, self._tokenizer, name)
            self._event_loop.run_until_complete(engine.connect())
            self.weight_sync = weight_sync(args, engine, lambda: self.model, self.accelerator)
        self._writer = TrajectoryWriter(args.output_dir, self.accelerator.process_index)
        self._sampling = Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
        )
        self.runner = RolloutRunner(
            self.env,
            engine or own_engine(args, self._tokenizer, self.model, self.accelerator),
            Limits(
                self.max_completion_length, args.max_turn_length, args.rollout_timeout, args.max_concurrent_rollouts
            ),
            self.chat_template_kwargs,
            args.history,
            args.compact_every,
            args.tokenization_sanity_check_mode,
        )
        self._failed_batches = 0
        self.eval_trajectories: list[Trajectory] = []
        """Trajectories of this process in the latest evaluation."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        keep_outputs_exact(self.accelerator)

    # Rollout: replaces TRL's generation and its tool loop

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        mode = "train" if self.model.training else "eval"
        trajectories = self._trajectories = self._rollout(prompts, mode)
        completions = [self.runner.completion(trajectory) for trajectory in trajectories]
        for trajectory, completion in zip(trajectories, completions, strict=True):
            if not completion.ids:  # the conversation failed before its first token; a masked one keeps shapes valid
                completion.ids, completion.logprobs = [self._tokenizer.pad_token_id], [float("nan")]
                completion.mask, completion.turns, completion.parents = [0], [0], [-1]
            elif self._mask_truncated and trajectory.stop_reason in UNFINISHED:
                completion.mask = [0] * len(completion.mask)
        self._completions = completions
        prompt_ids = [completion.prompt_ids for completion in completions]
        self._log_rollouts(trajectories, prompt_ids, mode)
        return (
            prompt_ids,
            [completion.ids for completion in completions],
            [completion.mask for completion in completions],
            [trajectory.completion for trajectory in trajectories],
            [completion.logprobs for completion in completions],
            {},
            None,
            [],
        )

    def _rollout(self, prompts: list[Any], mode: str) -> list[Trajectory]:
        rank, step = self.accelerator.process_index, self.state.global_step
        # generation can happen more than once in an optimiser step; evaluation draws the same numbers every time
        moment = (step, self._step % self.args.gradient_accumulation_steps) if mode == "train" else ()
        requests = []
        for index, (prompt, row) in enumerate(zip(prompts, self._rows, strict=True)):
            number = rank * len(prompts) + index
            columns = {name: value for name, value in row.items() if name != "prompt"}
            session = "-".join(f"{part:06d}" if isinstance(part, int) else part for part in (mode, *moment, number))
            seed = derive_seed(self.args.seed, mode, *moment, number, prompt)
            requests.append(RolloutRequest(prompt, session, columns, seed))
        if self.weight_sync is not None and self._last_loaded_step != step:
            self.weight_sync.sync(step)
            self._last_loaded_step = step
        training = self.model.training
        self.model.eval()  # dropout has no place in sampling
        try:
            with self._generation_model() as model:
                if model is not None:
                    self.runner.engine.model = model
                return self._everywhere(self.runner.run(requests, self._sampling, on_finish=self._trajectories.append))
        finally:
            self.model.train(training)

    def _everywhere(self, work: Coroutine[Any, Any, Any]) -> Any:
        """A failure that ends one process ends all: none is left waiting for it in a collective."""
        failure: Exception | None = None
        try:
            result = self._event_loop.run_until_complete(work)
        except (ServerGoneError, WeightSyncError, RewardError) as error:
            failure = error
        failures = [entry for entry in gather_object([failure and (type(failure), str(failure))]) if entry]
        if failures:
            kind, message = failures[0]
            raise failure or kind(message)
        return result

    def rollout(self, num_prompts: int) -> list[Trajectory]:
        """
        Runs one conversation for each of the first prompts, evaluation rows where there are any, and scores them;
        trains nothing.
        """
        dataset = self.train_dataset if self.eval_dataset is None else self.eval_dataset
        self._rows, self._trajectories = list(dataset.take(num_prompts)), []
        trajectories = self._rollout([row["prompt"] for row in self._rows], "eval")
        self._score(trajectories)
        return trajectories

    def _generation_model(self) -> Any:
        """Context of the model an embedded engine samples from; of `None` where another engine does."""
        if not isinstance(self.runner.engine, TransformersEngine):
            return nullcontext()
        return unwrap_model_for_generation(
            self.model_wrapped,
            self.accelerator,
            gather_deepspeed3_params=self.args.ds3_gather_for_generation,
            gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
        )

    def _log_rollouts(self, trajectories: list[Trajectory], prompt_ids: list[list[int]], mode: str) -> None:
        lengths = [sum(turn.num_tokens for turn in trajectory.turns) for trajectory in trajectories]
        truncated = [trajectory.stop_reason in UNFINISHED for trajectory in trajectories]
        rows = [len(completion.prompt_ids) + len(completion.ids) for completion in self._completions]
        lengths, truncated, prompt_lengths, rows = (
            gather(torch.tensor(values, device=self.accelerator.device))
            for values in (lengths, truncated, [len(p) for p in prompt_ids], rows)
        )
        prove_forward(self, rows.max().item())
        if mode == "train":
            self.state.num_input_tokens_seen += (prompt_lengths.sum() + lengths.sum()).item()
        self._metrics[mode]["num_tokens"] = [self.state.num_input_tokens_seen]
        self._record(mode, completion_metrics(lengths.cpu(), truncated.cpu()))
        self._record(mode, metrics := rollout_metrics(trajectories))
        if mode == "train":
            failed = metrics.get("stop/engine_error", 0.0) + metrics.get("stop/env_error", 0.0) > 1 - 1e-9
            self._failed_batches = self._failed_batches + 1 if failed else 0
            if self._failed_batches == 2:  # on every rank, since metrics are of all; one alone may be a bad prompt
                error = trajectories[0].error
                raise RolloutError(f"Every conversation of two batches in a row failed, the last ones with: {error}")

    def _record(self, mode: str, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)

    # Rewards and credit

    def _score(self, trajectories: list[Trajectory]) -> Scores:
        extra = {
            "trainer_state": self.state,
            "log_extra": self._log_completion_extra,
            "log_metric": self._log_metric,
        }
        return self._everywhere(
            score_trajectories(self.turn_reward_funcs, self.outcome_reward_funcs, trajectories, extra)
        )

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids: list[Any]
    ) -> torch.Tensor:
        """Scores turns and outcomes; returns what TRL expects: one column a reward, turn rewards summed over turns."""
        generations = self.num_generations if self.model.training else self.num_generations_eval
        scores = self._score(self._trajectories)
        weights = self.reward_weights.to(self.accelerator.device)
        self._reward_batch, columns = gather_rewards(self._trajectories, scores, weights, generations)
        return columns

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's, with the advantage of each trajectory replaced by one for each of its tokens, shape `(B, T)`."""
        mode = "train" if self.model.training else "eval"
        self._rows, self._trajectories = inputs, []
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:  # whatever fails, conversations that were finished before are not lost
            self._writer.write(self._trajectories, mode, self.state.global_step)
        advantages = self._estimator(
            self._reward_batch, turn_coef=self.args.turn_advantage_coef, scale_rewards=self.scale_rewards
        )
        self._record(mode, credit_metrics(self._reward_batch, advantages))
        turns = self._reward_batch.turn_mask
        means = (advantages * turns).sum(dim=1) / turns.sum(dim=1).clamp(min=1)
        shown = self._logs["advantages"]  # the table of completions shows the advantage that is trained
        for _ in range(min(len(means), len(shown))):
            shown.pop()
        shown.extend(means.tolist())
        first = self.accelerator.process_index * len(inputs)
        local = advantages[first:][: len(inputs)]
        rows = torch.arange(first, first + len(inputs), device=self.accelerator.device)
        output["group_ids"] = rows // self._reward_batch.group_size
        _, turn_ids, parents = scored_columns(self._completions, output["completion_ids"])
        output["turn_ids"], output["advantages"] = turn_ids, local.gather(1, turn_ids)
        if parents is not None:
            output["parents"] = parents
        if "importance_sampling_ratio" in output:
            self._record(mode, mismatch_metrics(output, advantages.shape[1]))
        if mode == "eval":
            self.eval_trajectories += self._trajectories
        return output

    # Forward: every token once, and the rows of a group in one micro-batch, where they share their prompt

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        prove_forward(self, self.max_completion_length or 1)  # before rollouts, and before rows a checkpoint kept
        buffered = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self.args.forward == "tree" and self._buffered_inputs is not buffered:
            self._buffered_inputs = regroup(self._buffered_inputs, self.num_generations)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        self._scored = mask, inputs["turn_ids"], inputs.get("parents")
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self._scored = None

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
        """TRL's, `(B, T)`, with log-probs and entropies computed at the trained tokens only and 0 elsewhere."""
        if self.args.forward == "padded":
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, **kwargs
            )
        ids, mask = input_ids[:, -logits_to_keep:], attention_mask[:, -logits_to_keep:]
        scored, turn_ids, parents = self._scored or scored_columns(self._completions, ids)
        prompt_ids, prompt_mask = input_ids[:, :-logits_to_keep], attention_mask[:, :-logits_to_keep]
        with self.accelerator.autocast():
            if self.args.forward == "turn_by_turn":
                logps, entropies = turn_by_turn_logps(
                    model, prompt_ids, prompt_mask, ids, scored, turn_ids, parents, self.temperature
                )
            else:
                columns = [prompt_ids, prompt_mask, ids, mask, scored, *([] if parents is None else [parents])]
                pieces = zip(*(column.split(batch_size or len(ids)) for column in columns), strict=True)
                options = {"attention": self.args.tree_attention, "temperature": self.temperature}
                results = [batch_logps(model, *piece, **options) for piece in pieces]
                logps, entropies = (torch.cat(tensors) for tensors in zip(*results, strict=True))
        return logps, entropies if compute_entropy else None, None

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.eval_trajectories = []
        return super().evaluate(*args, **kwargs)

    # Resuming: TRL drops the generated batch at a checkpoint, so a resumed run would sample another one

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        try:
            super()._save_checkpoint(model, trial)
            save_rollouts(folder, self.accelerator, self._step, self._buffered_inputs)
        except BaseException:  # a checkpoint is whole or absent, whatever stops its writing
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._step, self._buffered_inputs = load_rollouts(Path(checkpoint), self.accelerator)
