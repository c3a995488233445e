"""Rollouts and training at the same time: `max_staleness`."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch
from datasets import concatenate_datasets
from support.models import CPU_RUN, build_model, lookup
from support.trainers import SEARCH, Answered, Calls, Letters, Spelling, conversation
from transformers import TrainerCallback

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rollout import Sample, ScriptedEngine
from mt_grpo.runlog import open_run
from mt_grpo.token_tree import TokenTree
from mt_grpo.training import ConfigError, MTGRPOConfig, MTGRPOEnvTrainer, token_logps
from mt_grpo.training.prefetch import effective_sample_size


def tokens_of(folder):
    """The tokens of each conversation of training, by its name."""
    found = {each["session"]: each["tree"]["nodes"] for each in open_run(folder).trajectories()}
    return {
        session: [node["tokens"] for node in nodes] for session, nodes in found.items() if session.startswith("train")
    }


def logged(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


@pytest.fixture
def sampled(tmp_path, tokenizer, questions):
    """Trains with conversations that the model samples itself. Returns the trainer and its conversations' tokens."""

    def train(name, resume=None, callback=None, **options):
        folder = tmp_path / name
        options = {"output_dir": str(folder), **CPU_RUN, "max_completion_length": 200, "max_steps": 6, **options}
        trainer = MTGRPOEnvTrainer(
            build_model(tokenizer),
            Spelling(protocol="learnt_tags", max_steps=2),
            (),
            (Letters(),),
            MTGRPOConfig(**options),
            train_dataset=questions,
            eval_dataset=questions.select(range(2)),
            processing_class=tokenizer,
        )
        if callback is not None:
            trainer.add_callback(callback)
        trainer.train(resume)
        return trainer, tokens_of(folder)

    return train


def test_without_learning_staleness_changes_no_conversation(sampled):
    trainer, expected = sampled("0", learning_rate=0.0)
    assert len(expected) == 24 and not logged(trainer, "staleness/mean")
    for staleness in (1, 2, 4):
        trainer, found = sampled(str(staleness), learning_rate=0.0, max_staleness=staleness)
        assert found == expected
        assert logged(trainer, "staleness/max")[:3] == [0.0, 1.0, min(2.0, staleness)]
        assert max(logged(trainer, "staleness/max")) <= staleness


class Gate(ScriptedEngine):
    """Answers the conversations of a batch only once they may; tells which batches have been asked for."""

    def __init__(self, tokenizer, may):
        super().__init__(tokenizer, conversation)
        self.asked, self._may = [], may

    async def generate(self, context, sampling, session):
        step = int(session.split("-")[1])
        if session.startswith("train") and step not in self.asked:
            self.asked.append(step)
        while session.startswith("train") and not self._may(step):
            await asyncio.sleep(0.001)
        return await super().generate(context, sampling, session)


def gated(tmp_path, tokenizer, questions, may, **options):
    options = {"output_dir": str(tmp_path), **CPU_RUN, "max_completion_length": 400, "max_steps": 4, **options}
    return MTGRPOEnvTrainer(
        build_model(tokenizer),
        MultiTurnToolEnv([], protocol="learnt_tags", max_steps=3),
        (Calls(),),
        (Answered(),),
        MTGRPOConfig(**options),
        train_dataset=questions,
        eval_dataset=questions,
        engine=Gate(tokenizer, may),
        processing_class=tokenizer,
    )


class AtStep(TrainerCallback):
    def __init__(self, event, step, action):
        setattr(
            self, event, lambda args, state, control, **kwargs: action(control) if state.global_step == step else None
        )


@pytest.mark.parametrize(("staleness", "asked"), [(1, [0, 1]), (2, [0, 1, 2]), (8, [0, 1, 2, 3])])
def test_a_batch_begins_so_many_batches_early(tmp_path, tokenizer, questions, staleness, asked):
    """While the first step is taken, that many later batches have begun; none past the last step."""
    seen = []
    trainer = gated(tmp_path, tokenizer, questions, lambda step: True, max_staleness=staleness)
    engine = trainer.runner.engine

    def look(control):
        while len(engine.asked) < len(asked):
            pass
        seen.append(list(engine.asked))

    trainer.add_callback(AtStep("on_pre_optimizer_step", 0, look))
    trainer.train()
    assert seen == [asked] and engine.asked == [0, 1, 2, 3]
    assert not trainer.runner.under_way


def test_nothing_is_ahead_and_no_thread_with_staleness_0(tmp_path, tokenizer, questions):
    trainer = gated(tmp_path, tokenizer, questions, lambda step: True)
    seen = []
    trainer.add_callback(
        AtStep("on_pre_optimizer_step", 0, lambda control: seen.append(list(trainer.runner.engine.asked)))
    )
    before = {thread.name for thread in threading.enumerate()}
    trainer.train()
    assert seen == [[0]]
    assert {thread.name for thread in threading.enumerate()} <= before | {"mt-grpo-background"}


def test_an_evaluation_leaves_batches_in_flight_alone(tmp_path, tokenizer, questions):
    """Batch 1 is under way while the evaluation after step 1 is made, and ends after it."""
    may = threading.Event()
    trainer = gated(tmp_path, tokenizer, questions, lambda step: step < 2 or may.is_set(), max_staleness=1)

    class After(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                control.should_evaluate = True

        def on_evaluate(self, args, state, control, **kwargs):
            assert sorted(trainer.runner.under_way) == [f"train-000002-000000-{row:06d}" for row in range(4)]
            may.set()

    trainer.add_callback(After())
    trainer.train()
    assert trainer.state.global_step == 4 and len(trainer.eval_trajectories) > 0
    assert len(tokens_of(tmp_path)) == 16


def test_a_run_that_stops_ends_what_is_under_way(tmp_path, tokenizer, questions):
    trainer = gated(tmp_path, tokenizer, questions, lambda step: step == 0, max_staleness=2)
    stop = AtStep("on_step_end", 1, lambda control: setattr(control, "should_training_stop", True))
    trainer.add_callback(stop)
    trainer.train()
    assert trainer.state.global_step == 1 and not trainer.runner.under_way


def test_an_interrupted_run_keeps_what_is_finished(tmp_path, tokenizer, questions):
    """Conversations of a waiting batch that are finished are not sampled again; the others are."""

    class Some(Gate):
        async def generate(self, context, sampling, session):
            if session in ("train-000001-000000-000001", "train-000001-000000-000003"):
                await asyncio.Event().wait()
            return await super().generate(context, sampling, session)

    def build(engine, folder, **options):
        return MTGRPOEnvTrainer(
            build_model(tokenizer),
            MultiTurnToolEnv([], protocol="learnt_tags", max_steps=3),
            (Calls(),),
            (Answered(),),
            MTGRPOConfig(
                output_dir=str(folder),
                **{**CPU_RUN, "save_strategy": "steps"},
                save_steps=1,
                max_completion_length=400,
                max_steps=3,
                max_staleness=1,
                **options,
            ),
            train_dataset=questions,
            engine=engine,
            processing_class=tokenizer,
        )

    whole = build(Gate(tokenizer, lambda step: True), tmp_path / "whole")
    whole.train()
    engine = Some(tokenizer, lambda step: True)
    cut = build(engine, tmp_path / "cut")

    class Interrupt(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            while len(cut.runner.under_way) != 2:  # the other two are finished
                pass

        def on_save(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    cut.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    engine = Gate(tokenizer, lambda step: True)
    resumed = build(engine, tmp_path / "cut")
    resumed.train(str(tmp_path / "cut" / "checkpoint-1"))
    again = {session for session, _, _ in engine.requests if session.startswith("train-000001")}
    assert again == {"train-000001-000000-000001", "train-000001-000000-000003"}
    assert tokens_of(tmp_path / "cut") == tokens_of(tmp_path / "whole")
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def output_of(differences):
    """A batch whose conversations have these log ratios per token."""
    old = torch.tensor(differences)
    ones = torch.ones_like(old)
    return {
        "old_per_token_logps": old,
        "sampling_per_token_logps": torch.zeros_like(old),
        "completion_mask": ones,
        "tool_mask": ones.clone(),
    }


def test_the_effective_sample_size_is_of_whole_conversations():
    assert effective_sample_size(output_of([[0.5, -0.5], [0.0, 0.0]])) == pytest.approx(1.0)
    assert effective_sample_size(output_of([[30.0, 30.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])) == pytest.approx(0.25)
    some = output_of([[0.0, float("nan")], [0.0, 1.0], [9.0, 9.0]])
    some["tool_mask"][1, 1] = some["completion_mask"][2] = 0  # a token of the environment, and one that is left out
    assert effective_sample_size(some) == pytest.approx(1.0)
    some["completion_mask"][:] = 0
    assert effective_sample_size(some) != effective_sample_size(some)


def test_few_effective_conversations_make_steps_smaller(sampled, monkeypatch, caplog):
    """Of Adam's step, not of the gradient; the schedule goes on as it was."""
    shares = iter([1.0, 0.1, 0.5])
    monkeypatch.setattr("mt_grpo.training.trainer.effective_sample_size", lambda output: next(shares))
    rates = []

    class Rates(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs):
            rates.append(optimizer.param_groups[0]["lr"])

    trainer, _ = sampled("small", callback=Rates(), max_staleness=1, max_steps=3, learning_rate=0.3)
    assert rates == pytest.approx([0.3, 0.1 * 0.2, 0.1])
    assert logged(trainer, "learning_rate") == pytest.approx([0.3, 0.2, 0.1])
    assert "Effective sample size is only 10 % of the batch" in caplog.text


def test_a_resumed_batch_keeps_its_smaller_steps(sampled, monkeypatch):
    """A batch is trained for two steps, and the run is resumed between them."""
    monkeypatch.setattr("mt_grpo.training.trainer.effective_sample_size", lambda output: 0.1)
    rates = []

    class Rates(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs):
            rates.append(optimizer.param_groups[0]["lr"])

    options = {"max_staleness": 1, "max_steps": 2, "num_iterations": 2, "learning_rate": 0.1}
    whole, _ = sampled("cut", callback=Rates(), save_strategy="steps", save_steps=1, **options)
    checkpoint = str(Path(whole.args.output_dir, "checkpoint-1"))
    resumed, _ = sampled("cut", resume=checkpoint, callback=Rates(), **options)
    assert rates == pytest.approx([0.01, 0.005, 0.005])
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_correction_is_by_token_where_none_is_chosen(tmp_path):
    def chosen(**options):
        args = MTGRPOConfig(str(tmp_path), **{**CPU_RUN, **options})
        return args.vllm_importance_sampling_mode, args.vllm_importance_sampling_clip_max

    assert chosen() == ("sequence_mask", 3.0)
    assert chosen(max_staleness=1) == ("token_truncate", 2.0)
    assert chosen(max_staleness=1, vllm_importance_sampling_clip_max=1.5) == ("token_truncate", 1.5)
    assert chosen(max_staleness=1, vllm_importance_sampling_mode="token_mask") == ("token_mask", 3.0)


def test_an_engine_of_the_trained_model_is_refused(tmp_path, tokenizer, questions):
    class Own(ScriptedEngine):
        def use_model(self, model):
            pass

    with pytest.raises(ConfigError, match="Own samples from the model that is trained"):
        MTGRPOEnvTrainer(
            build_model(tokenizer),
            MultiTurnToolEnv([], protocol="learnt_tags", max_steps=3),
            (Calls(),),
            (Answered(),),
            MTGRPOConfig(str(tmp_path), **CPU_RUN, max_staleness=1),
            train_dataset=questions,
            engine=Own(tokenizer, conversation),
            processing_class=tokenizer,
        )


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0), (2, 1), (1, 2)])
def test_staleness_may_change_on_resume(sampled, tmp_path, before, after):
    """In the middle of a batch too, whose log-probs of the sampler are there or not; its smaller steps are not."""
    options = {"num_iterations": 2, "max_steps": 4}
    sampled("run", max_staleness=before, save_strategy="steps", save_steps=1, **options)
    resumed, _ = sampled("run", str(tmp_path / "run" / "checkpoint-1"), max_staleness=after, **options)
    assert resumed.state.global_step == 4
    assert all(lag <= after for lag in logged(resumed, "staleness/max")[2 if before <= after else 1 :])


def test_sampling_while_training_reads_no_weight_that_is_trained(sampled):
    """Every token has the log-prob of the weights that its turn is stamped with, whatever was trained since."""
    weights = {}

    class Keep(TrainerCallback):
        def on_step_begin(self, args, state, control, model, **kwargs):
            weights[state.global_step] = {name: value.clone() for name, value in model.state_dict().items()}

    trainer, _ = sampled("moving", callback=Keep(), max_staleness=2, max_steps=4, learning_rate=1e-2)
    lags = set()
    for each in open_run(trainer.args.output_dir).trajectories():
        tree = TokenTree.from_dict(each["tree"])
        step = int(each["session"].split("-")[1])
        for turn in each["turns"]:
            trainer.model.load_state_dict(weights[turn["weight_version"]])
            (logps,) = token_logps(trainer.model, [tree])
            sampled_logps = [node["logprobs"] for node in each["tree"]["nodes"] if node["turn"] == turn["index"]]
            expected = torch.tensor(sampled_logps[0])
            torch.testing.assert_close(logps[turn["index"]].float(), expected, rtol=0, atol=1e-4)
            assert turn["last_weight_version"] == turn["weight_version"] <= step
            lags.add(step - turn["weight_version"])
    assert max(lags) == 2


def test_a_step_that_is_cut_short_saves_the_whole_learning_rate(build, monkeypatch):
    """Its batch makes it smaller once more when it begins again."""
    monkeypatch.setattr("mt_grpo.training.trainer.effective_sample_size", lambda output: 0.1)

    class Cut(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    options = {"max_turn_length": 8, "gradient_accumulation_steps": 2, "learning_rate": 0.1}
    trainer = build(None, rewards=((), (Letters(),)), max_staleness=1, **options)
    trainer.add_callback(Cut())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    groups = torch.load(trainer.save_checkpoint() / "optimizer.pt")["param_groups"]
    assert {group["lr"] for group in groups} == {0.1}


@pytest.mark.slow
def test_the_best_model_is_evaluated_with_its_own_weights(build):
    """The copy that samples had those of the last step, which were evaluated before the best ones were loaded."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_completions/clipped_ratio"}
    trainer = build(None, rewards=((), (Letters(),)), max_staleness=1, max_turn_length=12, max_steps=2, **options)
    trainer.train()
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
def test_mean_staleness_is_its_closed_form(tmp_path, tokenizer, questions, training, turns, staleness):
    """Over as many batches as begin in one period, once the first batches, which begin together, are trained."""
    steps = 2 * staleness + 2
    engine = Clocked(tokenizer, staleness, steps)
    options = {"output_dir": str(tmp_path), **CPU_RUN, "max_completion_length": 480, "max_staleness": staleness}
    trainer = MTGRPOEnvTrainer(
        build_model(tokenizer),
        MultiTurnToolEnv([lookup], protocol="learnt_tags", max_steps=turns - 1),
        (Calls(),),
        (Answered(),),
        MTGRPOConfig(**options, max_steps=steps, learning_rate=0.0),
        train_dataset=concatenate_datasets([questions] * 2),  # one epoch has all steps
        engine=engine,
        processing_class=tokenizer,
    )
    trainer.weight_sync = engine

    class Computes(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            engine.compute(training)

    trainer.add_callback(Computes())
    trainer.train()
    found = [row["staleness/mean"] for row in trainer.state.log_history if "staleness/mean" in row]
    assert sum(found[-staleness - 1 :]) / (staleness + 1) == pytest.approx(expected(staleness, training, turns))
