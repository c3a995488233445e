"""Whole conversations without training, for callers that wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mt_grpo.concurrency import run
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rollout.engine import Engine, SamplingParams
from mt_grpo.rollout.runner import RolloutRequest, RolloutRunner
from mt_grpo.rollout.sampler import RolloutLimits, derive_seed
from mt_grpo.trajectory import Message


def generate(
    env: MultiTurnToolEnv,
    prompts: Sequence[str | list[Message]],
    engine: Engine,
    sampling: SamplingParams | None = None,
) -> dict[str, list[Any]]:
    """Runs one conversation per prompt and waits for all; see `MultiTurnToolEnv.generate`."""
    sampling = sampling or SamplingParams()
    runner = RolloutRunner(env, engine, RolloutLimits(max_turn_tokens=sampling.max_tokens))
    requests = [
        RolloutRequest(prompt, session=f"{index:06d}", seed=derive_seed(sampling.seed, index))
        for index, prompt in enumerate(prompts)
    ]
    trajectories = run(runner.run(requests, sampling))
    rows = [runner.completion(trajectory) for trajectory in trajectories]
    return {
        "ids": [row.ids for row in rows],
        "mask": [row.mask for row in rows],
        "messages": [trajectory.completion for trajectory in trajectories],
    }
