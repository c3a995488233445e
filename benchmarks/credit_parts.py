"""
What credit costs of a training step: the rule, the parts of its advantages, the search for turn rewards without
credit, and the record of credit. They are timed where a run calls them, in seconds of one processor core, so that what
else the machine does has no part in the ratio.

    python benchmarks/credit_parts.py

The run is the quickstart: 48 conversations of up to 5 turns, and a model of 1.3 million parameters, so that steps are
as short as they get.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from common import write
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from mt_grpo.app.build import build_recipe
from mt_grpo.app.request import read_request
from mt_grpo.data import load_rows
from mt_grpo.training import step_log, trainer
from mt_grpo.training.step_log import records

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
PARTS = ("rule", "parts", "without credit", "record")


class Clock(TrainerCallback):
    """Processor seconds of steps, and of functions within them, after the first step."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._steps: list[float] = []

    def of(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            returned = function(*args, **kwargs)
            self.seconds[name] += time.process_time() - began
            return returned

        return timed

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:  # the first has warmed up
            self.seconds.clear()
        self._began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds["step"] += time.process_time() - self._began


def measure(rule: str, steps: int, further: dict[str, str]) -> dict[str, Any]:
    """Trains for so many steps, and one before them. Returns seconds per step, and the share of what is for credit."""
    options = {"advantage_estimator": rule, "max_steps": str(steps + 1), "do_eval": "false", "disable_tqdm": "true"}
    options |= further
    with tempfile.TemporaryDirectory() as folder:
        options |= {"output_dir": folder}
        words = [word for option, value in options.items() for word in (f"--{option}", value)]
        args = build_recipe(read_request([str(RECIPE), *words])).training
        clock = Clock()
        trainer.call_rule, records.explain = clock.of("rule", RULE), clock.of("parts", EXPLAIN)
        step_log.uncredited_turn_rewards = clock.of("without credit", UNCREDITED)
        records.part_rows = clock.of("record", ROWS)
        run = trainer.MTGRPOEnvTrainer("embedded", args=args, train_dataset=load_rows("embedded", "train"))
        writer = run.step_log.records.writer
        writer.write_credit = clock.of("record", writer.write_credit)
        run.callback_handler.callbacks.append(clock)
        for callback in (PrinterCallback, ProgressCallback):
            run.remove_callback(callback)
        run.train()
    turns = [row["turns/mean"] for row in run.state.log_history if "turns/mean" in row]
    seconds = {part: round(clock.seconds[part] / steps, 6) for part in ("step", *PARTS)}
    share = sum(seconds[part] for part in PARTS) / seconds["step"]
    return {"rule": rule, "turns": turns[-1], **seconds, "share": round(share, 5)}


RULE, EXPLAIN, ROWS = trainer.call_rule, records.explain, records.part_rows
UNCREDITED = step_log.uncredited_turn_rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one step each, of few conversations; writes no result")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    steps, rows = 1 if quick else 4, []
    further = {"num_generations": "2", "per_device_train_batch_size": "2"} if quick else {}
    for rule in ("reward_to_go", "turn_gae"):
        rows.append(measure(rule, steps, further))
        numbers = "  ".join(f"{part} {1000 * rows[-1][part]:.1f} ms" for part in ("step", *PARTS))
        print(f"{rule}: turns {rows[-1]['turns']:.1f}  {numbers}  share {rows[-1]['share']:.2%}")
    if not quick:
        write("credit_parts", {"steps": steps, "threads": 1, "device": "cpu"}, rows)


if __name__ == "__main__":
    main()
