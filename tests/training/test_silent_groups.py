"""Groups that branch, and groups without signal: sampled again, or left out of what a loss is divided by."""

import json
from collections import Counter

import pytest
import torch
from support.mixtures import build_mixture
from support.models import CPU_RUN, lookup
from support.trainers import (
    LOSS_TYPES,
    SEARCH,
    Same,
    assert_near,
    attempt,
    batch,
    gradient,
    logged,
    member,
    same,
    trained_tokens,
    two_groups,
    weights,
)

from mt_grpo.credit import estimate
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.errors import ConfigError
from mt_grpo.options.rules import check_batches
from mt_grpo.rewards import InformationGain, OutcomeReward
from mt_grpo.rollout import EngineError
from mt_grpo.runlog import read_trajectories
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training.rollout_batch import RolloutBatch, share_out

TWO_GROUPS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "loss_type": "grpo"}
AGAIN = {"groups_without_signal": "resample", **TWO_GROUPS}
LEFT_OUT = {"groups_without_signal": "leave_out", **TWO_GROUPS}


class FirstDiffers(OutcomeReward):
    """Members of the first group earn different rewards, the others all the same: at first, or for ever."""

    def __init__(self, until=100):
        self.until = until
        self.scored = []

    def score(self, trajectory, **row):
        session = trajectory.session
        self.scored.append(session)
        return float(member(session)) if member(session) < 4 or attempt(session) >= self.until else 0.5


# Left out


def absent(batches, loss_type):
    """The batch without its left-out rows, as micro-batches whose losses are averaged."""
    rest = [
        {key: value[each["kept"]] if value.dim() else value for key, value in each.items() if key != "loss_factor"}
        for each in batches
        if each["kept"].any()
    ]
    if loss_type == "bnpo" or len(rest) == 1:
        return rest
    return [{key: torch.cat([each[key] for each in rest]) if value.dim() else value for key, value in rest[0].items()}]


@pytest.mark.slow
@pytest.mark.parametrize(("forward", "losses"), [("tree", LOSS_TYPES), ("padded", ["grpo", "bnpo", "dapo"])])
def test_a_group_that_is_left_out_might_as_well_be_absent(build, forward, losses):
    """With the tree a micro-batch is left empty, with TRL's forward the rows are mixed."""
    trainer = build(rewards=((), (FirstDiffers(),)), forward=forward, **LEFT_OUT)
    torch.manual_seed(0)
    batches = two_groups(trainer)
    assert sum(int(each["kept"].sum()) for each in batches) == 4
    assert [bool(each["kept"].any()) for each in batches].count(True) == (1 if forward == "tree" else 2)
    for loss_type in losses:
        trainer.loss_type = loss_type
        for each in batches:
            each.pop("loss_factor", None)
        share_out(batches, loss_type)
        found = []
        for parts in (batches, absent(batches, loss_type)):
            trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = len(parts)
            found.append(gradient(trainer, *parts))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
        assert found[0][1].any()


def test_a_batch_without_any_signal_changes_no_weight(build):
    trainer = build(rewards=((), (Same(),)), groups_without_signal="leave_out", max_steps=1)
    before = weights(trainer)
    trainer.train()
    assert same(before, weights(trainer))


@pytest.mark.parametrize("forward", ["tree", "padded"])
def test_experts_are_balanced_alike_whatever_is_left_out(build, tokenizer, forward):
    """The loss that balances them is a mean over micro-batches, and nothing is left out of it."""
    found = []
    for options in (TWO_GROUPS, LEFT_OUT):
        model = build_mixture("qwen3_moe", len(tokenizer))
        options = {"router_aux_loss_coef": 0.5, "forward": forward, **options}
        trainer = build(model=model, rewards=((), (Same(),)), **options)
        torch.manual_seed(0)
        found.append(gradient(trainer, *two_groups(trainer)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    assert found[0][1].any()


# Sampled again


def test_only_the_group_without_signal_is_sampled_again(build, tmp_path):
    reward, closed = FirstDiffers(until=2), []

    class Closing(MultiTurnToolEnv):
        async def close(self):
            closed.append(self.session)

    env = Closing([lookup], protocol="learnt_tags", max_steps=3)
    (trainer := build(rewards=((), (reward,)), env=env, max_steps=1, **AGAIN)).train()
    assert sorted(map(attempt, reward.scored)) == sorted(map(attempt, closed)) == [0] * 8 + [1] * 4 + [2] * 4
    assert {member(session) for session in reward.scored if attempt(session)} == {4, 5, 6, 7}
    assert len({session for session, *_ in trainer.runner.engine.requests}) == 16
    found = list(read_trajectories(tmp_path))
    earned = Counter((line["mode"], line["rewards"]["outcome"]["FirstDiffers"]) for line in found)
    # the last four were earned at the third attempt
    assert earned == {("discarded", 0.5): 8, **{("train", float(number)): 1 for number in range(8)}}
    assert len({line["session"] for line in found}) == 16
    names = ["credit/groups_without_signal", "credit/groups_sampled_again", "rewards/FirstDiffers/mean"]
    assert logged(trainer, *names) == [[0.0, 1.0, 3.5]]


def test_a_prompt_that_is_sampled_again_has_other_seeds():
    rows = [{"prompt": "Lima"}] * 2
    batches = [RolloutBatch("train", rows, [False] * 2, attempt=number) for number in range(3)]
    requests = [request for each in batches for request in each.requests(0, (5, 0), seed=1)]
    assert len({request.seed for request in requests}) == len({request.session for request in requests}) == 6


def test_rounds_of_sampling_again_end_and_the_rest_is_left_out(build):
    reward = FirstDiffers()
    batches = two_groups(build(rewards=((), (reward,)), max_resample_times=2, **AGAIN))
    assert len(reward.scored) == 8 + 2 * 4 and sum(int(each["kept"].sum()) for each in batches) == 4


def test_what_rewards_log_of_the_discarded_is_discarded(build):
    def session(completions, log_extra, **columns):
        log_extra("number", list(range(len(completions))))
        return [float(number) if number < 4 else 0.5 for number in range(len(completions))]

    two_groups(trainer := build(rewards=((), (session,)), **AGAIN))
    assert trainer.batch.discarded and list(trainer._logs["extra"]["number"]) == [0, 1, 2, 3] * 2


def test_neither_an_evaluation_nor_a_dead_engine_is_asked_again(build):
    reward = FirstDiffers()
    options = {"num_generations_eval": 2, "per_device_eval_batch_size": 16}  # more than a training batch
    trainer = build(rewards=((), (reward,)), groups_without_signal="resample", **options)
    metrics = trainer.evaluate()
    assert len(reward.scored) == len(trainer.eval_trajectories) == 2 * len(trainer.eval_dataset)
    assert metrics["eval_rewards/FirstDiffers/mean"] > 0 and metrics["eval_stop/answered"] == 1.0
    assert not any(map(attempt, reward.scored))
    two_groups(trainer := build(lambda session, turn: EngineError("gone"), **AGAIN))
    assert not trainer.batch.discarded


def test_conversations_before_a_failure_in_a_round_are_kept(build, tmp_path):
    class Fails(FirstDiffers):
        def score(self, trajectory, **row):
            if attempt(trajectory.session):
                raise ZeroDivisionError
            return super().score(trajectory, **row)

    with pytest.raises(Exception, match="ZeroDivisionError"):
        build(rewards=((), (Fails(),)), **AGAIN).train()
    found = Counter((line["mode"], bool(line["rewards"])) for line in read_trajectories(tmp_path))
    assert found == {("train", True): 8, ("discarded", False): 4}  # the round that failed was sampled, not scored


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(build, tmp_path):
    """Batches are used twice, and the checkpoint is in the middle of one."""

    def run(folder, steps, resume=None):
        options = {"output_dir": str(tmp_path / folder), "max_steps": steps, "lr_scheduler_type": "constant"}
        options |= {"num_iterations": 2, "save_strategy": "steps", "save_steps": 1, **AGAIN}
        (trainer := build(rewards=((), (FirstDiffers(until=2),)), **options)).train(resume)
        audited = (tmp_path / folder / "audit.jsonl").read_text().splitlines()
        assert steps == 1 or [json.loads(line)["step"] for line in audited] == [1]  # its batch is used again
        return weights(trainer)

    whole = run("whole", 2)
    run("cut", 1)
    torch.testing.assert_close(run("cut", 2, str(tmp_path / "cut" / "checkpoint-1")), whole)


# Conversations that branch

BRANCHES = {"advantage_estimator": "branch_to_go", "branch_at": 1, "num_branches": 2}
ANSWER, NO = "<answer>Lima</answer>", "<answer>no</answer>"


def branching(session, turn):
    """Members 0 and 1 branch after a search, 1 searches once more; 2 answers at once, so that 3 is a copy of it."""
    return {1: [SEARCH, "<answer>of Peru</answer>"], 2: [NO]}.get(member(session) % 4, [SEARCH, ANSWER])[turn]


def test_a_batch_of_branches_is_made_of_shared_turns(build):
    inputs = batch(trainer := build(branching, **BRANCHES))
    trajectories, rewards = trainer.batch.trajectories, trainer.batch.rewards
    texts = [[turn.text for turn in each.turns] for each in trajectories]
    assert texts == [[SEARCH, ANSWER], [SEARCH, SEARCH, "<answer>of Peru</answer>"], [NO], [NO]]
    zero, one, two, _ = trajectories
    assert [each.branch_of for each in trajectories] == [None, zero.session, None, two.session]
    assert len(trainer.runner.engine.requests) == 5
    assert (rewards.num_branches, rewards.branch_at) == (2, 1)
    advantages = estimate("branch_to_go", rewards, scale_rewards="group")
    torch.testing.assert_close(inputs["advantages"], advantages.gather(1, inputs["turn_ids"]))
    assert advantages[0, 0] == advantages[1, 0] != 0 and advantages[0, 1] == -advantages[1, 1] != 0
    assert trained_tokens(inputs)[1].sum() == sum(turn.num_tokens for turn in one.turns)


def test_branches_learn_what_a_forward_a_turn_learns(build):
    assert_near(*(gradient(build(branching, forward=way, **BRANCHES))[1] for way in ("tree", "turn_by_turn")))


def test_an_evaluation_does_not_branch(build):
    (trainer := build(lambda session, turn: [SEARCH, ANSWER][turn], **BRANCHES)).evaluate()
    assert len(trainer.eval_trajectories) == 32 and len(trainer.runner.engine.requests) == 2 * 32
    assert all(each.branch_of is None for each in [*trainer.eval_trajectories, *trainer.rollout(2)])


class Changed(MultiTurnToolEnv):
    """Has no word on whether it can be forked."""


def test_what_cannot_branch_is_refused_at_the_start(build, tmp_path):
    options = vars(MTGRPOConfig(str(tmp_path), **CPU_RUN, **BRANCHES)) | {"generation_batch_size": 4}
    check_batches(options | {"per_device_train_batch_size": 2}, 2)  # a conversation branches on one process
    with pytest.raises(ConfigError, match="`num_branches: 2` does not divide the 1 conversations that a process"):
        check_batches(options | {"per_device_train_batch_size": 1}, 4)
    with pytest.raises(ConfigError, match="Changed has no `fork` of its own: define it, see `StepEnv.fork`"):
        build(env=Changed([lookup]), **BRANCHES)


def test_branches_sampled_again_have_scores_of_their_own(build, tmp_path):
    """In the second group every conversation ends at once, until it is sampled again. Branches search once more."""

    def script(session, turn):
        return NO if member(session) >= 4 and not attempt(session) else [SEARCH, ANSWER][turn]

    options = {"groups_without_signal": "resample", "per_device_train_batch_size": 8}
    trainer = build(script, rewards=((InformationGain(),), (FirstDiffers(until=1),)), **BRANCHES, **options)
    (inputs,) = two_groups(trainer)
    trained = trainer.batch.trajectories
    assert [(attempt(each.session), len(each.turns)) for each in trained] == [(0, 2), (0, 3)] * 2 + [
        (1, 2),
        (1, 3),
    ] * 2
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
