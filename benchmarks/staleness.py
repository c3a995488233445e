"""
What sampling ahead (`max_staleness`) does to what is learnt, on the embedded task; see reports/staleness.md.

    python benchmarks/staleness.py                 # runs what has not run, then writes results, tables and picture
    python benchmarks/staleness.py --engine own    # of that, what needs no server, or with `server` the rest
    python benchmarks/staleness.py --report        # tables and the picture alone, from the committed results
    python benchmarks/staleness.py --quick         # two short runs, to see that it works; writes no results

Every run (part, objective, staleness, seed) leaves one file in `runs/staleness` and is skipped where that is there, so
the command can be interrupted and given again. Runs are in the order of seeds: after any of them, what has run is a
comparison, whose results `--so-far` writes. Runs with `--engine server` share one real vLLM server on this machine's
CPU, one after another; it needs `.venv-vllm` (`make server-cpu`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import server
from common import RESULTS
from jobs import PATIENCE, Row, finished, prepare, run_all, write_rows
from staleness_report import START, draw, text, write_page
from transformers import PrinterCallback, ProgressCallback

from mt_grpo.app.build import build_recipe
from mt_grpo.app.request import read_request
from mt_grpo.app.train import measure, summarise, write_json
from mt_grpo.concurrency import run
from mt_grpo.data import load_rows
from mt_grpo.data.embedded.tool import search
from mt_grpo.training.config import CLIP, MTGRPOConfig
from mt_grpo.training.prefetch import STEP_FACTOR
from mt_grpo.training.trainer import MTGRPOEnvTrainer

FOLDER = Path(__file__).parent.parent / "runs" / "staleness"
RESULT = RESULTS / "staleness.json"
RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"


class Part(NamedTuple):
    """Runs that are compared with each other."""

    engine: str
    learning_rate: float
    steps: int
    seeds: int
    arms: tuple[tuple[str, int], ...]
    """Of each its objective, see `Objective`, or `START` for none, and its staleness."""
    batch: int = 48
    questions: int = 240

    @property
    def plan(self) -> dict[str, Any]:
        """What all its runs have in common."""
        return {name: value for name, value in self._asdict().items() if name not in ("seeds", "arms")}


PARTS = {
    "seeds": Part("server", 3e-4, 20, 5, ((START, 0), *(("decoupled", each) for each in (0, 1, 2)))),
    "control": Part("own", 2e-3, 16, 5, (("none", 0), ("none", 2), ("decoupled", 2))),
    "objectives": Part("own", 1e-3, 16, 3, tuple(product(("decoupled", "sampled"), (1, 2, 4, 8)))),
}


class Job(NamedTuple):
    """One run."""

    part: str
    objective: str
    staleness: int
    seed: int

    def file(self, folder: Path) -> Path:
        return folder / f"{'-'.join(map(str, self))}.json"


def jobs(parts: Sequence[str], seeds: int | None = None) -> list[Job]:
    """All runs: those of the first seed first. What is measured without training has one."""
    found = [
        Job(name, objective, staleness, seed)
        for name in parts
        for objective, staleness in PARTS[name].arms
        for seed in range(1, (1 if objective == START else seeds or PARTS[name].seeds) + 1)
    ]
    return sorted(found, key=lambda job: job.seed)


class Objective(MTGRPOEnvTrainer):
    """
    The trainer with one of three losses for conversations of earlier weights.

    - `decoupled`, the trainer's own: old log-probs are of the weights of the moment, and the loss is multiplied by
      their ratio to the sampled ones, cut at 2.
    - `sampled`: the sampled log-probs are the old ones, so that PPO's clip bounds how far a token is from the weights
      that it was sampled with.
    - `none`: neither, and no smaller steps where the effective sample size is small.
    """

    objective = "decoupled"

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if "importance_sampling_ratio" in output and self.objective != "decoupled":
            output["importance_sampling_ratio"].fill_(1.0)
            if self.objective == "sampled":
                sampled, old = output["sampling_per_token_logps"], output["old_per_token_logps"]
                output["old_per_token_logps"] = sampled.where(~sampled.isnan(), old)
            elif self.args.max_staleness:
                output[STEP_FACTOR].fill_(1.0)
        return output


def options_of(job: Job, part: Part, folder: str, url: str | None) -> MTGRPOConfig:
    """The quickstart's, but for what is compared."""
    options = {
        "output_dir": folder,
        "seed": job.seed,
        "max_steps": part.steps,
        "per_device_train_batch_size": part.batch,
        "learning_rate": part.learning_rate,
        "max_staleness": job.staleness,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": CLIP,
        "disable_tqdm": True,
    }
    if url is not None:
        options |= {"use_vllm": True, "vllm_server_base_url": url, "vllm_max_model_length": 1024}
    given = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return build_recipe(read_request([str(RECIPE), *given])).training


def train(job: Job, part: Part, url: str | None) -> Row:
    """Trains with one objective and staleness; its measures."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Objective(
            "embedded",
            args=options_of(job, part, folder, url),
            train_dataset=load_rows("embedded", "train"),
            eval_dataset=load_rows("embedded", "validation"),
        )
        trainer.objective = job.objective
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        if url is None:
            trainer.runner.engine.patience = PATIENCE
        try:
            if job.objective != START:
                trainer.train()
            rewards = [*trainer.turn_reward_funcs, *trainer.outcome_reward_funcs]
            means = summarise([measure(each, rewards) for each in trainer.rollout(part.questions)])
        finally:
            if trainer.weight_sync is not None:
                trainer.weight_sync.close()
            run(trainer.runner.engine.close())
        history = [row for row in trainer.state.log_history if "reward" in row]

    def logged(name: str) -> list[float]:
        return [round(row[name], 5) for row in history if name in row]

    return {
        **job._asdict(),
        "exact_match": round(means["exact_match"], 5),
        "train": logged("rewards/exact_match_reward_func/mean"),
        "mean_staleness": logged("staleness/mean"),
        "effective": logged("staleness/effective_sample_size"),
        "difference": logged("sampling/sampling_logp_difference/mean"),
        "entropy": logged("entropy"),
        "plan": part.plan,
        "seconds": round(time.perf_counter() - began, 1),
    }


def begin() -> None:
    """What a process of runs needs once."""
    prepare()
    search("Peru")  # builds the index: else the first batch would not wait for it


def work(job: Job, parts: dict[str, Part], url: str | None, folder: Path) -> Job:
    """Runs a job and keeps its measures."""
    write_json(job.file(folder), train(job, parts[job.part], url))
    return job


def run_left(given: Sequence[Job], parts: dict[str, Part], folder: Path, workers: int) -> None:
    """Runs the jobs that have no file."""
    left = [job for job in given if not job.file(folder).exists()]
    own, served = ([job for job in left if parts[job.part].engine == engine] for engine in ("own", "server"))
    if served:
        with server.serve(server.read("embedded")) as url:
            run_all(work, served, parts, url, folder=folder, workers=1, prepare=begin)
    if own:
        run_all(work, own, parts, None, folder=folder, workers=workers, prepare=begin)


def rows_of(folder: Path, parts: dict[str, Part]) -> list[Row]:
    """The measures of all that has run; refuses a folder of other runs."""
    return [row for name, part in parts.items() for row in finished(jobs([name]), folder, plan=part.plan)]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="run nothing, and read committed results")
    parser.add_argument("--so-far", action="store_true", help="run nothing, and write the results of what has run")
    parser.add_argument("--quick", action="store_true", help="two short runs; writes no results")
    parser.add_argument("--engine", choices=("own", "server"), help="only runs that sample with this one")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where runs leave their files (runs/staleness)")
    parser.add_argument("--seeds", type=int, help="from 1 to this number, in all parts (5, 5 and 3)")
    parser.add_argument("--workers", type=int, default=2, help="processes, of one core each, without a server (2)")
    asked = parser.parse_args(argv)
    if asked.report:
        return report()
    if asked.quick:
        with tempfile.TemporaryDirectory() as folder:
            return run_quickly(Path(folder), asked.engine or "own")
    rows_of(asked.folder, PARTS)
    names = [name for name in asked.parts if asked.engine in (None, PARTS[name].engine)]
    if not asked.so_far:
        run_left(jobs(names, asked.seeds), PARTS, asked.folder, asked.workers)
    write_rows(RESULT, rows_of(asked.folder, PARTS), parts={name: part.plan for name, part in PARTS.items()})
    report()


def report() -> None:
    """Tables and the picture of the committed results."""
    results = json.loads(RESULT.read_text())
    write_page(results["rows"], results["parts"])
    draw(results["rows"], results["parts"])
    print(text(results["rows"], results["parts"]))


def run_quickly(folder: Path, engine: str) -> None:
    """Two steps of a run of each part that samples with an engine, with few conversations."""
    chosen = {name: part for name, part in PARTS.items() if part.engine == engine}
    parts = {name: part._replace(steps=2, batch=8, questions=4) for name, part in chosen.items()}
    given = [Job(name, *part.arms[-1], 1) for name, part in parts.items()]
    run_left(given, parts, folder, workers=0)
    for row in rows_of(folder, parts):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
