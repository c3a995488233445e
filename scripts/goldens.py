"""
What seven small runs compute, to the last bit: before and after a change that should change nothing.

    python scripts/goldens.py --to before.json            # on the version before
    python scripts/goldens.py --against before.json       # on the version after: prints what differs, and ends with 1

Token ids, masks, log-probs, advantages, losses, gradient norms and weights of: the quickstart (20 steps), two ranks,
a resumed run, `max_staleness: 2`, two passes over each batch, images, and a mixture of experts whose routes are
replayed. Both on one machine: another CPU rounds otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

RECIPE = ROOT / "recipes/quickstart.yaml"
SHORT = ["--max_steps", "6", "--per_device_train_batch_size", "16", "--do_eval", "false"]
TIMED = ("time", "second", "runtime", "memory", "per_second", "tokens/s", "flos", "rollout/ahead")
"""What a line of metrics measures of the machine."""


def train(folder: Path, *options: str, processes: int = 1) -> None:
    """Trains the quickstart with other options, in processes of its own."""
    launch = ["accelerate.commands.launch", "--num_processes", str(processes), "--cpu", "--main_process_port", "0"]
    module = [*launch, "-m", "mt_grpo"] if processes > 1 else ["mt_grpo"]
    command = [sys.executable, "-m", *module, "train", "--config", str(RECIPE), "--output_dir", str(folder)]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *options], env=shared, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join([*command, *options])}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def resumed(folder: Path) -> None:
    """Six steps, of which the last three are trained again from the checkpoint of the third."""
    train(folder, *SHORT, "--save_strategy", "steps", "--save_steps", "3")
    shutil.rmtree(folder / "checkpoint-6")
    saved = ["--save_strategy", "steps", "--save_steps", "3", "--resume_from_checkpoint", str(folder / "checkpoint-3")]
    train(folder, *SHORT, *saved, "--overwrite_output_dir", "false")


def mixture(folder: Path) -> None:
    """A mixture of experts, whose routes are recorded while sampling."""
    from support.mixtures import build_mixture
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "mt_grpo/data/embedded/model")
    model = folder.parent / "mixture_model"
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    build_mixture(vocabulary=len(tokenizer), **ids).save_pretrained(model)
    tokenizer.save_pretrained(model)
    train(folder, *SHORT, "--model_name_or_path", str(model), "--max_turn_length", "24")


def images(folder: Path) -> None:
    """Images in prompts and in what an environment answers, with a history that is rewritten."""
    import torch
    from datasets import Dataset
    from support.images import build_processor, build_vision_model, picture
    from support.models import CPU_RUN

    from mt_grpo import MTGRPOConfig, MTGRPOEnvTrainer
    from mt_grpo.envs import Outcome

    class Screen:
        async def run(self, policy: Any, row: dict[str, Any]) -> Outcome:
            messages = list(row["prompt"])
            for number in range(3):
                turn = await policy.reply(messages, max_tokens=6)
                shown = [{"type": "text", "text": "Now"}, picture("blue", (16, 16 + 8 * number))]
                messages += [turn.message, {"role": "user", "content": shown}]
                if number == 1:
                    del messages[1:3]
            return Outcome()

        async def close(self) -> None:
            pass

    def words(completions: list[Any], **columns: Any) -> list[float]:
        return [float(sum(map(ord, str(messages[0]["content"]))) % 7) for messages in completions]

    torch.set_num_threads(1)
    processor = build_processor()
    asked = [{"role": "user", "content": "What is it?"}]
    colors = ("red", "green", "blue", "white")
    shown = [picture(color, (24, 16 + 8 * number)) for number, color in enumerate(colors)]
    rows = Dataset.from_list([{"prompt": asked, "images": [image]} for image in shown])
    options = {**CPU_RUN, "max_steps": 3, "learning_rate": 1e-3, "seed": 3, "max_turn_length": 6}
    trainer = MTGRPOEnvTrainer(
        build_vision_model(processor.tokenizer),
        Screen,
        args=MTGRPOConfig(str(folder), **options),
        reward_funcs=words,
        train_dataset=rows,
        processing_class=processor,
    )
    trainer.train()
    trainer.save_model(str(folder))


RUNS: dict[str, Callable[[Path], None]] = {
    "quickstart": lambda folder: train(folder, "--max_steps", "20", "--do_eval", "false"),
    "two_ranks": lambda folder: train(folder, *SHORT, processes=2),
    "resumed": resumed,
    "stale": lambda folder: train(folder, *SHORT, "--max_staleness", "2"),
    "two_passes": lambda folder: train(folder, *SHORT, "--num_iterations", "2", "--beta", "0.01"),
    "images": images,
    "mixture": mixture,
}


def timing_free(name: str, key: str) -> bool:
    """Whether a number is the same whenever a conversation was sampled. With batches ahead, few are."""
    return name != "stale" or key.startswith("file:") or key == "train-0-0.rank0.parquet:tokens"


def digest(folder: Path) -> dict[str, str]:
    """Each number of a run by where it stands, as a checksum."""
    import pyarrow.parquet as pq
    from safetensors.numpy import load_file

    found: dict[str, str] = {}

    def add(name: str, value: bytes) -> None:
        found[name] = hashlib.sha256(value).hexdigest()[:16]

    for path in sorted(folder.glob("rollouts/*.parquet")):
        table = pq.read_table(path)
        order = sorted(range(table.num_rows), key=[str(s) for s in table["session"].to_pylist()].__getitem__)
        for column in table.column_names:
            if column not in ("record", "session", "parts"):
                values = table[column].to_pylist()
                add(f"{path.name}:{column}", repr([values[row] for row in order]).encode())
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        kept = {key: value for key, value in line.items() if not any(word in key for word in TIMED)}
        for key, value in kept.items():
            add(f"metrics:{line.get('step')}:{key}", repr(value).encode())
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in sorted(load_file(path).items()):
            add(f"{path.name}:{name}", tensor.tobytes())
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        add(f"file:{path.relative_to(folder)}", b"")
    return found


def main() -> int:
    """Runs, and writes or compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, help="write the checksums here")
    parser.add_argument("--against", type=Path, help="compare with what was written there")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    asked = parser.parse_args()
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.only:
            RUNS[name](Path(folder) / name)
            numbers = digest(Path(folder) / name)
            found[name] = {key: value for key, value in numbers.items() if timing_free(name, key)}
            print(f"{name}: {len(found[name])} numbers", flush=True)
    if asked.to:
        asked.to.write_text(json.dumps(found, indent=1))
    if not asked.against:
        return 0
    before = json.loads(asked.against.read_text())
    bad = 0
    for name, numbers in found.items():
        other = before[name]
        differs = sorted(key for key in numbers.keys() | other.keys() if numbers.get(key) != other.get(key))
        bad += len(differs)
        print(f"{name}: {len(differs)} of {len(numbers)} differ" + "".join(f"\n    {key}" for key in differs[:12]))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
