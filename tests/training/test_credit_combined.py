"""Options of credit together: conversations that branch, are sampled again, and are scored by the trainer."""

from __future__ import annotations

from support.trainers import SEARCH, member

from mt_grpo.rewards import InformationGain, OutcomeReward
from mt_grpo.runlog import read_trajectories


def attempt(session):
    """How often the conversation was sampled before."""
    parts = session.split("-")
    return int(parts[3]) if len(parts) == 5 else 0


def conversation(session, turn):
    """In the second group every conversation ends at once, until it is sampled again. Branches search once more."""
    if member(session) >= 4 and not attempt(session):
        return "<answer>no</answer>"
    return [SEARCH, "<answer>Lima</answer>"][turn]


class Number(OutcomeReward):
    """Tells the members of a group apart, those of the second one once it is sampled again."""

    def score(self, trajectory, **row):
        number = member(trajectory.session)
        return 0.5 if number >= 4 and not attempt(trajectory.session) else float(number)


def test_branches_sampled_again_have_scores_of_their_own(build, tmp_path):
    trainer = build(
        conversation,
        rewards=((InformationGain(),), (Number(),)),
        advantage_estimator="branch_to_go",
        branch_at=1,
        num_branches=2,
        groups_without_signal="resample",
        per_device_train_batch_size=8,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._prepare_inputs([trainer.train_dataset[index // 4] for index in range(8)])
    trained = trainer.batch.trajectories
    assert [attempt(each.session) for each in trained] == [0] * 4 + [1] * 4
    assert [len(each.turns) for each in trained] == [2, 3] * 4
    assert [each.branch_of for each in trained[1::2]] == [each.session for each in trained[::2]]
    for each in trained:
        values = each.answer_logprobs["information_gain"]
        gains = [after - before for before, after in zip(values, values[1:], strict=False)]
        assert each.rewards["turn"]["information_gain"] == [*gains, None] and len(values) == len(each.turns)
    rewards = trainer.batch.rewards
    assert rewards.turn_rewards.isnan().tolist() == [[False, True, True], [False, False, True]] * 4
    assert inputs["kept"].all() and (rewards.num_branches, rewards.branch_at) == (2, 1)
    discarded = [line for line in read_trajectories(tmp_path) if line["mode"] == "discarded"]
    assert [(attempt(line["session"]), len(line["turns"])) for line in discarded] == [(0, 1)] * 4
