"""
`mt-grpo credit RUN_DIR`: its command line, and the conversations to compare credit rules on. Imports no torch before
these are known.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from mt_grpo.app.recipe_file import CONFIG, load_schema, read_file
from mt_grpo.app.request import read_words, whole_number
from mt_grpo.errors import UserError
from mt_grpo.options.table import Values
from mt_grpo.preemption import ends_at_once
from mt_grpo.runlog import Run, open_run
from mt_grpo.runlog.files import find
from mt_grpo.runlog.schema import Row

USAGE = {
    "credit": """usage: mt-grpo credit RUN_DIR [--step N] [--max_groups N] [--model_name_or_path NAME] [--json]
       [--trust_remote_code]

compares all credit rules on the rewards of a run: computes the gradient of each turn of its conversations, and says
where the gradient of each rule points and how noisy it is; RUN_DIR is the `output_dir` of a run, or a folder of
`mt-grpo rollout RECIPE.yaml --num_prompts 32 --save FOLDER`

  --step N                   the conversations of this step; without it the first step that has groups
  --max_groups N             so many groups at most
  --model_name_or_path NAME  the model that sampled them, where it is not found by itself
  --trust_remote_code        run code that comes with the model, where it needs some
  --json                     print JSON
"""
}


def credit(arguments: list[str]) -> int:
    """`mt-grpo credit RUN_DIR`."""
    (folder,), options = read_words("credit", arguments, one="the `output_dir` of a run")
    step, most = whole_number(options, "--step", 0), whole_number(options, "--max_groups", 2)
    chosen = _choose(open_run(folder), step, most, options.get("--model_name_or_path"))
    chosen.options["trust_remote_code"] = "--trust_remote_code" in options
    with ends_at_once():
        from mt_grpo.advisor.measure import measure
        from mt_grpo.advisor.report import as_json, show

    found = measure(chosen, tell=lambda line: print(line, file=sys.stderr, flush=True))
    if "--json" in options:
        print(json.dumps(as_json(found), indent=2, allow_nan=False))
    else:
        show(found)
    return 0


_UNSAID = ("num_generations", "per_device_train_batch_size")  # no default holds for a run that does not say them
_USED = (
    *("advantage_estimator", "branch_at", "dtype", "forward", "gradient_accumulation_steps", "loss_type"),
    *("lora_alpha", "lora_r", "lora_target_modules", "mask_truncated_completions", "min_p", "model_name_or_path"),
    *("model_revision", "seed", "temperature", "top_k", "top_p", "turn_advantage_coef", "scale_rewards"),
    *("use_cpu", "use_peft", *_UNSAID),
)
"""The options of a run that are used here."""


@dataclass(frozen=True)
class Chosen:
    """The conversations to compare rules on."""

    run: Run = field(repr=False)
    options: dict[str, Any]
    rows: list[Row] = field(repr=False)
    group_size: int
    mode: str
    step: int
    model: str

    @property
    def groups_per_step(self) -> float:
        """Groups that the run trains on in an optimiser step; all that are taken, where it does not say."""
        whole = len(self.rows) / self.group_size
        rows, size = self.options["per_device_train_batch_size"], self.options["num_generations"]
        if rows is None or size is None:
            return whole
        return rows * self.options["gradient_accumulation_steps"] * self.run.about.get("processes", 1) / size


def _choose(run: Run, step: int | None = None, most: int | None = None, model: str | None = None) -> Chosen:
    """Chooses the groups to compare rules on: those of training, else those of an evaluation."""
    options = _read_options(run)
    groups = _whole_groups(run)
    if step is None:
        step = min((step for step, _ in groups), default=0)
    mode = "train" if (step, "train") in groups else "eval"
    found = groups.get((step, mode), [])
    if not found:
        raise UserError(_why_no_groups(run, step))
    if mode == "train" and options["branch_at"] is not None:
        raise UserError(
            f"The conversations of {run.folder} branch (`branch_at: {options['branch_at']}`), and rules can only be "
            f"compared on conversations that do not: sample some with {rollout_command(run, 32)}."
        )
    if len(found) < 2:
        raise UserError(
            f"Step {step} of {run.folder} has one whole group, and directions are means over several: sample more "
            f"with {rollout_command(run, 32)}."
        )
    if not run.about.get("rewards"):
        raise UserError(f"{run.folder} does not say which rewards its conversations were given: nothing to compare.")
    found = found[:most]
    return Chosen(
        run,
        options,
        [row for group in found for row in group],
        len(found[0]),
        mode,
        step,
        model or _model_of(run, options, step),
    )


def _read_options(run: Run) -> dict[str, Any]:
    """The options of a run that are in `_USED`."""
    path, schema = find(run.folder, CONFIG), load_schema().options
    if path is None:  # a run from Python
        given, where = run.about.get("options") or {}, f"the index of {run.folder}"
    else:
        given, where = read_file(str(path))[0], str(path)
    if given.get("advantage_estimator") is None:  # a recipe may leave it to the rewards
        given = {**given, "advantage_estimator": run.about.get("estimator")}
    options = {name: None if name in _UNSAID else schema[name].default for name in _USED}
    for name in _USED:
        if given.get(name) is not None:
            options[name] = schema[name].read(given[name])
            schema[name].check(name, options[name], f"`{name}` in {where}", in_file=True)
    return options


def rollout_command(run: Run, prompts: int) -> str:
    """The command that samples as the run did; a run from Python has no recipe to name."""
    recipe = "RECIPE.yaml" if find(run.folder, CONFIG) is None else run.folder / CONFIG
    return f"`mt-grpo rollout {recipe} --num_prompts {prompts} --save FOLDER`"


def _whole_groups(run: Run) -> dict[tuple[int, str], list[list[Row]]]:
    """The groups of several conversations by step and mode, without those of which a member is missing."""
    members: dict[tuple[int, str, int, int], list[Row]] = defaultdict(list)
    for row in run.rows:
        if row["mode"] != "discarded":
            members[row["step"], row["mode"], row["k"], row["group"]].append(row)
    groups: dict[tuple[int, str], list[list[Row]]] = defaultdict(list)
    sizes: dict[tuple[int, str], int] = defaultdict(int)
    for (step, mode, *_), group in sorted(members.items()):
        sizes[step, mode] = max(sizes[step, mode], *(row["member"] + 1 for row in group))
        groups[step, mode].append(sorted(group, key=lambda row: row["member"]))
    whole = {key: [group for group in found if len(group) == sizes[key]] for key, found in groups.items()}
    return {key: found for key, found in whole.items() if sizes[key] > 1 and found}


def _why_no_groups(run: Run, step: int) -> str:
    steps = sorted({row["step"] for row in run.rows})
    if steps and step not in steps:
        return f"{run.folder} has no conversations of step {step}: it has those of steps {steps[0]} to {steps[-1]}."
    return (
        f"{run.folder} has no groups of several conversations at step {step}, and rules compare members of a group: "
        "sample some with `mt-grpo rollout RECIPE.yaml --num_generations 8 --num_prompts 32 --save FOLDER`."
    )


def _model_of(run: Run, options: Values, step: int) -> str:
    if step == 0:
        name = options["model_name_or_path"] or run.about.get("model")
        if not isinstance(name, str):
            raise UserError(f"{run.folder} does not name its model: give it with `--model_name_or_path`.")
        return name
    checkpoint = run.folder / f"checkpoint-{step}"
    if not checkpoint.is_dir():
        names = [path.name.removeprefix("checkpoint-") for path in run.folder.glob("checkpoint-*") if path.is_dir()]
        saved = sorted(int(name) for name in names if name.isdecimal())
        there = f"has those of {', '.join(map(str, saved))}" if saved else "has none"
        raise UserError(
            f"The conversations of step {step} were sampled from weights that {run.folder} has no checkpoint of (it "
            f"{there}): choose another `--step`, or name the model with `--model_name_or_path`."
        )
    return str(checkpoint)
