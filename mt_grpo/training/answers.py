"""
Computes the log-probs of right answers that `InformationGain` rewards need, by the trainer's model or a server. Apart
from the trainer, since only runs with such a reward come here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import nn
from trl import GRPOTrainer

from mt_grpo.errors import ConfigError
from mt_grpo.forward.logps import token_logps
from mt_grpo.forward.model import score_packed
from mt_grpo.forward.packing import pack
from mt_grpo.rewards import InformationGain, RewardFunc
from mt_grpo.rollout import Engine
from mt_grpo.rollout.engine import ScoringEngine
from mt_grpo.rollout.token_row import AnswerLeaves, answer_ids, answer_leaves
from mt_grpo.token_tree import TokenTree
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.forward import prove_forward
from mt_grpo.training.model import without_dropout
from mt_grpo.training.processes import everywhere, run_here
from mt_grpo.training.rollout_batch import RolloutBatch
from mt_grpo.trajectory import Trajectory


def check_scorers(rewards: Sequence[RewardFunc], args: MTGRPOConfig, engine: Engine | None = None) -> None:
    """
    Whether there is a server for the rewards that ask one.

    Args:
        rewards (`Sequence[RewardFunc]`): The rewards.
        args (`MTGRPOConfig`): The run's options.
        engine (`Engine`, *optional*): What the trainer was given to sample with.

    Raises:
        ConfigError: If there is none.
    """
    for reward in rewards:
        if not isinstance(reward, InformationGain) or reward.scorer != "server":
            continue
        if not (args.use_vllm if engine is None else isinstance(engine, ScoringEngine)):
            raise ConfigError(
                f"`scorer: server` of the reward {reward.name!r} needs a vLLM server, and this run samples without "
                "one: set `use_vllm: true`, or leave `scorer` at `trainer`."
            )


def score_answers(trainer: GRPOTrainer, batch: RolloutBatch) -> None:
    """
    Fills in `answer_logprobs` of a batch's trajectories, except of those that failed. This is a collective call:
    every process brings the same number of rows, and makes the same number of forwards, whatever is in them.
    """
    for reward in trainer.turn_reward_funcs:
        if isinstance(reward, InformationGain):
            leaves = everywhere(lambda reward=reward: [_leaves(reward, one, trainer) for one in batch.trajectories])
            if reward.scorer == "server":
                found = everywhere(lambda leaves=leaves: _by_server(trainer, batch.trajectories, leaves))
            else:
                found = _by_trainer(trainer, leaves, batch.mode)
            for trajectory, of_leaves, values in zip(batch.trajectories, leaves, found, strict=True):
                of_turns = dict(zip(of_leaves.turns, values, strict=True))
                trajectory.answer_logprobs[reward.name] = [of_turns.get(turn.index) for turn in trajectory.turns]


def _leaves(reward: InformationGain, trajectory: Trajectory, trainer: GRPOTrainer) -> AnswerLeaves:
    if trajectory.failed or not trajectory.turns:
        return AnswerLeaves()
    runner = trainer.runner
    answer = reward.right_answer(trajectory.row[reward.column])
    ids = answer_ids(runner.renderer, reward.prefix, answer)
    # a server samples one token after what it scores
    return answer_leaves(trajectory, *ids, runner.engine.context_length - 1)


def _by_trainer(trainer: GRPOTrainer, leaves: list[AnswerLeaves], mode: str) -> list[list[float]]:
    args = trainer.args
    size = args.per_device_train_batch_size if mode == "train" else args.per_device_eval_batch_size
    trees = [each.tree for each in leaves]
    prove_forward(trainer, max(gather_object([longest(trees)])))
    found: list[list[float]] = []
    with without_dropout(trainer.model, True), trainer.accelerator.autocast():
        for start in range(0, len(trees), size):
            found += mean_logprobs(trainer.model, trees[start : start + size], args.forward, args.tree_attention)
    return found


def longest(trees: Sequence[TokenTree]) -> int:
    """Tokens of the longest path of any tree, at least 1."""
    return max([1, *(len(tree.path_of_turn(turn)) for tree in trees for turn in range(tree.num_turns))])


@torch.no_grad()
def mean_logprobs(
    model: nn.Module, trees: Sequence[TokenTree], forward: str = "tree", attention: str = "auto"
) -> list[list[float]]:
    """
    The mean log-prob per token of each turn's action, from one forward of `"tree"` or `"padded"`, also if there is
    nothing to score, so that ranks with different trees stay in step.

    Args:
        model (`nn.Module`): The model, as it is or wrapped for training; for `"tree"` after `enable_trees`.
        trees (`Sequence[TokenTree]`): Trees whose turns all have an action. What they share is computed once.
        forward (`str`, *optional*, defaults to `"tree"`), attention (`str`, *optional*, defaults to `"auto"`): As in
            `token_logps`.
    """
    given = len(trees)
    if not any(tree.nodes for tree in trees):
        trees = [*trees, _nothing()]
    if forward != "tree":
        return [[turn.mean().item() for turn in tree] for tree in token_logps(model, trees, forward=forward)[:given]]
    packed = pack(trees)
    logps = score_packed(model, packed, attention).logps.double().cpu().numpy()
    firsts = np.cumsum([0, *(tree.num_turns for tree in trees)])
    number = firsts[packed.tree] + packed.turn
    sums = np.bincount(number, logps, minlength=firsts[-1])
    means = (sums / np.bincount(number, minlength=firsts[-1]).clip(min=1)).tolist()
    return [means[firsts[index] : firsts[index + 1]] for index in range(given)]


def _nothing() -> TokenTree:
    """One token of context."""
    tree = TokenTree()
    tree.add_turn([0], [], [])
    return tree


def _by_server(trainer: GRPOTrainer, trajectories: list[Trajectory], leaves: list[AnswerLeaves]) -> Any:
    engine = trainer.runner.engine

    async def one(trajectory: Trajectory, of: AnswerLeaves) -> list[float]:
        try:
            asked = []
            for turn, answer in enumerate(of.tree.actions()):
                path = of.tree.path_of_turn(turn)
                asked.append(engine.logprobs(path[: len(path) - len(answer)], answer, trajectory.session))
            return [sum(values) / len(values) for values in await asyncio.gather(*asked)]
        finally:
            engine.release(trajectory.session)

    async def all_of_them() -> list[list[float]]:
        try:
            return list(await asyncio.gather(*map(one, trajectories, leaves)))
        finally:
            await engine.close()

    return run_here(all_of_them(), trainer.accelerator.device)
