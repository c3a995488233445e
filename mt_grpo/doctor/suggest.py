"""
Numbers to start from, each with its source: the table of docs/choose.md, and what `mt-grpo doctor --suggest` makes a
recipe of for a model, data and GPUs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from mt_grpo.app.build import build_recipe
from mt_grpo.app.recipe_file import shipped
from mt_grpo.app.request import Request, check_writable, read_request
from mt_grpo.doctor.context import RunFacts
from mt_grpo.doctor.memory import COPIES, RESERVE, SPARE, Load, Sharding
from mt_grpo.errors import ConfigError
from mt_grpo.imports import in_home
from mt_grpo.options.values import DEFAULT_RULE


class _Start(NamedTuple):
    """A number to start from."""

    option: str
    where: str
    value: Any
    source: str
    watch: str


WHOLE, ADAPTER, SMALL = "the whole model", "an adapter (`use_peft`)", "a model below 0.1 billion parameters"
BRIEF, REASONED = "a call or two, and an answer", "reasoning between calls"
_PAPER, _REGRET = "the paper", "LoRA Without Regret"

STARTS = (
    _Start(
        "learning_rate",
        WHOLE,
        1e-6,
        f"TRL's default; {_PAPER}",
        "`reward` falls, or `entropy` goes to 0: a third. Both stand still for 50 steps: three times",
    ),
    _Start("learning_rate", ADAPTER, 1e-5, f"ten times that of the whole model: {_REGRET}", "the same"),
    _Start(
        "learning_rate",
        SMALL,
        3e-4,
        "[our quickstart](measurements.md#rollouts-and-training-at-the-same-time); seven times that forgot all",
        "the same",
    ),
    _Start("lora_r", ADAPTER, 32, f"our 1.5B recipe; in RL rank 1 is enough by {_REGRET}", "memory: smaller"),
    _Start("lora_alpha", ADAPTER, 64, "our 1.5B recipe", "change the rate instead"),
    _Start("lora_target_modules", ADAPTER, "all-linear", f"{_REGRET}: attention alone learns less", "-"),
    _Start(
        "num_generations",
        "",
        8,
        f"TRL's default; {_PAPER} has 21",
        "`credit/groups_without_signal` above a half: 16, or [sample again](credit.md#groups-without-signal)",
    ),
    _Start(
        "prompts of a step",
        "",
        16,
        f"{_PAPER} (16 × 21 conversations)",
        "`mt-grpo compare` shows nothing within 100 steps: more",
    ),
    _Start("max_turn_length", "", 1024, _PAPER, "`stop/length` above .05: twice"),
    _Start("max_completion_length", BRIEF, 1024, _PAPER, "`stop/token_budget` above .05: twice"),
    _Start("max_completion_length", REASONED, 4096, "our GSM8K recipes", "the same; out of memory: half"),
    _Start("max_env_steps", "", 8, "our GSM8K recipes; the paper has 2", "`stop/max_steps` above .05: twice"),
    _Start(
        "advantage_estimator",
        "",
        DEFAULT_RULE,
        "[eight designs](measurements.md#credit-rules): below its start where outcomes are noise or rates high",
        "[`mt-grpo credit`](credit.md#which-rule-suits-my-rewards) on 32 groups",
    ),
    _Start(
        "max_staleness",
        "sampling and training take turns",
        0,
        "TRL's trainer, which is on policy",
        "tools are slow: a server on other GPUs",
    ),
    _Start(
        "max_staleness",
        "a server on other GPUs",
        1,
        "[measured](measurements.md#rollouts-and-training-at-the-same-time): learns the same, steps take 1 / 1.89",
        "`reward` falls: 0, or a smaller rate",
    ),
    _Start(
        "temperature", "", 1.0, "TRL's default; the paper has 0.9", "members of groups are the same: do not lower it"
    ),
    _Start("beta", "", 0.0, "TRL's default; the paper", "answers lose their language: 0.001"),
    _Start("max_grad_norm", "", 0.1, _PAPER, "`grad_norm` far above it all the time: a smaller rate"),
    _Start("warmup_steps", "", 20, _PAPER, "-"),
    _Start("max_steps", "", 300, _PAPER, "the curve still rises: resume with more"),
    _Start(
        "rows to evaluate on",
        "",
        240,
        "a share of .5 is known to ± .063 (1.96 √(.25 / 240))",
        "`mt-grpo compare` says *not shown to differ*: four times as many halve the interval",
    ),
    _Start(
        "Python sandboxes at once",
        "",
        "cores",
        "[the tool's own limit](python_sandbox.md); not measured",
        "`tool` parts of a step in `mt-grpo view`: more cores",
    ),
    _Start(
        "max_concurrent_rollouts",
        "containers",
        "memory / that of a task",
        "`task.toml`; not measured",
        "`stop/env_error` of containers that did not start: fewer",
    ),
)
"""Numbers to start from. `python scripts/write_options.py` writes them to docs/choose.md."""


def _start(option: str, where: str = "") -> Any:
    """The number of the table for an option, and for some runs."""
    return next(one.value for one in STARTS if (one.option, one.where) == (option, where))


def fill_numbers(page: str) -> str:
    """A page of the docs with the table between its two marks made again."""
    begin, end = "<!-- numbers -->\n", "<!-- end of numbers -->"
    head, found, rest = page.partition(begin)
    return head + found + _table() + "\n" + end + rest.partition(end)[2] if found else page


def _table() -> str:
    rows = [("what", "where", "start with", "source", "what to look at, to change it"), ("---",) * 5]
    for one in STARTS:
        name = one.option if " " in one.option else f"`{one.option}`"
        value = yaml.safe_dump(one.value, default_flow_style=True, sort_keys=False).removesuffix("\n...\n").strip()
        rows.append((name, one.where, f"{one.value:g}" if isinstance(one.value, float) else value, *one[3:]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


_OF_DATA = {"embedded": "quickstart.yaml", "gsm8k": "Qwen/gsm8k.yaml", "triviaqa": "Qwen/triviaqa_7b.yaml"}
"""Recipes that have an agent and rewards for data that the package knows."""
_AGENT = (
    *("dataset_train_split", "dataset_test_split", "system_prompt", "tools", "call_protocol", "max_env_steps"),
    *("tool_timeout", "rollout_timeout", "turn_reward_funcs", "outcome_reward_funcs", "do_eval"),
    "num_generations_eval",
)
_OF_TAGS = ("format_reward_func", "xml_reward_func")
_ROWS = (16, 8, 4, 2, 1)
_SMALL = 1e8
_MOST_SERVED = 0.65  # share of a GPU that a server plans with, as in the recipes
_ROUND = 1024  # tokens that lengths are multiples of


def suggest(request: Request) -> Request:
    """Writes a recipe and reads it as a user would; `ConfigError` if the file is there, or nothing fits the memory."""
    path = in_home(request.own["suggest"])
    if os.path.exists(path):
        raise ConfigError(f"{path} is there already: give `--suggest` another file, or remove it.")
    check_writable(str(path.absolute().parent), f"`--suggest {path}`")
    options, sharding = _fitting(request)
    processes = _processes(request)
    launch = f" --accelerate_config {sharding} --num_processes {processes}" if processes > 1 else ""
    gpus = f", {processes} × {request.own['gpu'] or 'GPU'}" if "use_cpu" not in options else ""
    head = (
        f"# {options['model_name_or_path']} on {options.get('dataset_name', 'its environment')}{gpus}: numbers to "
        "start from, and when to change them: docs/choose.md.\n"
        f"#   mt-grpo train {path}{launch}\n"
    )
    text = yaml.safe_dump(options, sort_keys=False, default_flow_style=None, width=1000, allow_unicode=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:
        file.write(head + text)
    written = read_request([str(path)], "doctor")
    own = {"accelerate_config": sharding if processes > 1 else None, "num_processes": processes, "suggest": None}
    return replace(written, own={**request.own, **own})


def _processes(request: Request) -> int:
    return request.own["num_processes"] or 1


def _group(request: Request) -> int:
    return int(request.values.get("num_generations") or _start("num_generations"))


def _prompts(request: Request) -> int:
    """Prompts of a step, which the processes share evenly."""
    return math.ceil(_start("prompts of a step") / _processes(request)) * _processes(request)


def _fitting(request: Request) -> tuple[dict[str, Any], str]:
    """Options that fit, those first that change most of the model, and the way to spread its states."""
    needed: list[float] = []
    for way in _ways(request):
        facts = _facts(request, way)
        lengths = [_start("max_completion_length", REASONED) // 2**power for power in range(3)]
        given = request.values.get("max_completion_length")
        room = max(1, facts.context - facts.prompt)
        for length in [given] if given else dict.fromkeys(min(length, room) for length in lengths):
            longest = min(facts.context, math.ceil((facts.prompt + length) / _ROUND) * _ROUND)
            stated = request.values.get("per_device_train_batch_size")
            for rows in [stated] if stated else _ROWS:
                load = replace(facts.load, rows=rows, completion=length, context=longest)
                for sharding in facts.candidates():
                    if facts.processes > 1 and sharding is COPIES:  # no configuration that ships makes them
                        continue
                    if (share := _share(facts, load, sharding, longest)) is not None:
                        launched = request.own["accelerate_config"] or sharding.name.split()[0]
                        return _whole(request, facts, way, (length, longest, rows, share)), launched
                    needed.append(load.needs(sharding))
    raise ConfigError(
        f"No way is known here to train {request.values['model_name_or_path']} in this memory: the least that was "
        f"tried takes {math.ceil(min(needed) / 1e9)} GB for training alone. State larger GPUs or more of them "
        "(`--gpu`, `--num_processes`), or a smaller model."
    )


def _ways(request: Request) -> Iterator[dict[str, Any]]:
    """Options of the whole model, of an adapter, and of one of a quantised model, which samples without a server."""
    own = request.own
    if request.values.get("use_cpu") or not (own["gpu"] or own["gpu_memory"] or torch.cuda.is_available()):
        yield {"dtype": "float32", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
        return
    gpu = {"bf16": True, "gradient_checkpointing": True}
    server = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "vllm_importance_sampling_mode": "token_truncate",
    }
    # one process has no optimiser's weights in float32 beside those of the model, and steps of 1e-6 would be lost
    alone = _processes(request) == 1 and own["accelerate_config"] is None
    yield {"dtype": "float32" if alone else "bfloat16", **gpu, **server}
    names = ("lora_r", "lora_alpha", "lora_target_modules")
    adapter = {"dtype": "bfloat16", "use_peft": True, **{name: _start(name, ADAPTER) for name in names}, **gpu}
    yield {**adapter, **server}
    yield {**adapter, "load_in_4bit": True}


def _facts(request: Request, way: dict[str, Any]) -> RunFacts:
    sizes = {"per_device_train_batch_size": _prompts(request) * _group(request) // _processes(request)}
    values = {**_of_data(request), **way, "num_generations": _group(request), **sizes, **request.values}
    made = Request(recipe=values, own=request.own, values=values)
    return RunFacts(made, build_recipe(made))


def _of_data(request: Request) -> dict[str, Any]:
    """The agent and the rewards of known data; of others whether the answer is right."""
    name = str(request.values.get("dataset_name")).partition(":")[0]
    if name not in _OF_DATA:
        return {"outcome_reward_funcs": ["exact_match_reward_func"]}
    recipe = yaml.safe_load(shipped()[_OF_DATA[name]].read_text(encoding="utf-8"))
    found = {key: recipe[key] for key in _AGENT if key in recipe}
    if request.values["model_name_or_path"] != "embedded":  # which was taught its calls
        found["call_protocol"] = "tags"
    return found


def _share(facts: RunFacts, load: Load, sharding: Sharding, longest: int) -> float | None:
    """The share of a GPU for its server, 0 without one; `None` where the run does not fit."""
    if load.needs(sharding) > SPARE * facts.training_memory / (1 if facts.on_gpu else facts.processes):
        return None
    if not facts.colocated:
        return 0.0
    room = (facts.memory - load.parts(sharding)["states"] - RESERVE) / facts.memory
    share = math.floor(100 * min(_MOST_SERVED, SPARE * room)) / 100
    held = share > 0 and facts.shape.server_tokens(facts.memory, facts.served_size, 1, share)
    return share if held and held >= longest else None


def _whole(
    request: Request, facts: RunFacts, way: dict[str, Any], sizes: tuple[int, int, int, float]
) -> dict[str, Any]:
    """All options of the recipe, in the order of the recipes that ship."""
    length, longest, rows, share = sizes
    given = request.values
    where = SMALL if facts.shape.parameters < _SMALL else ADAPTER if facts.peft is not None else WHOLE
    server = {"vllm_gpu_memory_utilization": share, "vllm_max_model_length": longest} if share else {}
    agent = _of_data(request)
    if agent.get("call_protocol") == "tags" and "tools" in str(facts.tokenizer.chat_template):
        agent["call_protocol"] = "native"
        agent["outcome_reward_funcs"] = [name for name in agent["outcome_reward_funcs"] if name not in _OF_TAGS]
    options: dict[str, Any] = {
        "model_name_or_path": given["model_name_or_path"],
        **({"dataset_name": given["dataset_name"]} if given.get("dataset_name") else {}),
        **way,
        "max_env_steps": _start("max_env_steps"),
        **agent,
        "max_turn_length": min(_start("max_turn_length"), length),
        "max_completion_length": length,
        "advantage_estimator": _start("advantage_estimator"),
        **server,
        "learning_rate": _start("learning_rate", where),
        "lr_scheduler_type": "constant_with_warmup",
        **{name: _start(name) for name in ("warmup_steps", "max_steps")},
        "num_generations": _group(request),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": math.ceil(_prompts(request) * _group(request) / rows / _processes(request)),
        **{name: _start(name) for name in ("max_grad_norm", "beta", "temperature")},
        "output_dir": f"runs/{Path(str(given['model_name_or_path'])).name}",
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 50,
        "save_total_limit": 1,
        "report_to": "none",
    }
    return {**options, **given}
