"""
Rewards of a run: which ones there are, reward models, right answers that some need, and the scores of all processes as
the rewards that credit rules take.

The trainer's model computes the log-probs of right answers in the forward of the old log-probs, where TRL makes one,
so that no context is computed for them. Where it makes none, or rewards are asked before it (`groups_without_signal:
resample`), a forward of their own computes the contexts of a conversation once for all its turns and rewards.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather, gather_object
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOTrainer

from mt_grpo.credit import RewardBatch, without_signal
from mt_grpo.credit.rule import minus_group_min, to_go
from mt_grpo.envs import EnvSource
from mt_grpo.errors import ConfigError, refuse_first
from mt_grpo.forward.model import ForwardPlan, score
from mt_grpo.options.values import names_model
from mt_grpo.rewards import (
    FunctionReward,
    RewardFunc,
    RightAnswer,
    Scores,
    TeacherAgreement,
    TeacherLogRatio,
    load_rewards,
)
from mt_grpo.rollout import Engine
from mt_grpo.rollout.engines import ScoringEngine
from mt_grpo.rollout.runner import Branching
from mt_grpo.rollout.token_row import AnswerLeaves, answer_ids
from mt_grpo.token_tree import TokenTree
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.model import resolve_model, source_options
from mt_grpo.training.ranks import everywhere, run_here
from mt_grpo.training.rollout_batch import RolloutBatch, longest_path
from mt_grpo.trajectory import Trajectory


class RunRewards:
    """The rewards of a run, by what they judge, with TRL's tokenizers and weights of turn and outcome rewards."""

    def __init__(
        self,
        args: MTGRPOConfig,
        source: EnvSource,
        turn_reward_funcs: object,
        outcome_reward_funcs: object,
        reward_funcs: object,
        reward_processing_classes: object,
    ) -> None:
        turns = args.turn_reward_funcs if turn_reward_funcs is None else turn_reward_funcs
        self.turn = load_rewards(as_list(turns), "turn")
        args.check_credit(bool(self.turn))
        if reward_funcs is not None and outcome_reward_funcs is not None:
            raise ConfigError(
                "The trainer was given `reward_funcs` and `outcome_reward_funcs`, which are the same: give one list."
            )
        given = outcome_reward_funcs if reward_funcs is None else reward_funcs
        outcomes = as_list(args.outcome_reward_funcs if given is None else given)
        self.outcome = load_rewards(with_models(outcomes, args), "outcome")
        self.state = load_rewards([args.state_score] if args.state_score else [], "state")
        listed = self.all
        own = _own_rewards(listed, source, args)
        self.outcome += own
        classes = reward_processing_classes
        tokenizers = [None] * len(outcomes) if classes is None else as_list(classes)
        if len(tokenizers) != len(outcomes):
            raise ConfigError(
                f"The number of reward processing classes ({len(tokenizers)}) must match that of the reward "
                f"functions ({len(outcomes)}): give one for each, and `None` for a function."
            )
        self.tokenizers = [*[None] * len(self.turn), *tokenizers, *[None] * len(own)]
        self.weights = _weights_of(args, listed, own)

    @property
    def all(self) -> list[RewardFunc]:
        """Turn rewards, then outcome rewards."""
        return [*self.turn, *self.outcome]

    @property
    def for_trl(self) -> list[Any]:
        """What TRL's trainer is given: it loads models; all else is called here. It refuses an empty list."""
        functions = [each.model if isinstance(each, ModelReward) else each.score for each in self.all]
        return functions or [lambda completions, **columns: [None] * len(completions)]

    def check_scorers(self, args: MTGRPOConfig, engine: Engine | None) -> None:
        """Whether there is a server for the rewards that ask one, and a teacher."""
        for reward in (*self.all, *self.state):
            by_server = isinstance(reward, RightAnswer) and reward.scorer == "server"
            refuse_first(
                (
                    isinstance(reward, (TeacherAgreement, TeacherLogRatio)) and args.teacher is None,
                    f"The reward {reward.name!r} asks a teacher, and there is none: name one in `teacher`.",
                ),
                (
                    by_server and not (args.use_vllm if engine is None else isinstance(engine, ScoringEngine)),
                    f"`scorer: server` of the reward {reward.name!r} needs a vLLM server, and this run samples "
                    "without one: set `use_vllm: true`, or leave `scorer` at `trainer`.",
                ),
            )


def as_list(given: object) -> list[Any]:
    """One thing as a list of it, and nothing as an empty list."""
    return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]


def _own_rewards(listed: Sequence[RewardFunc], source: EnvSource, args: MTGRPOConfig) -> list[RewardFunc]:
    """The outcome rewards that environments bring beside those that are listed; without any there is a teacher."""
    names = Counter(reward.name for reward in listed)
    several = [name for name, number in names.items() if number > 1]  # of one kind they are refused when loaded
    if several:
        raise ConfigError(
            f"The reward {several[0]!r} is both a turn reward and an outcome reward: give one of them another `name`, "
            "by which metrics and records tell them apart."
        )
    own = source.rewards()
    for reward in own:
        if reward.name in names:
            raise ConfigError(
                f"The reward {reward.name!r} has the name of an environment class that gives its own reward "
                "(`get_reward`): rename one of the two."
            )
    if not listed and not own and not args.distillation_coef:
        raise ConfigError(
            "There is no reward: name one in `outcome_reward_funcs` or `turn_reward_funcs`"
            f"{'.' if args.teacher is None else ', or set `distillation_coef` to learn from the teacher alone.'}"
        )
    return own


def _weights_of(args: MTGRPOConfig, listed: Sequence[RewardFunc], own: Sequence[RewardFunc]) -> list[float] | None:
    """`reward_weights`: where they count the listed rewards only, each of the environments' own has 1, as in TRL."""
    given, names = args.reward_weights, [reward.name for reward in (*listed, *own)]
    if given is None or len(given) == len(names):
        return given
    if len(given) != len(listed):
        raise ConfigError(
            f"`reward_weights` is {given}: give one weight for each reward, in the order {', '.join(names)}."
        )
    return [*given, *[1.0] * len(own)]


def gather_rewards(
    trajectories: list[Trajectory],
    scores: Scores,
    weights: torch.Tensor,
    group_size: int,
    branching: Branching | None = None,
    names: Sequence[str] = (),
) -> tuple[RewardBatch, torch.Tensor]:
    """Gathers scores of as many trajectories of every process. This is a collective call."""
    device, weights = weights.device, weights.double()
    num_turns = torch.tensor([len(trajectory.turns) for trajectory in trajectories], device=device)
    longest = max(1, int(gather(num_turns).max()))
    stays = torch.tensor([not trajectory.failed for trajectory in trajectories], device=device)
    exists = (torch.arange(longest, device=device) < num_turns.unsqueeze(1)) & stays.unsqueeze(1)
    results = torch.zeros_like(exists)
    states = torch.zeros_like(exists, dtype=torch.int64)
    for row, trajectory in enumerate(trajectories):
        for turn in trajectory.turns:
            results[row, turn.index] = turn.has_result and not trajectory.failed
        states[row, : len(trajectory.turns)] = torch.tensor(_state_ids(trajectory), dtype=torch.int64, device=device)
    split = len(scores.turn)
    double: dict[str, Any] = {"dtype": torch.double, "device": device}
    # at least one column each: NCCL's way of gathering fails on a tensor without elements
    turns = torch.full((len(trajectories), longest, max(1, split)), torch.nan, **double)
    outcomes = torch.full((len(trajectories), max(1, len(scores.outcome))), torch.nan, **double)
    state_scores = torch.full((len(trajectories), longest), torch.nan, device=device)
    for column, rows in enumerate(scores.turn):
        for row, values in enumerate(rows):
            turns[row, : len(values), column] = _tensor(values, device)
    for column, values in enumerate(scores.outcome):
        outcomes[:, column] = _tensor(values, device)
    for rows in scores.state:  # one at most
        for row, values in enumerate(rows):
            state_scores[row, : len(values)] = _tensor(values, device)
    turns, outcomes, exists, results, states, state_scores = (
        gather(tensor) for tensor in (turns, outcomes, exists, results, states, state_scores)
    )
    turns, outcomes = turns[:, :, :split], outcomes[:, : len(scores.outcome)]
    credited = outcomes.masked_fill(~exists.any(dim=1, keepdim=True), torch.nan)  # without a turn it is in no baseline
    batch = RewardBatch(
        _sum_present(turns * weights[:split], dim=2),
        _sum_present(credited * weights[split:], dim=1).float(),
        exists,
        results,
        group_size,
        state_ids=states,
        state_scores=state_scores if scores.state else None,
        turn_streams=turns.permute(2, 0, 1).float(),
        outcome_streams=credited.T.float(),
        stream_weights=weights.float(),
        num_branches=1 if branching is None else branching.number,
        branch_at=0 if branching is None else branching.at,
        names=tuple(names),
    )
    sums = torch.full_like(turns[:, 0], torch.nan)
    for column, applies in enumerate((~turns.isnan()).any(dim=1).T):
        earned = to_go(turns[:, :, column].nan_to_num(nan=0.0))[:, 0]
        sums[:, column] = torch.where(applies, earned, torch.nan)
    return batch, torch.cat([sums, outcomes], dim=1).float()


def _state_ids(trajectory: Trajectory) -> list[int]:
    """For each turn a number of its first state (last reply or prompt), the same on every process."""
    # without the ids of calls, which differ between conversations
    replies = [[(reply["role"], reply.get("content")) for reply in turn.replies] for turn in trajectory.turns[:-1]]
    texts = [json.dumps(reply, sort_keys=True, default=str).encode() for reply in replies]
    hashes = [int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True) for text in texts]
    return [0, *hashes][: len(trajectory.turns)]


def share_of_equal_groups(columns: torch.Tensor, weights: torch.Tensor, group_size: int) -> float:
    """TRL's `frac_reward_zero_std` by credit rules' measure: TRL's float32 deviation is off by rounding."""
    above = minus_group_min(_sum_present(columns.double() * weights, dim=1).view(-1, group_size, 1)).squeeze(2)
    earns = ~above.isnan().all(dim=1)
    return (above.nan_to_num(nan=0.0) == 0).all(dim=1)[earns].float().mean().item()


def sample_again(
    batch: RolloutBatch,
    limit: int,
    sample: Callable[[RolloutBatch], None],
    score: Callable[[RolloutBatch], Scores],
    judge: Callable[[RolloutBatch], None],
) -> None:
    """Samples groups without signal again, with other seeds. A collective call: all make as many rounds."""
    first = PartialState().process_index * len(batch.rows)
    judge(batch)
    for attempt in range(1, limit + 1):
        silent = without_signal(batch.advantages, batch.group_size)
        if not silent.any() or batch.rewards.failed.all():  # what makes all fail is not chance
            return
        asked = silent.repeat_interleave(batch.group_size)[first : first + len(batch.rows)].tolist()
        fills = [not each for each in asked]
        again = RolloutBatch(batch.mode, batch.rows, fills, batch.branching, batch.group_size, attempt=attempt)
        try:
            sample(again)
            again.scores = score(again)
        except BaseException:  # whatever fails, conversations that were finished before are not lost
            batch.discarded += [[], again.counted]  # none of the attempt before was replaced
            raise
        batch.replace(again)
        batch.sampled_again += int(silent.sum())
        judge(batch)


def _tensor(values: list[float | None], device: torch.device) -> torch.Tensor:
    given = [torch.nan if value is None else value for value in values]
    return torch.tensor(given, dtype=torch.double, device=device)


def _sum_present(values: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum over the rewards that apply; NaN if none does."""
    total = values.nansum(dim=dim)
    return total.masked_fill(values.isnan().all(dim=dim), torch.nan)


class ModelReward(FunctionReward):
    """The logit of a sequence classifier with one label for a conversation; `use` takes it from TRL, who loads it."""

    collective = True

    def __init__(self, model: str | PreTrainedModel, **where: object) -> None:
        super().__init__(self._judge)
        self.model: Any = _resolved(model, where) if isinstance(model, str) else model  # loaded by TRL, see `use`
        self.name = Path(model if isinstance(model, str) else model.config.name_or_path).name or type(model).__name__
        self._tokenizer: Any = None
        self._template_kwargs: dict[str, Any] = {}

    def use(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> None:
        """Takes the model as it was loaded and placed, its tokenizer, and variables for the chat template."""
        self.model, self._tokenizer, self._template_kwargs = model, tokenizer, template_kwargs

    def score_nothing(self) -> None:
        """A forward of a token: where weights are sharded, the other processes wait for it in theirs."""
        self._logits({name: torch.ones(1, 1, dtype=torch.int64) for name in ("input_ids", "attention_mask")})

    def _judge(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: object) -> list[float | None]:
        whole = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        try:
            inputs = self._encoded(whole)
        except Exception:  # its template refuses what the conversations of other processes may not have
            self.score_nothing()
            raise
        return self._logits(inputs)[:, 0].float().tolist()

    def _encoded(self, whole: list[Any]) -> dict[str, torch.Tensor]:
        texts = [
            each
            if isinstance(each, str)
            else self._tokenizer.apply_chat_template(each, tokenize=False, **self._template_kwargs)
            for each in whole
        ]
        return self._tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )

    def _logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        device = next(self.model.parameters()).device
        with torch.inference_mode():
            return self.model(**{name: tensor.to(device) for name, tensor in inputs.items()}).logits


def _resolved(name: str, where: dict[str, Any]) -> str:
    """The model of a name; TRL silently gives one without a layer for a number a random one."""
    model = resolve_model(name, where.get("revision"))
    try:
        config, _ = PreTrainedConfig.get_config_dict(model, **where)
    except OSError:  # an adapter has none
        return model
    kind = (config.get("architectures") or [""])[0]
    if kind.endswith(("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM")):
        raise ConfigError(
            f"The reward model {name!r} is a {kind}, which gives words and no number: name a sequence classifier with "
            "one label."
        )
    labels = len(config.get("id2label", "01"))  # it is left out of the file where there are two
    if kind.endswith("ForSequenceClassification") and labels != 1:
        raise ConfigError(
            f"The reward model {name!r} is a classifier with {labels} labels: name one with one label, whose logit is "
            "the reward."
        )
    return model


def with_models(entries: Sequence[object], args: MTGRPOConfig) -> list[Any]:
    """Entries of `outcome_reward_funcs`, with those that are models, or name one, as `ModelReward`."""
    where = source_options(args)
    return [
        ModelReward(entry, **where)
        if isinstance(entry, nn.Module) or (isinstance(entry, str) and names_model(entry))
        else entry
        for entry in entries
    ]


def refuse_scorers(rewards: Sequence[RewardFunc], url: str) -> None:
    """Refuses rewards that ask the policy itself how likely a right answer is, where an endpoint is the policy."""
    for reward in rewards:
        if isinstance(reward, (RightAnswer, TeacherAgreement)):
            raise ConfigError(
                f"The reward {reward.name!r} needs log-probs of the policy, which the endpoint {url} does not give: "
                "leave it out."
            )


class RightAnswers:
    """The right answers that rewards of a trainer need the log-probs of."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer

    def asked_of(self, scorer: str) -> list[RightAnswer]:
        """The rewards whose answers are scored by the trainer (`"trainer"`), or by its servers (`"server"`)."""
        trainer = self._trainer
        rewards = [*trainer.turn_reward_funcs, *trainer.outcome_reward_funcs, *trainer.state_scores]
        return [each for each in rewards if isinstance(each, RightAnswer) and each.scorer == scorer]

    def hang(self, batch: RolloutBatch) -> None:
        """Hangs right answers behind a batch's contexts, for the forward of old log-probs. A collective call."""
        asking, trainer = self.asked_of("trainer"), self._trainer
        if asking and batch.scores is None and trainer.args.forward == "tree" and trainer.forwards.has_old_forward:
            batch.leaves = self._leaves(batch, asking)

    def score(self, batch: RolloutBatch) -> None:
        """Fills in missing `answer_logprobs`; `None` for turns of failed trajectories. A collective call."""
        asking = self.asked_of("server")
        if asking:
            batch.leaves = self._leaves(batch, asking)
            batch.answer(everywhere(lambda: self._by_server(batch)))
        asking = [each for each in self.asked_of("trainer") if each.name not in batch.answered]
        # a padded forward has a row for each context, so several rewards in one would take more memory
        for together in [asking] if self._trainer.args.forward == "tree" else [[each] for each in asking]:
            if together:
                batch.leaves = self._leaves(batch, together)
                batch.answer(self._by_trainer(batch))

    def _leaves(self, batch: RolloutBatch, asking: Sequence[RightAnswer]) -> dict[str, list[AnswerLeaves]]:
        return everywhere(
            lambda: {each.name: [self._leaves_of(each, one) for one in batch.trajectories] for each in asking}
        )

    def _leaves_of(self, reward: RightAnswer, trajectory: Trajectory) -> AnswerLeaves:
        if trajectory.failed or not trajectory.turns:
            return AnswerLeaves()
        runner = self._trainer.runner

        @cache
        def ids(answer: str | None) -> tuple[list[int], list[int]] | None:
            return None if answer is None else answer_ids(runner.renderer, reward.prefix, answer)

        answers = [ids(reward.answer_at(turn, trajectory.row)) for turn in range(trajectory.tree.num_turns)]
        # a server samples one token after what it scores
        return AnswerLeaves.after(trajectory, answers, runner.engine.context_length - 1)

    def _by_trainer(self, batch: RolloutBatch) -> list[list[list[float]]]:
        trainer, args, rows = self._trainer, self._trainer.args, batch.leaf_trees
        size = args.per_device_train_batch_size if batch.mode == "train" else args.per_device_eval_batch_size
        trees = [tree for row in rows for tree in row]
        trainer.forwards.prove(max(gather_object([longest_path(trees)])))
        shown = {number: image.inputs for one in batch.trajectories for number, image in one.media.items()}
        plan = ForwardPlan(
            trees,
            media={**trainer.blank, **shown},
            forward=args.forward,
            attention=args.tree_attention,
            group=trainer.forwards.plan.group,
        )
        with trainer.scoring(trainer.model):
            parts = [_mean_logprobs(trainer.model, part) for part in plan.split(size * len(batch.leaves))]
        means = chain.from_iterable(parts)
        return [[next(means) for _ in row] for row in rows]

    def _by_server(self, batch: RolloutBatch) -> list[list[list[float]]]:
        engine, trajectories = self._trainer.runner.engine, batch.trajectories
        if any(trajectory.media for trajectory in trajectories):
            raise ConfigError(
                "A server cannot say how likely an answer is in a conversation that shows images: set `scorer: "
                "trainer`."
            )

        async def leaves_of(tree: TokenTree, session: str) -> list[float]:
            asked = []
            for turn, answer in enumerate(tree.actions()):
                path = tree.path_of_turn(turn)
                asked.append(engine.logprobs(path[: len(path) - len(answer)], answer, session))
            return [sum(values) / len(values) for values in await asyncio.gather(*asked)]

        async def one(trajectory: Trajectory, trees: list[TokenTree]) -> list[list[float]]:
            try:
                return list(await asyncio.gather(*(leaves_of(tree, trajectory.session) for tree in trees)))
            finally:
                engine.release(trajectory.session)

        async def all_of_them() -> list[list[list[float]]]:
            try:
                return list(await asyncio.gather(*map(one, trajectories, batch.leaf_trees)))
            finally:
                await engine.close()

        return run_here(all_of_them(), self._trainer.accelerator.device)


@torch.no_grad()
def _mean_logprobs(model: nn.Module, plan: ForwardPlan) -> list[list[float]]:
    """The mean log-prob per token of each turn's action."""
    trees: list[TokenTree] = plan.trees  # type: ignore[assignment]  # of right answers
    turns, scores = [tree.num_turns for tree in trees], score(model, plan)
    if plan.forward == "tree":
        return scores.turn_means(turns)
    return [[turn.mean().item() for turn in tree] for tree in scores.by_turn(turns)]
