"""The card of a trained model: what it was made of, where it acts, what it was rewarded for, how it was measured."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from mt_grpo.credit import rule_label
from mt_grpo.imports import FORMATS, looks_like_path

_About = Mapping[str, Any]

logger = logging.getLogger(__name__)

_PAPER = textwrap.dedent("""\
    @article{zeng2025reinforcing,
        title   = {{Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level Credit Assignment}},
        author  = {Siliang Zeng and Quan Wei and William Brown and Oana Frunza and Yuriy Nevmyvaka and Mingyi Hong},
        year    = 2025,
        eprint  = {arXiv:2505.11821v1},
    }""")
"""Where MT-GRPO comes from; the second version of the paper has another title and is about other methods."""

_PROTOCOLS = {
    "native": "tool calls in the format of its chat template",
    "tags": "tags in its text (`<tool>`, `<result>`, `<answer>`), which its system prompt explains",
    "learnt_tags": "tags in its text (`<tool>`, `<result>`, `<answer>`), which it has learnt",
    "plain": "text without tools",
}
_TOLD = ("learning_rate", "num_generations", "temperature", "loss_type", "beta", "load_in_4bit", "seed")
"""Options that a reader of the card asks for."""


def write_card(
    to: Path,
    name: str,
    about: _About,
    rewards: Sequence[_About],
    evaluations: Sequence[_About],
    *,
    step: int,
    options: _About | None = None,
    adapter: bool = False,
    tags: Iterable[str] = (),
) -> None:
    """Writes a model's `README.md`, from the run's index, held-out metrics after `step` steps and options."""
    path = to / "README.md"
    if path.exists() and not path.read_bytes().startswith(b"---"):  # as a card begins, with what the Hub reads
        logger.warning("%s is no card of a model and stays as it is, so the model has none.", path)
        return
    options = {**(about.get("options") or {}), **(options or {})}
    base = str(options.get("model_name_or_path") or about.get("model", ""))
    data = str(options.get("dataset_name") or "")
    of_hub = "/" in base and not looks_like_path(base) and not Path(base).exists()
    shared = "/" in data and not looks_like_path(data) and ":" not in data and Path(data).suffix not in FORMATS
    meta = ModelCardData(
        base_model=base if of_hub else None,
        datasets=data if shared and not Path(data).exists() else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        model_name=name,
        tags=sorted({"mt-grpo", "grpo", "trl", "agent", *tags}),
    )
    named = f"`{Path(base).name}`" if base else "a model that the run does not name"
    link = f"[{base}](https://huggingface.co/{base})" if of_hub else named
    versions = ", ".join(f"{package} {version}" for package, version in (about.get("versions") or {}).items())
    parts = [
        f"# {name}",
        f"{'An adapter of' if adapter else 'Trained from'} {link}: an agent of several turns, trained for {step} "
        "optimiser steps with GRPO that credits each turn, as MT-GRPO does, by mt-grpo and "
        f"[TRL](https://github.com/huggingface/trl){f', on {_code(data)}' if data else ''}.",
        "## Environment",
        *_environment(about, options),
        "## Rewards",
        _table(
            ("reward", "of each", "weight", "at most"),
            [
                (f"`{each['name']}`", _OF[each["kind"]], f"{each['weight']:g}", _number(each.get("maximum")))
                for each in rewards
            ],
        ),
        f"Credit of a turn: `{rule_label(about['rule'])}`. {about.get('rule_says', '')}" if "rule" in about else "",
        "## Evaluation",
        *_evaluation(rewards, evaluations, step, options),
        "## Use",
        "It acts in its environment: `mt-grpo chat FOLDER` is that environment with you as the user, and `mt-grpo "
        "serve FOLDER` an OpenAI-compatible endpoint, FOLDER being a copy of these files with `config.yaml`.",
        "## Training",
        "\n".join(f"- `{option}`: {options[option]}" for option in _TOLD if options.get(option) not in (None, False)),
        *([f"Versions: {versions}."] if versions else []),
        "## Citation",
        f"```bibtex\n{_PAPER}\n```",
    ]
    card = ModelCard(f"---\n{meta.to_yaml()}\n---\n\n" + "\n\n".join(filter(None, parts)) + "\n")
    card.save(path)


_OF = {"turn": "turn", "outcome": "conversation"}


def _environment(about: _About, options: _About) -> list[str]:
    tools = ", ".join(f"`{tool}`" for tool in about.get("tools", ())) or "none"
    lines = [f"- Tools: {tools}"] if "tools" in about else []
    env = options.get("env") or options.get("environment_factory") or options.get("agent")
    if env or options.get("environments"):
        lines.append(f"- Environment: {_code(env or ', '.join(map(str, options['environments'])))}")
    protocol = options.get("call_protocol")
    if protocol is not None:
        lines.append(f"- It calls tools by `call_protocol: {protocol}`: {_PROTOCOLS.get(protocol, 'its own')}")
    limits = {
        "max_env_steps": "replies of the environment",
        "max_turn_length": "tokens in a turn",
        "max_completion_length": "tokens in a conversation after the prompt",
    }
    said = [f"{options[option]} {what}" for option, what in limits.items() if options.get(option)]
    lines += [f"- Trained with at most {', '.join(said)}"] if said else []
    if about.get("chat_template_kwargs"):
        lines.append(f"- Variables of the chat template: {_code(about['chat_template_kwargs'])}")
    prompt = options.get("system_prompt")
    return [
        "\n".join(lines),
        *([f"System prompt:\n\n{textwrap.indent(prompt, '> ', lambda line: True)}"] if prompt else []),
    ]


def _evaluation(rewards: Sequence[_About], rows: Sequence[_About], step: int, options: _About) -> list[str]:
    """The first evaluation, and that of the model which was kept, as a table for each set of questions."""
    text = []
    rows = [row for row in rows if row["step"] <= step]
    best = str(options.get("metric_for_best_model") or "eval_loss") if options.get("load_best_model_at_end") else None
    best = best if best is None or best.startswith("eval_") else f"eval_{best}"
    means = {key for row in rows for key in row if key.startswith("eval_") and key.endswith("reward")}
    for prefix in sorted(key.removesuffix("reward") for key in means if "/" not in key):
        found = {row["step"]: row for row in rows if f"{prefix}reward" in row}
        last = max(found)
        if best is not None:
            kept = [at for at, row in found.items() if row.get(best) is not None]
            sign = -1 if options.get("greater_is_better") is False or best.endswith("loss") else 1
            last = max(kept, key=lambda at: sign * found[at][best]) if kept else last
        steps = sorted({min(found), last})
        names = {f"{prefix}reward": "all, weighted"}
        names |= {f"{prefix}rewards/{each['name']}/mean": f"`{each['name']}`" for each in rewards}
        names |= {f"{prefix}turns/mean": "turns"}
        cells = [(name, *(_number(found[at].get(key)) for at in steps)) for key, name in names.items()]
        label = prefix.removeprefix("eval_").rstrip("_")
        split = options.get("dataset_test_split") if options.get("dataset_name") else None
        what = f"the set `{label}`" if label else f"the split `{split}`" if split else "held-out questions"
        late = f" The model was kept after step {step}." if last < step and best is None else ""
        text.append(f"Means over {what}, measured by the run itself.{late}")
        text.append(_table(("", *(f"step {at}" for at in steps)), cells))
    return text or ["The run measured nothing on held-out questions."]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _code(value: object) -> str:
    text = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
    return f"`{text}`"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
