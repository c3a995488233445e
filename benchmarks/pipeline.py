"""
What sampling ahead gains (`max_staleness`), with times that are scripted and the trainer as it is.

1. Constant times: a step's time over `max(T, (T + L) / (S + 1))`, where `T` is what a step takes without waiting for
   conversations and `L` the longest conversation, both as measured in the run.
2. An agent of 8 turns whose tools take log-normal times (median 0.25 s, sigma 1), on a server that takes as long for
   the turns of a batch as training takes: the time of a step with staleness 0 over that with 1 and 2, and, for 1, over
   the time of the same with a drained sync: weights wait there until no conversation is under way.
3. What conversations cost the step that is computed beside them: the time of a step of a model of 5 million weights
   with eight conversations under way, which take about 10 turns a second together, over that of the same step alone.

In 1 and 2 training is a tiny model's step and a pause. Settings are interleaved. Waits come in turns where batches are
ahead: of `S + 1` steps in a row one waits for all. So means are over a multiple of `S + 1` steps.

    python benchmarks/pipeline.py [--quick]

Prints a table and writes `benchmarks/results/pipeline.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch
from common import build_tokenizer, write
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from mt_grpo.concurrency import BackgroundTask
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rewards import OutcomeReward
from mt_grpo.rollout import RolloutRequest, RolloutRunner, Sample, SamplingParams, derive_seed
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer

CALL = '<tool>{"name": "wait", "args": {"seconds": %.4f}}</tool>'
CONSTANT = {"training": 1.0, "turns": 3, "median": 1.0, "sigma": 0.0, "turn": 0.1, "capacity": 8, "conversations": 8}
AGENT = {"training": 0.8, "turns": 8, "median": 0.25, "sigma": 1.0, "turn": 0.1, "capacity": 32, "conversations": 32}
"""Seconds of training, turns, median and sigma of a tool's seconds, seconds of a turn on the server, turns that it
samples at once, conversations of a batch."""


BESIDE = {"turns": 60, "median": 0.36, "sigma": 0.0, "turn": 0.36, "capacity": 8, "conversations": 8}
"""The same of conversations beside a step that is computed: 10 turns a second."""
SECONDS = ("training", "median", "turn")


async def wait(seconds: float) -> str:
    """
    Waits.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "waited"


class Server:
    """Samples so many turns at once, each in the same time."""

    context_length = 4096

    def __init__(self, tokenizer: Any, times: dict[str, float]) -> None:
        self.tokenizer, self._times = tokenizer, times
        self._turns: dict[str, int] = {}
        self._free: asyncio.Semaphore | None = None
        self.sampled = 0

    async def generate(self, context: list[int], sampling: SamplingParams, session: str) -> Sample:
        turn = self._turns[session] = self._turns.get(session, -1) + 1
        draw = np.random.default_rng(derive_seed(session, turn))
        seconds = self._times["median"] * np.exp(self._times["sigma"] * draw.standard_normal())
        last = turn + 1 == self._times["turns"]
        self._free = self._free or asyncio.Semaphore(int(self._times["capacity"]))
        self.sampled += 1
        async with self._free:
            await asyncio.sleep(self._times["turn"])
        ids = self.tokenizer.encode("<answer>done</answer>" if last else CALL % seconds, add_special_tokens=False)
        return Sample(ids, [-0.1] * len(ids))

    def release(self, session: str) -> None:
        self._turns.pop(session, None)

    async def close(self) -> None:
        self._free = None


class Drained:
    """A sync that waits until no conversation is under way, as where an update would end them."""

    def __init__(self, trainer: MTGRPOEnvTrainer) -> None:
        self._trainer = trainer

    def sync(self, step: int) -> None:
        while self._trainer.runner.under_way:
            time.sleep(0.002)

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class Clock(TrainerCallback):
    """Makes training take its time, and notes when steps begin to train and end."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.ends: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(self._seconds)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


class Nothing(OutcomeReward):
    def score(self, trajectory: Any, **row: Any) -> float:
        return float(derive_seed(trajectory.session) % 2)


def measure(times: dict[str, float], staleness: int, steps: int, drained: bool = False) -> dict[str, float]:
    """Medians over the steps of a run, in seconds: of a step, of it without the wait, of the longest conversation."""
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=4096,
    )
    number = int(times["conversations"])
    clock = Clock(times["training"])
    longest: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        args = MTGRPOConfig(
            folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            max_steps=steps,
            learning_rate=0.0,
            max_staleness=staleness,
            per_device_train_batch_size=number,
            num_generations=number,
            max_completion_length=2048,
            tokenization_sanity_check_mode="disable",
        )
        trainer = MTGRPOEnvTrainer(
            Qwen3ForCausalLM(config),
            MultiTurnToolEnv([wait], protocol="learnt_tags", max_steps=int(times["turns"])),
            (),
            (Nothing(),),
            args,
            Dataset.from_list([{"prompt": f"Wait {row}"} for row in range(steps)]),
            engine=Server(tokenizer, times),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        if drained:
            trainer.weight_sync = Drained(trainer)  # type: ignore[assignment]
        take = trainer.step_log.take

        def note(step: Any) -> None:
            longest.append(max(trajectory.seconds for trajectory in step.batch.trajectories))
            take(step)

        trainer.step_log.take = note  # type: ignore[method-assign]
        waits: list[float] = []
        rolling = trainer._rollout

        def rollout(batch: Any) -> None:
            start = time.perf_counter()
            rolling(batch)
            waits.append(time.perf_counter() - start)

        trainer._rollout = rollout  # type: ignore[method-assign]
        trainer.train()
    first = min(2 * staleness + 1, steps - 3)  # until as many batches are under way as may be
    cycles = np.diff(clock.ends)
    number = (len(cycles) - first) // (staleness + 1) * (staleness + 1)
    return {
        "cycle": statistics.fmean(cycles[-number:]),
        "training": statistics.fmean((cycles - waits[1:])[-number:]),
        "longest": statistics.fmean(longest[-number:]),
    }


def beside(steps: int, rounds: int) -> tuple[list[float], float]:
    """Per round, the median time of a step beside conversations over that alone; and the turns per second."""
    tokenizer = build_tokenizer()
    torch.set_num_threads(1)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ids = torch.randint(len(tokenizer), (4, 256))

    def train() -> float:
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    ratios, turns, seconds = [], 0, 0.0
    train()
    for number in range(rounds):
        server = Server(tokenizer, BESIDE)
        env = MultiTurnToolEnv([wait], protocol="learnt_tags", max_steps=int(BESIDE["turns"]))
        runner = RolloutRunner(env, server)
        requests = [RolloutRequest(f"Wait {row}", str(row)) for row in range(int(BESIDE["conversations"]))]
        alone = train() if number % 2 else 0.0
        begun = BackgroundTask(runner.run(requests, SamplingParams())).start()
        while len(runner.under_way) < len(requests):
            time.sleep(0.01)
        before, start = server.sampled, time.perf_counter()
        among = train()
        seconds, turns = seconds + time.perf_counter() - start, turns + server.sampled - before
        begun.cancel()
        ratios.append(among / (alone or train()))
    return ratios, turns / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter times, fewer steps, nothing is written")
    quick = parser.parse_args().quick
    logging.disable(logging.WARNING)
    steps, rounds = ({"constant": 4, "agent": 4}, 1) if quick else ({"constant": 12, "agent": 10}, 2)
    few = {"conversations": 4} if quick else {}
    constant, agent = (
        {name: value * (0.1 if quick and name in SECONDS else 1) for name, value in times.items()}
        for times in (CONSTANT | few, AGENT | few)
    )
    table = Table(title="Sampling ahead")
    for column in ("what", "step, s", "T, s", "L, s", "value", "target"):
        table.add_column(column, justify="left" if column == "what" else "right")
    rows: list[dict[str, Any]] = []

    def add(label: str, found: dict[str, float], values: list[float], target: str) -> None:
        rows.append({"label": label, "target": target, "values": values, "seconds": found})
        seconds = [f"{found[name]:.2f}" for name in ("cycle", "training", "longest")]
        table.add_row(label, *seconds, f"{statistics.median(values):.2f}", target)

    for staleness in (2,) if quick else (0, 1, 2):
        found = measure(constant, staleness, steps["constant"])
        training, longest = found["training"], found["longest"]
        bound = max(training, (training + longest) / (staleness + 1))
        add(f"constant times, staleness {staleness}: step / bound", found, [found["cycle"] / bound], "<= 1.05")
    ways = {"0": (0, False), "1": (1, False), "2": (2, False), "1 with a drained sync": (1, True)}
    found_in = [
        {name: measure(agent, way[0], steps["agent"], way[1]) for name, way in ways.items()} for _ in range(rounds)
    ]
    for slow, fast, target in (("0", "1", ">= 1.6"), ("0", "2", ">= 2.0"), ("1 with a drained sync", "1", ">= 1.2")):
        gains = [each[slow]["cycle"] / each[fast]["cycle"] for each in found_in]
        shown = {key: statistics.median(each[fast][key] for each in found_in) for key in found_in[0][fast]}
        add(f"agent, staleness {slow} / {fast}", shown, gains, target)
    ratios, rate = beside(*((1, 1) if quick else (6, 6)))
    rows.append({"label": "step beside conversations / alone", "target": "<= 1.03", "values": ratios, "turns": rate})
    table.add_row("step beside conversations / alone", "", "", "", f"{statistics.median(ratios):.3f}", "<= 1.03")
    Console().print(table)
    if not quick:
        write(
            "pipeline",
            {"constant": CONSTANT, "agent": AGENT, "beside": BESIDE, "steps": steps, "rounds": rounds},
            rows,
        )


if __name__ == "__main__":
    main()
