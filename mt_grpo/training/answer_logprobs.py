"""
Computes the log-probs of right answers that some rewards need, by the trainer's model or a server.

The model scores them in the forward of the old log-probs, where TRL makes one, so that no context is computed for
them. Where it makes none, or rewards are asked before it (`groups_without_signal: resample`), a forward of their own
computes the contexts of a conversation once for all its turns and rewards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from accelerate.utils import gather_object
from torch import nn
from trl import GRPOTrainer

from mt_grpo.errors import ConfigError
from mt_grpo.forward.plan import ForwardPlan
from mt_grpo.forward.rows import score
from mt_grpo.rewards import RewardFunc, RightAnswer
from mt_grpo.rollout import Engine
from mt_grpo.rollout.engine import ScoringEngine
from mt_grpo.rollout.token_row import AnswerLeaves, answer_ids, answer_leaves
from mt_grpo.token_tree import TokenTree
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.forward_plan import has_old_forward, prove_forward
from mt_grpo.training.model import without_dropout
from mt_grpo.training.ranks import everywhere, run_here
from mt_grpo.training.rollout_batch import RolloutBatch, longest_path
from mt_grpo.trajectory import Trajectory


def check_scorers(rewards: Sequence[RewardFunc], args: MTGRPOConfig, engine: Engine | None = None) -> None:
    """Whether there is a server for the rewards that ask one."""
    for reward in rewards:
        if not isinstance(reward, RightAnswer) or reward.scorer != "server":
            continue
        if not (args.use_vllm if engine is None else isinstance(engine, ScoringEngine)):
            raise ConfigError(
                f"`scorer: server` of the reward {reward.name!r} needs a vLLM server, and this run samples without "
                "one: set `use_vllm: true`, or leave `scorer` at `trainer`."
            )


def hang_leaves(trainer: GRPOTrainer, batch: RolloutBatch) -> None:
    """
    Hangs right answers behind the contexts of a batch, for the forward of the old log-probs to score, if there is one
    and it can. This is a collective call.
    """
    asking = _asking(trainer, "trainer")
    if asking and batch.scores is None and trainer.args.forward == "tree" and has_old_forward(trainer):
        batch.leaves = _leaves(trainer, batch, asking)


def score_answers(trainer: GRPOTrainer, batch: RolloutBatch) -> None:
    """
    Fills in `answer_logprobs` of a batch's trajectories, as far as the forward of the old log-probs has not; a
    trajectory that failed has `None` for every turn. This is a collective call: every process brings the same number
    of rows, and makes the same number of forwards, whatever is in them.
    """
    asking = _asking(trainer, "server")
    if asking:
        batch.leaves = _leaves(trainer, batch, asking)
        batch.answer(everywhere(lambda: _by_server(trainer, batch)))
    asking = [each for each in _asking(trainer, "trainer") if each.name not in batch.answered]
    # a padded forward has a row for each context, so several rewards in one would take more memory
    for together in [asking] if trainer.args.forward == "tree" else [[each] for each in asking]:
        if together:
            batch.leaves = _leaves(trainer, batch, together)
            batch.answer(_by_trainer(trainer, batch))


def asks_server(trainer: GRPOTrainer) -> bool:
    """Whether a reward has the server score right answers."""
    return bool(_asking(trainer, "server"))


def _asking(trainer: GRPOTrainer, scorer: str) -> list[RightAnswer]:
    rewards = [*trainer.turn_reward_funcs, *trainer.outcome_reward_funcs, *trainer.state_scores]
    return [each for each in rewards if isinstance(each, RightAnswer) and each.scorer == scorer]


def _leaves(trainer: GRPOTrainer, batch: RolloutBatch, asking: Sequence[RightAnswer]) -> dict[str, list[AnswerLeaves]]:
    return everywhere(
        lambda: {each.name: [_leaves_of(each, one, trainer) for one in batch.trajectories] for each in asking}
    )


def _leaves_of(reward: RightAnswer, trajectory: Trajectory, trainer: GRPOTrainer) -> AnswerLeaves:
    if trajectory.failed or not trajectory.turns:
        return AnswerLeaves()
    runner = trainer.runner

    @cache
    def ids(answer: str | None) -> tuple[list[int], list[int]] | None:
        return None if answer is None else answer_ids(runner.renderer, reward.prefix, answer)

    answers = [ids(reward.answer_at(turn, trajectory.row)) for turn in range(trajectory.tree.num_turns)]
    # a server samples one token after what it scores
    return answer_leaves(trajectory, answers, runner.engine.context_length - 1)


def _by_trainer(trainer: GRPOTrainer, batch: RolloutBatch) -> list[list[list[float]]]:
    args, rows = trainer.args, batch.leaf_trees
    size = args.per_device_train_batch_size if batch.mode == "train" else args.per_device_eval_batch_size
    prove_forward(trainer, max(gather_object([longest_path(tree for row in rows for tree in row)])))
    shown = {number: image.inputs for one in batch.trajectories for number, image in one.media.items()}
    plan = ForwardPlan(
        media={**trainer.blank, **shown},
        forward=args.forward,
        attention=args.tree_attention,
        group=trainer.forward_plan.group,
    )
    found: list[list[list[float]]] = []
    with without_dropout(trainer.model, True), trainer.accelerator.autocast():
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            means = iter(mean_logprobs(trainer.model, replace(plan, trees=[tree for row in part for tree in row])))
            found += [[next(means) for _ in row] for row in part]
    return found


@torch.no_grad()
def mean_logprobs(model: nn.Module, plan: ForwardPlan) -> list[list[float]]:
    """
    The mean log-prob per token of each turn's action, also from a forward if there is nothing to score, so that ranks
    with different trees stay in step.
    """
    given, turns = len(plan.trees), [tree.num_turns for tree in plan.trees]
    if not any(tree.nodes for tree in plan.trees):
        nothing = TokenTree()
        nothing.add_turn([0], [], [])
        plan, turns = replace(plan, trees=[*plan.trees, nothing]), [*turns, 1]
    scores = score(model, plan)
    if plan.forward == "tree":
        return scores.turn_means(turns)[:given]
    return [[turn.mean().item() for turn in tree] for tree in scores.by_turn(turns)[:given]]


def _by_server(trainer: GRPOTrainer, batch: RolloutBatch) -> list[list[list[float]]]:
    engine, trajectories = trainer.runner.engine, batch.trajectories
    if any(trajectory.media for trajectory in trajectories):
        raise ConfigError(
            "A server cannot say how likely an answer is in a conversation that shows images: set `scorer: trainer`."
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

    return run_here(all_of_them(), trainer.accelerator.device)
