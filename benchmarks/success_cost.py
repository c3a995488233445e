"""
What a success probe costs, by the number of turns: a training step with it against the same step without.

    python benchmarks/success_cost.py [--quick]

Conversations, model and step are those of `answers.py`: sampled once, outside the clock; old log-probs, rewards,
credit, and the loss with its gradient. The probe's leaves are scored in the forward of the old log-probs, and its rule
judges each group on the others. Asked at 8 turns: at most 1.15 of the step without.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import answers
import torch
from answers import BOUND, build, step
from common import build_tokenizer, write
from measure import interleave
from success_probe import RULE
from success_task import SuccessProbe
from transformers import Qwen3Config, Qwen3ForCausalLM

QUESTION = "Will this attempt succeed? Answer yes or no:"


def with_probe(model: Qwen3ForCausalLM, folder: str, turns: int) -> Any:
    """A trainer that asks the policy after each turn."""
    trainer, probe = build(model, folder, turns, [], samples=False), SuccessProbe(QUESTION)
    probe.check(build_tokenizer())
    trainer.state_scores, trainer.args.advantage_estimator = probe.both, RULE
    return trainer


def check(without: Any, trainer: Any, turns: int) -> float:
    """The difference between old log-probs with the probe in their forward and without."""
    old, ours = (step(each)["old_per_token_logps"] for each in (without, trainer))
    gap = float((ours - old).abs().max())
    asked = sum(
        value is not None for one in trainer.batch.trajectories for value in one.rewards["state"]["success_probe"]
    )
    if gap > BOUND or asked != answers.GROUP * (turns - 1):
        raise SystemExit(f"Old log-probs differ by {gap:.1e}, and {asked} turns were asked; a ratio would be void.")
    return gap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs; nothing is written")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lengths, repeats, size = ((2,), 1, 32) if options.quick else ((4, 8), options.repeats, 128)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(build_tokenizer()),
            hidden_size=size,
            intermediate_size=3 * size,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=size // 4,
            max_position_embeddings=8192,
        )
    )
    rows = []
    print("| turns | time with / without, median | least | asked |\n| --- | --- | --- | --- |")
    for turns in lengths:
        with tempfile.TemporaryDirectory() as folder:
            without, trainer = build(model, folder, turns, [], samples=False), with_probe(model, folder, turns)
            ways = {"without": lambda t=without: step(t), "with": lambda t=trainer: step(t)}
            for way in ways.values():
                way()
            gap = check(without, trainer, turns)
            # the processor's time: cores may be shared with other work
            seconds = interleave(ways, repeats, time.process_time)
        ratios = [ours / theirs for ours, theirs in zip(seconds["with"], seconds["without"], strict=True)]
        target = {"target": "<= 1.15"} if turns == 8 else {}
        asked = target.get("target", "")
        print(f"| {turns} | {statistics.median(ratios):.3f} | {min(ratios):.3f} | {asked} |".replace("|  |", "| |"))
        rows.append({"label": f"{turns} turns", "values": ratios, **target, "seconds": seconds, "difference": gap})
        if not options.quick:
            settings = {"seed": 0, "repeats": repeats, "threads": 1, "hidden": size, "question": QUESTION}
            write("success_cost", settings, rows)


if __name__ == "__main__":
    main()
