"""The mean staleness of a run whose conversations and steps take constant times is its closed form."""

from __future__ import annotations

import asyncio
import threading

import pytest
from datasets import concatenate_datasets
from support.models import CPU_RUN, build_model, lookup
from support.trainers import SEARCH, Answered, Calls
from transformers import TrainerCallback

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rollout import Sample, ScriptedEngine
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer

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
