"""Training on conversations that branch: what is sampled, what is learnt, and what cannot branch."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from support.models import CPU_RUN, build_model, lookup
from support.trainers import SEARCH, Answered, Calls, batch, member

from mt_grpo.credit import estimate
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.errors import ConfigError
from mt_grpo.options.rules import check_batches
from mt_grpo.rollout import ScriptedEngine
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer

BRANCHES = {"advantage_estimator": "branch_to_go", "branch_at": 1, "num_branches": 2}


def conversation(session, turn):
    """Members 0 and 1 branch after a search, 1 searches once more; 2 answers at once, so that 3 is a copy of it."""
    script = {
        0: [SEARCH, "<answer>Lima</answer>"],
        1: [SEARCH, "<answer>of Peru</answer>"],
        2: ["<answer>no</answer>"],
    }
    return script[member(session) % 4][turn]


def test_a_batch_of_branches_is_made_of_shared_turns(build):
    trainer = build(conversation, **BRANCHES)
    inputs = batch(trainer)
    zero, one, two, three = trainer.batch.trajectories
    texts = [[turn.text for turn in each.turns] for each in trainer.batch.trajectories]
    assert texts[0] == [SEARCH, "<answer>Lima</answer>"]
    assert texts[1] == [SEARCH, SEARCH, "<answer>of Peru</answer>"]
    assert texts[2] == texts[3] == ["<answer>no</answer>"]
    assert [each.branch_of for each in (zero, one, two, three)] == [None, zero.session, None, two.session]
    assert len(trainer.runner.engine.requests) == 5
    rewards = trainer.batch.rewards
    assert (rewards.num_branches, rewards.branch_at) == (2, 1)
    advantages = estimate("branch_to_go", rewards, scale_rewards="group")
    torch.testing.assert_close(inputs["advantages"], advantages.gather(1, inputs["turn_ids"]))
    assert advantages[0, 0] == advantages[1, 0] != 0 and advantages[0, 1] == -advantages[1, 1] != 0
    assert (inputs["tool_mask"] * inputs["completion_mask"])[1].sum() == sum(turn.num_tokens for turn in one.turns)


@pytest.mark.slow
def test_branches_learn_what_a_forward_a_turn_learns(build):
    learnt = []
    for forward in ("tree", "turn_by_turn"):
        trainer = build(conversation, forward=forward, max_steps=1, optim="sgd", **BRANCHES)
        trainer.train()
        learnt.append(torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]))
    start = torch.cat([parameter.detach().flatten() for parameter in build().model.parameters()])
    assert (learnt[0] - start).abs().max() > 1e-4
    torch.testing.assert_close(learnt[0], learnt[1], rtol=0, atol=2e-6)


def test_an_evaluation_does_not_branch(build):
    trainer = build(lambda session, turn: [SEARCH, "<answer>Lima</answer>"][turn], **BRANCHES)
    trainer.evaluate()
    assert len(trainer.eval_trajectories) == 32
    assert all(each.branch_of is None for each in trainer.eval_trajectories)
    assert len(trainer.runner.engine.requests) == 2 * 32
    assert all(each.branch_of is None for each in trainer.rollout(2))


def test_a_conversation_branches_on_one_process(tmp_path):
    options = vars(MTGRPOConfig(str(tmp_path), **CPU_RUN, **BRANCHES)) | {"generation_batch_size": 4}
    check_batches(options | {"per_device_train_batch_size": 2}, 2)
    with pytest.raises(ConfigError, match="`num_branches: 2` does not divide the 1 conversations that a process"):
        check_batches(options | {"per_device_train_batch_size": 1}, 4)


class Changed(MultiTurnToolEnv):
    """Has no word on whether it can be forked."""


def test_an_environment_without_a_fork_is_refused_at_the_start(tmp_path, tokenizer, questions: Dataset):
    options = {"args": MTGRPOConfig(str(tmp_path), **CPU_RUN, **BRANCHES), "train_dataset": questions}
    with pytest.raises(ConfigError, match="Changed has no `fork` of its own: define it, see `StepEnv.fork`"):
        MTGRPOEnvTrainer(
            build_model(tokenizer),
            Changed([lookup]),
            [Calls()],
            [Answered()],
            engine=ScriptedEngine(tokenizer, conversation),
            processing_class=tokenizer,
            **options,
        )
