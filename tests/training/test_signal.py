"""Groups without signal: sampled again, left out of what a loss is divided by, and spoken of."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from support.mixtures import build_mixture
from support.models import CPU_RUN, build_model, lookup
from support.trainers import LOSS_TYPES, conversation, member

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rewards import OutcomeReward
from mt_grpo.rollout import EngineError, ScriptedEngine
from mt_grpo.runlog import read_trajectories
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.training.rollout_batch import RolloutBatch, share_out

TWO_GROUPS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


def attempt(session):
    """How often the conversation was sampled before."""
    parts = session.split("-")
    return int(parts[3]) if len(parts) == 5 else 0


class FirstDiffers(OutcomeReward):
    """Members of the first group earn different rewards, the others all the same: at first, or for ever."""

    def __init__(self, until=100):
        self.until = until
        self.scored = []

    def score(self, trajectory, **row):
        session = trajectory.session
        self.scored.append(session)
        return float(member(session)) if member(session) < 4 or attempt(session) >= self.until else 0.5


def sampled(trainer):
    """Fills the buffer of a trainer with a batch of two groups, and returns its micro-batches."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    rows = [trainer.train_dataset[index // 4] for index in range(8)]
    trainer._prepare_inputs(rows)
    return trainer._buffered_inputs


def loss_and_gradient(trainer, batches):
    trainer.model.zero_grad()
    total = sum(trainer.compute_loss(trainer.model, batch) for batch in batches)
    total.backward()
    return total.detach(), torch.cat([each.grad.flatten() for each in trainer.model.parameters()])


def cut(batch):
    """A micro-batch without the rows that were left out."""
    kept = batch["kept"]
    return {key: value[kept] if value.dim() else value for key, value in batch.items() if key != "loss_factor"}


def absent(batches, loss_type):
    """The batch without its left-out rows, as micro-batches whose losses are averaged."""
    rest = [cut(batch) for batch in batches if batch["kept"].any()]
    if loss_type == "bnpo" or len(rest) == 1:
        return rest
    keys = [key for key, value in rest[0].items() if value.dim()]
    return [{**rest[0], **{key: torch.cat([batch[key] for batch in rest]) for key in keys}}]


@pytest.mark.slow
@pytest.mark.parametrize(("forward", "losses"), [("tree", LOSS_TYPES), ("padded", ["grpo", "bnpo", "dapo"])])
def test_a_group_that_is_left_out_might_as_well_be_absent(build, forward, losses):
    """With the tree a micro-batch is left empty, with TRL's forward the rows are mixed."""
    trainer = build(rewards=((), (FirstDiffers(),)), groups_without_signal="leave_out", forward=forward, **TWO_GROUPS)
    torch.manual_seed(0)
    batches = sampled(trainer)
    assert sum(int(batch["kept"].sum()) for batch in batches) == 4
    assert [bool(batch["kept"].any()) for batch in batches].count(True) == (1 if forward == "tree" else 2)
    for loss_type in losses:
        trainer.loss_type = loss_type
        for batch in batches:
            batch.pop("loss_factor", None)
        share_out(batches, loss_type)
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 2
        loss, gradient = loss_and_gradient(trainer, batches)
        rest = absent(batches, loss_type)
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = len(rest)
        wanted, wanted_gradient = loss_and_gradient(trainer, rest)
        torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-4, atol=1e-6)
        assert gradient.any()


def test_a_group_that_is_kept_counts_in_the_normaliser(build):
    kept, left_out = (
        build(rewards=((), (FirstDiffers(),)), groups_without_signal=choice, loss_type="grpo", **TWO_GROUPS)
        for choice in ("keep", "leave_out")
    )
    plain, louder = (loss_and_gradient(trainer, sampled(trainer))[1] for trainer in (kept, left_out))
    torch.testing.assert_close(louder, 2 * plain, rtol=1e-4, atol=1e-6)


def test_a_batch_without_any_signal_changes_no_weight(build):
    class Same(OutcomeReward):
        def score(self, trajectory, **row):
            return 0.5

    trainer = build(rewards=((), (Same(),)), groups_without_signal="leave_out", max_steps=1)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize("forward", ["tree", "padded"])
def test_experts_are_balanced_alike_whatever_is_left_out(build, tokenizer, forward):
    """The loss that balances them is a mean over micro-batches, and nothing is left out of it."""

    class Same(OutcomeReward):
        def score(self, trajectory, **row):
            return 0.5

    gradients = []
    for choice in ("keep", "leave_out"):
        options = {"groups_without_signal": choice, "router_aux_loss_coef": 0.5, "forward": forward, **TWO_GROUPS}
        trainer = build(
            model=build_mixture("qwen3_moe", len(tokenizer)), rewards=((), (Same(),)), loss_type="grpo", **options
        )
        torch.manual_seed(0)
        gradients.append(loss_and_gradient(trainer, sampled(trainer)))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)
    assert gradients[0][1].any()


def earned(line):
    return line["rewards"]["outcome"]["FirstDiffers"]


def records(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_only_the_group_without_signal_is_sampled_again(build, tmp_path):
    reward = FirstDiffers(until=2)
    trainer = build(rewards=((), (reward,)), groups_without_signal="resample", max_steps=1, **TWO_GROUPS)
    trainer.train()
    assert sorted(map(attempt, reward.scored)) == [0] * 8 + [1] * 4 + [2] * 4
    assert {member(session) for session in reward.scored if attempt(session)} == {4, 5, 6, 7}
    assert len({session for session, *_ in trainer.runner.engine.requests}) == 16
    lines = list(read_trajectories(tmp_path))
    of = {mode: [earned(line) for line in lines if line["mode"] == mode] for mode in ("train", "discarded")}
    assert sorted(of["train"]) == [0, 1, 2, 3, 4, 5, 6, 7]  # the last four were earned at the third attempt
    assert of["discarded"] == [0.5] * 8 and len({line["session"] for line in lines}) == 16
    (logged,) = [line for line in records(tmp_path, "metrics.jsonl") if "loss" in line]
    assert logged["credit/groups_without_signal"] == 0.0 and logged["credit/groups_sampled_again"] == 1.0
    assert logged["rewards/FirstDiffers/mean"] == 3.5


def test_a_prompt_that_is_sampled_again_has_other_seeds():
    rows = [{"prompt": "Lima"}] * 2
    requests = [
        request
        for attempt in range(3)
        for request in RolloutBatch("train", rows, [False] * 2, attempt=attempt).requests(0, (5, 0), seed=1)
    ]
    assert len({request.seed for request in requests}) == len({request.session for request in requests}) == 6


def test_rounds_of_sampling_again_end_and_the_rest_is_left_out(build, tmp_path):
    reward = FirstDiffers()
    trainer = build(rewards=((), (reward,)), groups_without_signal="resample", max_resample_times=2, **TWO_GROUPS)
    batches = sampled(trainer)
    assert len(reward.scored) == 8 + 2 * 4
    assert sum(int(batch["kept"].sum()) for batch in batches) == 4


def test_what_rewards_log_of_the_discarded_is_discarded(build):
    def session(completions, trainer_state, log_extra, log_metric, **columns):
        log_extra("number", list(range(len(completions))))
        return [float(number) if number < 4 else 0.5 for number in range(len(completions))]

    trainer = build(rewards=((), (session,)), groups_without_signal="resample", **TWO_GROUPS)
    sampled(trainer)
    assert trainer.batch.discarded and list(trainer._logs["extra"]["number"]) == [0, 1, 2, 3] * 2


def test_an_evaluation_samples_nothing_again(build):
    reward = FirstDiffers()
    build(rewards=((), (reward,)), groups_without_signal="resample", num_generations_eval=2).evaluate()
    assert not any(map(attempt, reward.scored))


def test_a_dead_engine_is_not_asked_again(build):
    trainer = build(lambda session, turn: EngineError("gone"), groups_without_signal="resample", **TWO_GROUPS)
    sampled(trainer)
    assert not trainer.batch.discarded


def test_conversations_before_a_failure_in_a_round_are_kept(build, tmp_path):
    class Fails(FirstDiffers):
        def score(self, trajectory, **row):
            if attempt(trajectory.session):
                raise ZeroDivisionError
            return super().score(trajectory, **row)

    trainer = build(rewards=((), (Fails(),)), groups_without_signal="resample", **TWO_GROUPS)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        trainer.train()
    lines = list(read_trajectories(tmp_path))
    # the round that failed was sampled, and is not scored
    assert Counter((line["mode"], bool(line["rewards"])) for line in lines) == {
        ("train", True): 8,
        ("discarded", False): 4,
    }


def test_environments_of_discarded_conversations_are_closed(tmp_path, tokenizer, questions):
    closed = []

    class Closing(MultiTurnToolEnv):
        async def close(self):
            closed.append(self.session)

    trainer = MTGRPOEnvTrainer(
        build_model(tokenizer),
        Closing([lookup], protocol="learnt_tags", max_steps=3),
        [],
        [FirstDiffers(until=1)],
        MTGRPOConfig(
            str(tmp_path), max_completion_length=400, groups_without_signal="resample", **{**CPU_RUN, **TWO_GROUPS}
        ),
        train_dataset=questions,
        engine=ScriptedEngine(tokenizer, conversation),
        processing_class=tokenizer,
    )
    sampled(trainer)
    assert sorted(map(attempt, closed)) == [0] * 8 + [1] * 4


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(build, tmp_path):
    """Batches are used twice, and the checkpoint is in the middle of one."""

    def run(folder, steps, **more):
        again = {"groups_without_signal": "resample", "save_strategy": "steps", "save_steps": 1}
        reward = FirstDiffers(until=2)
        trainer = build(
            rewards=((), (reward,)),
            output_dir=str(tmp_path / folder),
            max_steps=steps,
            lr_scheduler_type="constant",
            num_iterations=2,
            **{**TWO_GROUPS, **again},
        )
        trainer.train(**more)
        weights = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
        return weights, [line["step"] for line in records(tmp_path / folder, "audit.jsonl")]

    whole, steps = run("whole", 2)
    assert steps == [1]  # then its batch is used again
    run("cut", 1)
    resumed, steps = run("cut", 2, resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-1"))
    torch.testing.assert_close(resumed, whole)
    assert steps == [1]
