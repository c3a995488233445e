"""Rollouts and training at the same time: `max_staleness`."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from datasets import concatenate_datasets
from support.models import CPU_RUN, lookup
from support.trainers import SEARCH, Letters, Spelling, conversation, logged, same, weights
from transformers import TrainerCallback

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rollout import Sample, ScriptedEngine
from mt_grpo.runlog import open_run
from mt_grpo.token_tree import TokenTree
from mt_grpo.training import ConfigError, MTGRPOConfig, token_logps
from mt_grpo.training.prefetch import effective_sample_size

SAVES = {"save_strategy": "steps", "save_steps": 1}


def tokens_of(folder):
    """The tokens of each conversation of training, by its name."""
    found = {each["session"]: each["tree"]["nodes"] for each in open_run(folder).trajectories()}
    return {
        session: [node["tokens"] for node in nodes] for session, nodes in found.items() if session.startswith("train")
    }


@pytest.fixture
def sampled(tmp_path, build, questions):
    """Trains with conversations that the model samples itself. Returns the trainer and its conversations' tokens."""

    def train(name, resume=None, **options):
        given = {"env": Spelling(protocol="learnt_tags", max_steps=2), "eval_dataset": questions.select(range(2))}
        options = {"max_completion_length": 200, "learning_rate": 1e-6, **given, **options}
        trainer = build(None, rewards=((), (Letters(),)), output_dir=str(tmp_path / name), **options)
        trainer.train(resume)
        return trainer, tokens_of(tmp_path / name)

    return train


def at(event, action, step=None):
    """A callback that acts at an event, once it comes with so many steps taken."""
    callback = TrainerCallback()

    def act(args, state, control, **kwargs):
        if step in (None, state.global_step):
            action(control=control, state=state, **kwargs)

    setattr(callback, event, act)
    return callback


def test_without_learning_staleness_changes_no_conversation(sampled):
    options = {"learning_rate": 0.0, "max_steps": 6}
    trainer, expected = sampled("0", **options)
    assert len(expected) == 24 and not logged(trainer, "staleness/mean")
    for staleness in (1, 2, 4):
        trainer, found = sampled(str(staleness), max_staleness=staleness, **options)
        assert found == expected
        lags = [lag for (lag,) in logged(trainer, "staleness/max")]
        assert lags[:3] == [0.0, 1.0, min(2.0, staleness)] and max(lags) <= staleness


class Gate(ScriptedEngine):
    """Answers the conversations of a batch only once they may; tells which batches have been asked for."""

    def __init__(self, tokenizer, may=lambda step: True):
        super().__init__(tokenizer, conversation)
        self.asked, self._may = [], may

    async def generate(self, context, sampling, session):
        step = int(session.split("-")[1])
        if session.startswith("train") and step not in self.asked:
            self.asked.append(step)
        while session.startswith("train") and not self._may(step):
            await asyncio.sleep(0.001)
        return await super().generate(context, sampling, session)


@pytest.fixture
def gated(build, tokenizer):
    def make(may=lambda step: True, engine=None, **options):
        env = MultiTurnToolEnv([], protocol="learnt_tags", max_steps=3)
        return build(env=env, engine=engine or Gate(tokenizer, may), **{"max_steps": 4, **options})

    return make


@pytest.mark.parametrize(("staleness", "asked"), [(0, [0]), (1, [0, 1]), (2, [0, 1, 2]), (8, [0, 1, 2, 3])])
def test_a_batch_begins_so_many_batches_early(gated, staleness, asked):
    """While the first step is taken, that many later batches have begun; none past the last step."""
    seen, trainer = [], gated(max_staleness=staleness)
    engine = trainer.runner.engine

    def look(**kwargs):
        while len(engine.asked) < len(asked):
            pass
        seen.append(list(engine.asked))

    trainer.add_callback(at("on_pre_optimizer_step", look, step=0))
    before = {thread.name for thread in threading.enumerate()}
    trainer.train()
    assert seen == [asked] and engine.asked == [0, 1, 2, 3] and not trainer.runner.under_way
    if not staleness:
        assert {thread.name for thread in threading.enumerate()} <= before | {"mt-grpo-background"}


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
    assert trainer.state.global_step == 4 and len(trainer.eval_trajectories) > 0
    assert len(tokens_of(tmp_path)) == 16


def test_a_run_that_stops_ends_what_is_under_way(gated):
    trainer = gated(lambda step: step == 0, max_staleness=2)
    stops = lambda control, **kwargs: setattr(control, "should_training_stop", True)  # noqa: E731
    trainer.add_callback(at("on_step_end", stops, step=1))
    trainer.train()
    assert trainer.state.global_step == 1 and not trainer.runner.under_way


def test_an_interrupted_run_keeps_what_is_finished(gated, tmp_path, tokenizer):
    """Conversations of a waiting batch that are finished are not sampled again; the others are."""
    late = {f"train-000001-000000-00000{row}" for row in (1, 3)}

    class Some(Gate):
        async def generate(self, context, sampling, session):
            if session in late:
                await asyncio.Event().wait()
            return await super().generate(context, sampling, session)

    def run(folder, **given):
        return gated(max_steps=3, max_staleness=1, output_dir=str(tmp_path / folder), **SAVES, **given)

    def waits(**kwargs):
        while len(cut.runner.under_way) != 2:  # the other two are finished
            pass

    def interrupts(**kwargs):
        raise KeyboardInterrupt

    (whole := run("whole")).train()
    cut = run("cut", engine=Some(tokenizer))
    cut.add_callback(at("on_optimizer_step", waits))
    cut.add_callback(at("on_save", interrupts))
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    (resumed := run("cut")).train(str(tmp_path / "cut" / "checkpoint-1"))
    again = {session for session, _, _ in resumed.runner.engine.requests if session.startswith("train-000001")}
    assert again == late and tokens_of(tmp_path / "cut") == tokens_of(tmp_path / "whole")
    assert same(weights(whole), weights(resumed))


def output_of(differences):
    """A batch whose conversations have these log ratios per token."""
    old = torch.tensor(differences)
    ones = torch.ones_like(old)
    masks = {"completion_mask": ones, "tool_mask": ones.clone()}
    return {"old_per_token_logps": old, "sampling_per_token_logps": torch.zeros_like(old), **masks}


def test_the_effective_sample_size_is_of_whole_conversations():
    assert effective_sample_size(output_of([[0.5, -0.5], [0.0, 0.0]])) == pytest.approx(1.0)
    assert effective_sample_size(output_of([[30.0, 30.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])) == pytest.approx(0.25)
    some = output_of([[0.0, float("nan")], [0.0, 1.0], [9.0, 9.0]])
    some["tool_mask"][1, 1] = some["completion_mask"][2] = 0  # a token of the environment, and one that is left out
    assert effective_sample_size(some) == pytest.approx(1.0)
    some["completion_mask"][:] = 0
    assert effective_sample_size(some) != effective_sample_size(some)


def rates_into(rates):
    """Keeps the learning rate of each step."""
    keep = lambda optimizer, **kwargs: rates.append(optimizer.param_groups[0]["lr"])  # noqa: E731
    return {"callbacks": [at("on_pre_optimizer_step", keep)]}


def test_few_effective_conversations_make_steps_smaller(sampled, monkeypatch, caplog):
    """Of Adam's step, not of the gradient; the schedule goes on as it was."""
    shares, rates = iter([1.0, 0.1, 0.5]), []
    monkeypatch.setattr("mt_grpo.training.trainer.effective_sample_size", lambda output: next(shares))
    trainer, _ = sampled("small", **rates_into(rates), max_staleness=1, max_steps=3, learning_rate=0.3)
    assert rates == pytest.approx([0.3, 0.1 * 0.2, 0.1])
    assert [rate for (rate,) in logged(trainer, "learning_rate")] == pytest.approx([0.3, 0.2, 0.1])
    assert "Effective sample size is only 10 % of the batch" in caplog.text


def test_a_resumed_batch_keeps_its_smaller_steps(sampled, tmp_path, monkeypatch):
    """A batch is trained for two steps, and the run is resumed between them."""
    monkeypatch.setattr("mt_grpo.training.trainer.effective_sample_size", lambda output: 0.1)
    rates = []
    options = {"max_staleness": 1, "num_iterations": 2, "learning_rate": 0.1, **rates_into(rates)}
    whole, _ = sampled("cut", **SAVES, **options)
    resumed, _ = sampled("cut", str(tmp_path / "cut" / "checkpoint-1"), **options)
    assert rates == pytest.approx([0.01, 0.005, 0.005])
    assert same(weights(whole), weights(resumed))


def test_a_step_that_is_cut_short_saves_the_whole_learning_rate(build, monkeypatch):
    """Its batch makes it smaller once more when it begins again."""
    monkeypatch.setattr("mt_grpo.training.trainer.effective_sample_size", lambda output: 0.1)

    def interrupts(**kwargs):
        raise KeyboardInterrupt

    options = {"max_turn_length": 8, "gradient_accumulation_steps": 2, "learning_rate": 0.1, "max_staleness": 1}
    trainer = build(None, rewards=((), (Letters(),)), callbacks=[at("on_substep_end", interrupts)], **options)
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
    resumed, _ = sampled("run", str(tmp_path / "run" / "checkpoint-1"), max_staleness=after, **options)
    assert resumed.state.global_step == 4
    assert all(lag <= after for (lag,) in logged(resumed, "staleness/max")[2 if before <= after else 1 :])


def test_sampling_while_training_reads_no_weight_that_is_trained(sampled):
    """Every token has the log-prob of the weights that its turn is stamped with, whatever was trained since."""
    versions, lags = {}, set()

    def keep(state, model, **kwargs):
        versions[state.global_step] = {name: value.clone() for name, value in model.state_dict().items()}

    options = {"max_staleness": 2, "max_steps": 4, "learning_rate": 1e-2}
    trainer, _ = sampled("moving", callbacks=[at("on_step_begin", keep)], **options)
    for each in open_run(trainer.args.output_dir).trajectories():
        tree, step = TokenTree.from_dict(each["tree"]), int(each["session"].split("-")[1])
        for turn in each["turns"]:
            trainer.model.load_state_dict(versions[turn["weight_version"]])
            (logps,) = token_logps(trainer.model, [tree])
            (expected, *_) = [node["logprobs"] for node in each["tree"]["nodes"] if node["turn"] == turn["index"]]
            torch.testing.assert_close(logps[turn["index"]].float(), torch.tensor(expected), rtol=0, atol=1e-4)
            assert turn["last_weight_version"] == turn["weight_version"] <= step
            lags.add(step - turn["weight_version"])
    assert max(lags) == 2


@pytest.mark.slow
def test_the_best_model_is_evaluated_with_its_own_weights(build):
    """The copy that samples had those of the last step, which were evaluated before the best ones were loaded."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, **SAVES}
    options |= {"metric_for_best_model": "eval_completions/clipped_ratio", "max_staleness": 1, "max_turn_length": 12}
    (trainer := build(None, rewards=((), (Letters(),)), **options)).train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert trainer.evaluate()["eval_sampling/sampling_logp_difference/max"] < 1e-4


CONVERSATIONS = 4


def expected(staleness: int, training: int, longest: int) -> float:
    """
    Mean generation batches that a turn's weights are old, of conversations that take `longest` each, and steps that
    take `training`; `longest` is at most `training`, at least `staleness * training`, or a multiple of it.
    """
    if not staleness or longest <= training:
        return staleness
    if longest < staleness * training:
        return staleness + 1 / 2 - longest / (2 * training)
    return staleness / 2 * (1 + training / longest)


class Clocked(ScriptedEngine):
    """
    Answers by a clock of its own: each turn begins an instant after the one before it has ended, and takes a second.
    The clock goes on only when every conversation that has begun waits for it, and either a step is computed or the
    trainer waits for a batch. It is the trainer's weight sync too.
    """

    def __init__(self, tokenizer, staleness: int, steps: int) -> None:
        super().__init__(tokenizer, lambda session, turn: SEARCH)
        self._staleness, self._finished = staleness, [0] * steps
        self._now = self._until = 0.0
        self._due: dict[str, tuple[float, asyncio.Event]] = {}
        self._computed = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._out = -1  # the batch that is trained with the latest weights

    async def generate(self, context, sampling, session) -> Sample:
        self._loop = asyncio.get_running_loop()
        begin = self._now
        await self._reach(begin + 0.5, session)
        version = self._out
        await self._reach(begin + 1.0, session)
        sample = await super().generate(context, sampling, session)
        sample.weight_version = sample.last_weight_version = version
        return sample

    async def _reach(self, moment: float, session: str) -> None:
        self._due[session] = moment, asyncio.Event()
        self._go_on()
        await self._due[session][1].wait()
        del self._due[session]

    def release(self, session: str) -> None:
        super().release(session)
        self._finished[int(session.split("-")[1])] += 1
        self._go_on()

    def _go_on(self) -> None:
        begun = min(self._out + self._staleness + 1, len(self._finished)) * CONVERSATIONS
        asleep = [each for each in self._due.values() if not each[1].is_set()]
        if len(asleep) < begun - sum(self._finished):
            return
        moments = [moment for moment, _ in asleep]
        if self._finished[self._out] == CONVERSATIONS:
            if self._now >= self._until:
                return
            moments.append(self._until)
        self._now = min(moments)
        for moment, reached in asleep:
            if moment == self._now:
                reached.set()
        if self._now == self._until:
            self._computed.set()
        elif not any(reached.is_set() for _, reached in asleep):
            self._go_on()

    def compute(self, seconds: int) -> None:
        """Lets the time of a step pass."""
        self._computed.clear()
        self._until = self._now + seconds
        self._loop.call_soon_threadsafe(self._go_on)
        self._computed.wait()

    def sync(self, step: int) -> None:
        self._out = step
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._go_on)

    def check(self) -> None:
        pass


@pytest.mark.parametrize(
    ("training", "turns", "staleness"),
    [(4, 2, 2), (1, 4, 1), (1, 4, 2), (1, 4, 4), (1, 3, 4)],
)
def test_mean_staleness_is_its_closed_form(build, tokenizer, questions, training, turns, staleness):
    """Over as many batches as begin in one period, once the first batches, which begin together, are trained."""
    steps = 2 * staleness + 2
    engine = Clocked(tokenizer, staleness, steps)
    trainer = build(
        env=MultiTurnToolEnv([lookup], protocol="learnt_tags", max_steps=turns - 1),
        train_dataset=concatenate_datasets([questions] * 2),  # one epoch has all steps
        callbacks=[at("on_pre_optimizer_step", lambda **kwargs: engine.compute(training))],
        engine=engine,
        **{"max_completion_length": 480, "max_staleness": staleness, "max_steps": steps, "learning_rate": 0.0},
    )
    trainer.weight_sync = engine
    trainer.train()
    found = [mean for (mean,) in logged(trainer, "staleness/mean")]
    assert sum(found[-staleness - 1 :]) / (staleness + 1) == pytest.approx(expected(staleness, training, turns))
