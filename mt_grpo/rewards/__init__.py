"""Rewards: classes to subclass, built-in rewards, and the functions that run them."""

from mt_grpo.rewards.base import FunctionReward, OutcomeReward, RewardFunc, StateScore, TurnReward, completion_ids
from mt_grpo.rewards.environment import EnvReward, env_reward, reasoning_gym_reward, step_reward
from mt_grpo.rewards.gain import AnswerLogprob, InformationGain, RightAnswer, answer_logprob, information_gain
from mt_grpo.rewards.gsm8k import gsm8k_correct_reward_func, gsm8k_number_reward_func
from mt_grpo.rewards.registry import REWARDS, RewardListError, load_rewards, reward
from mt_grpo.rewards.scoring import RewardError, Scores, cut_after, score_cut, score_trajectories, spread
from mt_grpo.rewards.triviaqa import (
    exact_match_reward_func,
    exist_answer_in_search_results,
    exist_answer_reward_func,
    format_reward_func,
    tool_execution_reward_func,
    xml_reward_func,
)

__all__ = [
    "AnswerLogprob",
    "EnvReward",
    "FunctionReward",
    "InformationGain",
    "OutcomeReward",
    "REWARDS",
    "RewardError",
    "RewardFunc",
    "RewardListError",
    "RightAnswer",
    "Scores",
    "StateScore",
    "TurnReward",
    "answer_logprob",
    "completion_ids",
    "cut_after",
    "env_reward",
    "exact_match_reward_func",
    "exist_answer_in_search_results",
    "exist_answer_reward_func",
    "format_reward_func",
    "gsm8k_correct_reward_func",
    "gsm8k_number_reward_func",
    "information_gain",
    "load_rewards",
    "reasoning_gym_reward",
    "reward",
    "score_cut",
    "score_trajectories",
    "spread",
    "step_reward",
    "tool_execution_reward_func",
    "xml_reward_func",
]
