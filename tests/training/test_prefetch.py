"""Rollouts and training at the same time: `max_staleness`."""

import asyncio
import threading
from collections import defaultdict

import pytest
import torch
from support.models import CPU_RUN
from support.trainers import LETTERS, Spelling, at, conversation, logged, same, weights
from support.waiting import until

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rollout import ScriptedEngine
from mt_grpo.runlog import open_run
from mt_grpo.token_tree import TokenTree
from mt_grpo.training import ConfigError, MTGRPOConfig, token_logps
from mt_grpo.training.prefetch import effective_sample_size

SAVES = {"save_strategy": "steps", "save_steps": 1}


def tokens_of(folder):
    trained = [each for each in open_run(folder).trajectories() if each["session"].startswith("train")]
    return {each["session"]: [node["tokens"] for node in each["tree"]["nodes"]] for each in trained}


@pytest.fixture
def sampled(tmp_path, build, questions):
    """Trains with conversations that the model samples itself."""

    def train(name, resume=None, **options):
        given = {"env": Spelling(protocol="learnt_tags", max_steps=2), "eval_dataset": questions.select(range(2))}
        given |= {"max_completion_length": 200, "learning_rate": 1e-6, "output_dir": str(tmp_path / name)}
        (trainer := build(None, rewards=LETTERS, **{**given, **options})).train(resume)
        return trainer

    return train


def interrupts(**kwargs):
    raise KeyboardInterrupt


def test_without_learning_staleness_changes_no_conversation(sampled, tmp_path):
    found = []
    for staleness in (0, 1, 4):
        trainer = sampled(str(staleness), max_staleness=staleness, learning_rate=0.0, max_steps=6)
        found.append(tokens_of(tmp_path / str(staleness)))
        assert len(found[-1]) == 24 and found[-1] == found[0]
        lags = [lag for (lag,) in logged(trainer, "staleness/max")]
        assert lags[:3] == {0: [], 1: [0.0, 1.0, 1.0], 4: [0.0, 1.0, 2.0]}[staleness]
        assert max(lags, default=0) <= staleness


class Gate(ScriptedEngine):
    """Answers the conversations of a batch only once they may; tells which batches have been asked for."""

    def __init__(self, tokenizer, may=lambda step: True, never=()):
        super().__init__(tokenizer, conversation)
        self.asked, self._may, self._never = [], may, never

    async def generate(self, context, sampling, session):
        step = int(session.split("-")[1])
        if session.startswith("train") and step not in self.asked:
            self.asked.append(step)
        while session.startswith("train") and not self._may(step) or session in self._never:
            await asyncio.sleep(0.001)
        return await super().generate(context, sampling, session)


@pytest.fixture
def gated(build, tokenizer):
    def make(may=lambda step: True, never=(), **options):
        env = MultiTurnToolEnv([], protocol="learnt_tags", max_steps=3)
        return build(env=env, engine=Gate(tokenizer, may, never), **{"max_steps": 4, **options})

    return make


@pytest.mark.parametrize(("staleness", "asked"), [(0, [0]), (1, [0, 1]), (2, [0, 1, 2]), (8, [0, 1, 2, 3])])
def test_a_batch_begins_so_many_batches_early(gated, staleness, asked):
    """While the first step is taken, that many later batches have begun; none past the last step."""
    seen, trainer = [], gated(max_staleness=staleness)
    engine = trainer.runner.engine

    def look(**kwargs):
        until(lambda: len(engine.asked) >= len(asked), seen=lambda: engine.asked)
        seen.append(list(engine.asked))

    trainer.add_callback(at("on_pre_optimizer_step", look, step=0))
    before = {thread.name for thread in threading.enumerate()}
    trainer.train()
    assert seen == [asked] and engine.asked == [0, 1, 2, 3] and not trainer.runner.under_way
    assert staleness or {thread.name for thread in threading.enumerate()} <= before | {"mt-grpo-background"}


def test_an_evaluation_leaves_batches_in_flight_alone(gated, tmp_path):
    """Batch 1 is under way while the evaluation after step 1 is made, and ends after it."""
    may = threading.Event()
    trainer = gated(lambda step: step < 2 or may.is_set(), max_staleness=1)

    def under_way(**kwargs):
        assert sorted(trainer.runner.under_way) == [f"train-000002-000000-{row:06d}" for row in range(4)]
        may.set()

    evaluates = at("on_step_end", lambda control, **kwargs: setattr(control, "should_evaluate", True), step=2)
    for callback in (evaluates, at("on_evaluate", under_way)):
        trainer.add_callback(callback)
    trainer.train()
    assert trainer.state.global_step == 4 and trainer.eval_trajectories and len(tokens_of(tmp_path)) == 16


def test_a_run_that_stops_ends_what_is_under_way(gated):
    trainer = gated(lambda step: step == 0, max_staleness=2)
    stops = lambda control, **kwargs: setattr(control, "should_training_stop", True)  # noqa: E731
    trainer.add_callback(at("on_step_end", stops, step=1))
    trainer.train()
    assert trainer.state.global_step == 1 and not trainer.runner.under_way


def test_an_epoch_that_stops_early_leaves_no_batch_of_its_rows(gated, questions, tmp_path):
    """The next epoch has other rows, with which the batches that were begun ahead begin anew."""
    ends = lambda control, **kwargs: setattr(control, "should_epoch_stop", True)  # noqa: E731
    for staleness in (0, 2):
        folder, rows = str(tmp_path / str(staleness)), questions.select(range(3))
        trainer = gated(max_staleness=staleness, output_dir=folder, train_dataset=rows)
        trainer.add_callback(at("on_step_end", ends, step=1))
        trainer.train()
        assert trainer.state.global_step == 4
    assert tokens_of(tmp_path / "2") == tokens_of(tmp_path / "0")


def test_an_interrupted_run_keeps_what_is_finished(gated, tmp_path):
    """Conversations of a waiting batch that are finished are not sampled again; the others are."""
    late = {f"train-000001-000000-00000{row}" for row in (1, 3)}

    def run(folder, never=()):
        return gated(never=never, max_steps=3, max_staleness=1, output_dir=str(tmp_path / folder), **SAVES)

    def waits(**kwargs):
        until(lambda: len(cut.runner.under_way) == 2, seen=lambda: cut.runner.under_way)  # the others are finished

    (whole := run("whole")).train()
    cut = run("cut", late)
    for callback in (at("on_optimizer_step", waits), at("on_save", interrupts)):
        cut.add_callback(callback)
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    (resumed := run("cut")).train(str(tmp_path / "cut" / "checkpoint-1"))
    again = {session for session, _, _ in resumed.runner.engine.requests if session.startswith("train-000001")}
    assert again == late and tokens_of(tmp_path / "cut") == tokens_of(tmp_path / "whole")
    assert same(weights(whole), weights(resumed))


# Steps that few effective conversations make smaller


NAN = float("nan")


@pytest.mark.parametrize(
    ("differences", "trained", "size"),
    [
        ([[0.5, -0.5], [0.0, 0.0]], [[1, 1], [1, 1]], 1.0),
        ([[30.0, 30.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [[1, 1]] * 4, 0.25),
        # a token of the environment, and a conversation that is left out
        ([[0.0, NAN], [0.0, 1.0], [9.0, 9.0]], [[1, 1], [1, 0], [0, 0]], 1.0),
        ([[1.0, 1.0]], [[0, 0]], NAN),
    ],
)
def test_the_effective_sample_size_is_of_whole_conversations(differences, trained, size):
    old, mask = torch.tensor(differences), torch.tensor(trained)
    masks = {"completion_mask": mask.any(dim=1, keepdim=True).expand_as(mask).long(), "tool_mask": mask}
    output = {"old_per_token_logps": old, "sampling_per_token_logps": torch.zeros_like(old), **masks}
    assert effective_sample_size(output) == pytest.approx(size, nan_ok=True)


@pytest.fixture
def shares(monkeypatch):
    """Effective sample sizes of the next batches, the last of which is that of all others."""
    given = [0.1]
    monkeypatch.setattr(
        "mt_grpo.training.trainer.effective_sample_size", lambda output: given.pop(0) if given[1:] else given[0]
    )
    return given


def rates_into(rates):
    keep = lambda optimizer, **kwargs: rates.append(optimizer.param_groups[0]["lr"])  # noqa: E731
    return {"callbacks": [at("on_pre_optimizer_step", keep)]}


def test_few_effective_conversations_make_steps_smaller(sampled, shares, caplog):
    """Of Adam's step, not of the gradient; the schedule goes on as it was."""
    shares[:], rates = [1.0, 0.1, 0.5], []
    trainer = sampled("small", **rates_into(rates), max_staleness=1, max_steps=3, learning_rate=0.3)
    assert rates == pytest.approx([0.3, 0.1 * 0.2, 0.1])
    assert [rate for (rate,) in logged(trainer, "learning_rate")] == pytest.approx([0.3, 0.2, 0.1])
    assert "Effective sample size is only 10 % of the batch" in caplog.text


def test_a_resumed_batch_keeps_its_smaller_steps(sampled, tmp_path, shares):
    """A batch is trained for two steps, and the run is resumed between them."""
    rates = []
    options = {"max_staleness": 1, "num_iterations": 2, "learning_rate": 0.1, **rates_into(rates)}
    whole = sampled("cut", **SAVES, **options)
    resumed = sampled("cut", str(tmp_path / "cut" / "checkpoint-1"), **options)
    assert rates == pytest.approx([0.01, 0.005, 0.005]) and same(weights(whole), weights(resumed))


def test_a_step_that_is_cut_short_saves_the_whole_learning_rate(build, shares):
    """Its batch makes it smaller once more when it begins again."""
    options = {"max_turn_length": 8, "gradient_accumulation_steps": 2, "learning_rate": 0.1, "max_staleness": 1}
    trainer = build(None, rewards=LETTERS, callbacks=[at("on_substep_end", interrupts)], **options)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    groups = torch.load(trainer.save_checkpoint() / "optimizer.pt")["param_groups"]
    assert {group["lr"] for group in groups} == {0.1}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("sequence_mask", 3.0)),
        ({"max_staleness": 1}, ("token_truncate", 2.0)),
        ({"max_staleness": 1, "vllm_importance_sampling_clip_max": 1.5}, ("token_truncate", 1.5)),
        ({"max_staleness": 1, "vllm_importance_sampling_mode": "token_mask"}, ("token_mask", 3.0)),
    ],
)
def test_the_correction_is_by_token_where_none_is_chosen(tmp_path, options, expected):
    args = MTGRPOConfig(str(tmp_path), **{**CPU_RUN, **options})
    assert (args.vllm_importance_sampling_mode, args.vllm_importance_sampling_clip_max) == expected


def test_an_engine_of_the_trained_model_is_refused(build, tokenizer):
    class Own(ScriptedEngine):
        def use_model(self, model):
            pass

    with pytest.raises(ConfigError, match="Own samples from the model that is trained"):
        build(engine=Own(tokenizer, conversation), max_staleness=1)


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0), (2, 1), (1, 2)])
def test_staleness_may_change_on_resume(sampled, tmp_path, before, after):
    """In the middle of a batch too, whose log-probs of the sampler are there or not; its smaller steps are not."""
    options = {"num_iterations": 2, "max_steps": 4}
    sampled("run", max_staleness=before, **SAVES, **options)
    resumed = sampled("run", str(tmp_path / "run" / "checkpoint-1"), max_staleness=after, **options)
    assert resumed.state.global_step == 4
    assert all(lag <= after for (lag,) in logged(resumed, "staleness/max")[2 if before <= after else 1 :])


def test_sampling_while_training_reads_no_weight_that_is_trained(sampled):
    """Every token has the log-prob of the weights that its turn is stamped with, whatever was trained since."""
    versions, lags = {}, defaultdict(list)

    def keep(state, model, **kwargs):
        versions[state.global_step] = {name: value.clone() for name, value in model.state_dict().items()}

    options = {"max_staleness": 2, "max_steps": 4, "learning_rate": 1e-2}
    trainer = sampled("moving", callbacks=[at("on_step_begin", keep)], **options)
    for each in open_run(trainer.args.output_dir).trajectories():
        tree, step = TokenTree.from_dict(each["tree"]), int(each["session"].split("-")[1])
        for turn in each["turns"]:
            trainer.model.load_state_dict(versions[turn["weight_version"]])
            (logps,) = token_logps(trainer.model, [tree])
            (expected, *_) = [node["logprobs"] for node in each["tree"]["nodes"] if node["turn"] == turn["index"]]
            torch.testing.assert_close(logps[turn["index"]].float(), torch.tensor(expected), rtol=0, atol=1e-4)
            assert turn["last_weight_version"] == turn["weight_version"] <= step
            lags[step] += [step - turn["weight_version"]] * len(expected)
    assert max(map(max, lags.values())) == 2
    means = [sum(of_step) / len(of_step) for _, of_step in sorted(lags.items())]
    assert [mean for (mean,) in logged(trainer, "staleness/mean")] == pytest.approx(means)


@pytest.mark.slow
def test_the_best_model_is_evaluated_with_its_own_weights(build):
    """The copy that samples had those of the last step, which were evaluated before the best ones were loaded."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, **SAVES}
    options |= {"metric_for_best_model": "eval_completions/clipped_ratio", "max_staleness": 1, "max_turn_length": 12}
    (trainer := build(None, rewards=LETTERS, **options)).train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert trainer.evaluate()["eval_sampling/sampling_logp_difference/max"] < 1e-4
