"""What `mt-grpo rollout --save` leaves: a folder of conversations, as a run's, for `view`, `export` and `credit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mt_grpo.app.audit import audit_conversations
from mt_grpo.credit import estimate_parts
from mt_grpo.runlog import Batch, RunWriter
from mt_grpo.runlog.files import to_json
from mt_grpo.training.reward_batch import gather_rewards
from mt_grpo.training.step_log.records import part_rows, run_line
from mt_grpo.training.trainer import MTGRPOEnvTrainer


def save_conversations(trainer: MTGRPOEnvTrainer, resolved: dict[str, Any], folder: str) -> str:
    """Writes the conversations that a trainer ran and scored last, their credit, `config.yaml` and `audit.jsonl`."""
    args, judged, records = trainer.args, trainer.batch, trainer.step_log.records
    size = judged.group_size
    batch = Batch("eval", 0, 0, size, list(range(len(judged.trajectories))), judged.trajectories, records.rewards)
    weights = trainer.reward_weights.to(args.device)
    rewards, _ = gather_rewards(judged.trajectories, judged.scores, weights, size, names=trainer.reward_func_names)
    credit = estimate_parts(
        trainer.credit_rule, rewards, turn_coef=args.turn_advantage_coef, scale_rewards=trainer.scale_rewards
    )
    writer = RunWriter(folder)
    about = {**records.about, "group_size": size, "group_size_eval": size}
    lines = [*writer.save_tokenizer(records.save_tokenizer), run_line(about, records.rewards), *writer.write(batch)]
    pairs = zip(judged.trajectories, credit.advantages.tolist(), strict=True)
    advantages = [values[: len(each.turns)] for each, values in pairs]
    writer.append([*lines, *writer.write_credit(batch, advantages, part_rows(credit, judged.trajectories))])
    config = yaml.safe_dump(resolved, sort_keys=True)
    Path(folder, "config.yaml").write_text(config, encoding="utf-8")
    audit = audit_conversations(trainer)
    line = {name: value for name, value in audit.items() if name not in ("conversations", "failed", "advice")}
    Path(folder, "audit.jsonl").write_text(to_json({"step": 0, **line}) + "\n", encoding="utf-8")
    return f"{len(judged.trajectories)} conversations in {folder}"
