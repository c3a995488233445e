"""`mt-grpo train --dry_run`: everything is checked and built; nothing is sampled, and nothing is left behind."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from mt_grpo.rollout.token_check import examine_template
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.trainer import MTGRPOEnvTrainer


@contextlib.contextmanager
def nothing_left(args: MTGRPOConfig) -> Iterator[None]:
    """Keeps a trainer that is built from making a repository on the Hub, and `output_dir` from staying."""
    folder = Path(args.output_dir)
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    pushes, args.push_to_hub = args.push_to_hub, False
    try:
        yield
    finally:
        args.push_to_hub = pushes
        for path in missing if args.should_save else []:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def finish_dry_run(trainer: MTGRPOEnvTrainer, resolved: dict[str, Any]) -> None:
    """
    Lets the servers go, and prints the resolved recipe as YAML; on standard error, what else is known.

    Args:
        trainer (`MTGRPOEnvTrainer`): Built, with its servers claimed.
        resolved (`dict`): Every option with its value.
    """
    if trainer.weight_sync is not None:
        trainer.weight_sync.close()
    if trainer.accelerator.is_main_process:
        print(yaml.safe_dump(resolved, sort_keys=True), end="", flush=True)
        print(examine_template(trainer.runner.renderer), file=sys.stderr)
        print("mt-grpo: everything is in place for this run; nothing was sampled or written.", file=sys.stderr)
