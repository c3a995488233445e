"""Checks of the run itself, and the table of all checks."""

from __future__ import annotations

from collections.abc import Iterator

from datasets import IterableDataset

from mt_grpo.app.doctor import surroundings
from mt_grpo.app.doctor.case import Case
from mt_grpo.app.doctor.findings import FAIL, OK, WARN, Check
from mt_grpo.app.doctor.tool_calls import tools
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.options import check_batches
from mt_grpo.rewards import load_rewards
from mt_grpo.rollout import ChatRenderer, TemplateError
from mt_grpo.rollout.token_check import examine_template
from mt_grpo.training.reward_columns import check_reward_columns
from mt_grpo.training.reward_models import with_models

Lines = Iterator[tuple[str, str, str]]


def processes(case: Case) -> Lines:
    """Whether the stated processes make whole groups."""
    check_batches(case.options, case.processes)
    prompts = case.batch // case.args.num_generations
    yield (
        OK,
        f"{case.processes} of them sample {case.batch} conversations at a time: {prompts} prompts × "
        f"{case.args.num_generations}",
        "",
    )


def model(case: Case) -> Lines:
    """Whether the model's configuration and tokenizer are here."""
    parameters = case.shape.parameters
    case.tokenizer  # noqa: B018, asked for what it may be refused with
    size = f"{parameters / 1e9:.3g} billion" if parameters >= 1e9 else f"{parameters / 1e6:.3g} million"
    what = f"{case.recipe.model.model_name_or_path} has {size} parameters"
    adapter = f", {case.shape.adapter / 1e6:.3g} million more in the adapter" if case.shape.adapter else ""
    yield OK, what + adapter, ""


def rows(case: Case) -> Lines:
    """Whether there are rows for a step, with the columns that rewards read."""
    needed = case.batch // case.args.num_generations
    train, evaluated = case.train_rows, case.rows[1]
    listed = load_rewards(case.args.turn_reward_funcs or [], "turn")
    listed += load_rewards(with_models(case.args.outcome_reward_funcs or [], case.args), "outcome")
    check_reward_columns(listed, train, evaluated)
    if isinstance(train, IterableDataset):
        yield OK, "they are a stream, and its columns are those that rewards read", ""
    elif len(train) < needed:
        mend = "give it more rows, or make the batch smaller (`per_device_train_batch_size`)"
        yield FAIL, f"the training dataset has {len(train)} rows, and one batch takes {needed} prompts", mend
    else:
        yield OK, f"{len(train)} rows to train on, {needed} in a batch, with the columns that rewards read", ""


def template(case: Case) -> Lines:
    """Whether the chat template only appends."""
    for one in case.environments:
        if not isinstance(one, MultiTurnToolEnv):
            continue
        try:
            renderer = ChatRenderer(
                case.tokenizer, one.tool_schemas, case.args.chat_template_kwargs, tags=one.protocol.tags
            )
        except TemplateError as error:
            yield FAIL, str(error), "name another by `chat_template_path`"
            continue
        verdict = examine_template(renderer).removeprefix("Chat template: ").removesuffix(".")
        read = verdict if one.protocol.native_tools else verdict.split("; ")[-1]  # results are user messages
        if "refuses" in read:
            mend = "choose another `call_protocol`, or a model whose template takes them (`chat_template_path`)"
            yield FAIL, f"it {read}", mend
        elif "rewrites" in read:
            mend = "the trajectory keeps what was sampled; see docs/history.md for what the model is to see"
            yield WARN, verdict, mend
        else:
            yield OK, verdict, ""


def lengths(case: Case) -> Lines:
    """Whether the longest conversation fits into the context."""
    longest, room = max(case.prompt_lengths), case.args.max_completion_length
    what = f"the longest prompt has {longest} tokens"
    if min(case.prompt_lengths) >= case.context:
        yield FAIL, f"{what}, and the context {case.context}", "use a model with a longer context, or shorter prompts"
    elif longest >= case.context:
        yield WARN, f"{what}, and the context {case.context}: such rows are dropped", "shorten them"
    elif longest + room > case.context:
        largest = case.context - longest
        yield (
            WARN,
            f"{what}, and with `max_completion_length: {room}` that is more than the context of {case.context}, where "
            "conversations then end",
            f"set `max_completion_length: {largest}`"
            + (", or raise `vllm_max_model_length`" if case.args.use_vllm and case.args.vllm_max_model_length else ""),
        )
    else:
        yield OK, f"{what}; with {room} after it, it fits the context of {case.context}", ""


CHECKS: dict[str, Check] = {
    "processes": processes,
    "device": surroundings.device,
    "model": model,
    "rows": rows,
    "template": template,
    "lengths": lengths,
    "tools": tools,
    "server": surroundings.server,
    ".venv-vllm": surroundings.server_environment,
    "ports": surroundings.ports,
    "report_to": surroundings.trackers,
    "output_dir": surroundings.output,
}
"""Checks that come before the plan, by name."""
