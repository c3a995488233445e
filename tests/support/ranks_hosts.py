"""Two ranks that share no folder and go back behind a checkpoint that the second one has too: `ranks_hosts FOLDER`."""

import os
import shutil
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

import pytest  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from mt_grpo.app.train import leave_group  # noqa: E402
from mt_grpo.envs import MultiTurnToolEnv  # noqa: E402
from mt_grpo.preemption import PreemptedError  # noqa: E402
from mt_grpo.runlog import open_run  # noqa: E402
from mt_grpo.training import MTGRPOEnvTrainer  # noqa: E402
from mt_grpo.training.checkpoint import resume_point  # noqa: E402
from support.models import build_model, build_tokenizer, lookup  # noqa: E402
from support.ranks import ROWS, Length, conversation  # noqa: E402
from support.trainers import trainer_builder  # noqa: E402


class Signal(TrainerCallback):
    """Asks one rank to end the run, after a step that both have saved."""

    def on_save(self, args, state, control, **kwargs):
        if rank == "1" and state.global_step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)


def train(last: int, resumed: int | None, rate: float, *callbacks: TrainerCallback) -> MTGRPOEnvTrainer:
    tokenizer = build_tokenizer()
    options = {"max_steps": last, "learning_rate": rate, "lr_scheduler_type": "constant", "optim": "adamw_torch"}
    options |= {"save_strategy": "steps", "save_steps": 1, "max_completion_length": 480, "advantage_estimator": None}
    model = build_model(tokenizer, max_position_embeddings=1024)
    env = MultiTurnToolEnv([lookup], protocol="learnt_tags", max_steps=6)
    build = trainer_builder(Path("run"), tokenizer, Dataset.from_list(ROWS))
    trainer = build(conversation, model, ((), (Length(),)), env=env, callbacks=list(callbacks), **options)
    with pytest.raises(PreemptedError) if callbacks else nullcontext():
        trainer.train(None if resumed is None else f"run/checkpoint-{resumed}")
    return trainer


def main() -> None:
    own = folder / rank
    own.mkdir()
    os.chdir(own)
    train(3, None, 0.1)
    train(3, 3, 0.1)  # the second host has copies of what it went on from
    train(3, 2, 0.1)
    copy, checkpoint = own / "copy", own / "run" / "checkpoint-2"
    checkpoint.rename(copy)
    train(2, 1, 0.5)
    if rank == "1":  # as if another host had been the second one meanwhile
        shutil.rmtree(checkpoint, ignore_errors=True)
        copy.rename(checkpoint)
        (checkpoint / "model-00001-of-00002.safetensors").touch()  # of an earlier run, with other shards
    trainer = train(4, 2, 0.5, Signal())
    weights = {name: weight.detach() for name, weight in trainer.model.named_parameters()}
    copied = [path.name for path in Path("run/checkpoint-2").iterdir()]
    other = Path("other", "checkpoint-5")
    shutil.copytree(checkpoint, other)
    if rank == "0":  # as if it had been the second host, and been killed before the first had its part
        for path in other.iterdir():
            if path.name != "rollouts-rank1.pt":
                path.unlink()
    resume_point(str(other), trainer.args)
    completed = [path.name for path in other.iterdir()]
    run = open_run("run") if rank == "0" else None
    logged = run and sorted((row["step"], row["rank"]) for row in run.rows)
    result = {"weights": weights, "copied": copied, "completed": completed, "logged": logged}
    torch.save(result, folder / f"result-{rank}.pt")
    accelerator = trainer.accelerator
    del trainer
    leave_group(accelerator)


if __name__ == "__main__":
    main()
