"""From a recipe to a trainer: everything it names is checked and put together before any work starts."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import yaml
from datasets import Dataset, IterableDataset
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from trl import get_peft_config, get_quantization_config

from mt_grpo.app.recipe import Recipe
from mt_grpo.data import check_apart, load_rows
from mt_grpo.envs import EnvSource, MultiTurnToolEnv
from mt_grpo.envs.source import COLUMN, named, prototypes
from mt_grpo.errors import ConfigError, libraries_may_refuse
from mt_grpo.option_rules import verifiers_name
from mt_grpo.rewards import load_rewards
from mt_grpo.rollout import ChatRenderer
from mt_grpo.rollout.token_check import examine_template
from mt_grpo.training.checkpoint import (
    adapter_settings,
    batch_options,
    check_adapter,
    check_checkpoint,
    find_checkpoint,
)
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.environment import check_env, prepare_tokenizer
from mt_grpo.training.factories import evaluation_rows, rows_of
from mt_grpo.training.folder import check_folder
from mt_grpo.training.model import resolve_base, resolve_model
from mt_grpo.training.preflight import check_batch_sizes, check_reward_columns, check_surroundings, check_training
from mt_grpo.training.reward_models import with_models
from mt_grpo.training.trainer import MTGRPOEnvTrainer

logger = logging.getLogger(__name__)


def load_datasets(recipe: Recipe) -> tuple[Dataset | None, Dataset | None]:
    """The training rows of a recipe, and its evaluation rows where it evaluates (`do_eval`)."""
    script = recipe.script
    if script.dataset_name is None:  # environments of a factory or of verifiers may bring their own prompts
        if recipe.training.do_eval and verifiers_name(recipe.training.env) is None:
            raise ConfigError("`do_eval: true` needs a dataset of questions to measure: set `dataset_name`.")
        return None, None

    def load(split: str) -> Dataset:
        return load_rows(
            script.dataset_name,
            split,
            config=script.dataset_config,
            column_mapping=script.column_mapping,
            streaming=script.dataset_streaming,
        )

    train = load(script.dataset_train_split)
    if not recipe.training.do_eval:
        return train, None
    check_apart(script.dataset_name, script.dataset_train_split, script.dataset_test_split, train)
    return train, load(script.dataset_test_split)


def prompt_lengths(
    tokenizer: PreTrainedTokenizerBase, env: EnvSource, template_kwargs: dict[str, Any] | None = None
) -> Callable[[dict[str, Any]], int]:
    """
    Returns a function from a row to the tokens of its prompt: 0 for a row whose first messages only a conversation
    can tell.
    """
    renderers = {
        id(one): ChatRenderer(tokenizer, one.tool_schemas, template_kwargs, one.protocol.tags)
        for one in prototypes(env)
        if isinstance(one, MultiTurnToolEnv) and type(one).reset is MultiTurnToolEnv.reset
    }

    def length(row: dict[str, Any]) -> int:
        source = env
        while isinstance(source, dict):
            source = named(source, row)
        if id(source) not in renderers:
            return 0
        try:
            return len(renderers[id(source)].prompt_ids(source.start(row["prompt"])))
        except Exception:  # the user's code or the template refuses the row: so will its conversation, and say why
            return 0

    return length


def drop_long_prompts(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    env: EnvSource,
    context_length: int,
    template_kwargs: dict[str, Any] | None = None,
) -> Dataset:
    """
    Drops rows whose prompt leaves no room for an answer in the model's context, with a counted warning. A row whose
    first messages only a conversation can tell is kept.

    Raises:
        ConfigError: If that is all of them.
    """
    length = prompt_lengths(tokenizer, env, template_kwargs)
    if isinstance(dataset, IterableDataset):
        return dataset.filter(lambda row: length(row) < context_length)
    lengths = [
        length(row)
        for row in dataset.select_columns([name for name in ("prompt", COLUMN) if name in dataset.column_names])
    ]
    keep = [index for index, size in enumerate(lengths) if size < context_length]
    if not keep:
        raise ConfigError(
            f"Every prompt is too long for the model's context of {context_length} tokens (the shortest has "
            f"{min(lengths)}): use a model with a longer context, or a shorter `system_prompt`."
        )
    if len(keep) < len(dataset):
        logger.warning(
            "Dropped %d of %d rows: their prompts leave no room in the model's context of %d tokens.",
            len(dataset) - len(keep),
            len(dataset),
            context_length,
        )
    return dataset.select(keep)


def build_trainer(recipe: Recipe, trains: bool = True, writes: bool = True) -> MTGRPOEnvTrainer:
    """
    Everything a recipe names, checked and put together; bad input is refused with one sentence.

    Args:
        recipe (`Recipe`): What to build.
        trains (`bool`, *optional*, defaults to `True`): Whether it is to be trained, so that what only training needs
            is checked as well.
        writes (`bool`, *optional*, defaults to `True`): Whether `output_dir` and the Hub may be written to.
    """
    args, model = recipe.training, recipe.model
    if trains:
        check_batch_sizes(args)
    else:  # nothing is recorded either
        args.push_to_hub, args.report_to = False, []
    check_surroundings(args)
    args.resume_from_checkpoint = find_checkpoint(args.resume_from_checkpoint, args.output_dir)
    checkpoint = Path(args.resume_from_checkpoint) if trains and args.resume_from_checkpoint else None
    if checkpoint is not None:
        check_checkpoint(checkpoint, batch_options(args), args.process_index, args.world_size)
    if trains:
        check_folder(args, model.model_name_or_path)
    datasets.disable_progress_bars()
    turn_rewards = load_rewards(args.turn_reward_funcs or [], "turn")
    outcome_rewards = load_rewards(with_models(args.outcome_reward_funcs or [], args), "outcome")
    train_dataset, eval_dataset = load_datasets(recipe)
    env = check_env(None, args, train_dataset, eval_dataset)
    train_dataset, eval_dataset = rows_of(train_dataset, env, args), evaluation_rows(eval_dataset, env, args)
    check_reward_columns([*turn_rewards, *outcome_rewards], train_dataset, eval_dataset)
    if trains:
        check_training(args, train_dataset)
    name = resolve_model(model.model_name_or_path, model.model_revision)
    base, peft_config = resolve_base(name), get_peft_config(model)
    if checkpoint is not None:
        check_adapter(checkpoint, adapter_settings(name) or (peft_config and peft_config.to_dict()))
    source = {"revision": model.model_revision, "trust_remote_code": args.trust_remote_code}
    with libraries_may_refuse(f"The model {name!r} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(base, **source)
        config = AutoConfig.from_pretrained(base, **source)
    prepare_tokenizer(tokenizer, env)
    context_length = config.get_text_config().max_position_embeddings
    if args.use_vllm and args.vllm_max_model_length:
        context_length = min(context_length, args.vllm_max_model_length)
    rows = train_dataset
    train_dataset = drop_long_prompts(rows, tokenizer, env, context_length, args.chat_template_kwargs)
    if trains and not isinstance(rows, IterableDataset):
        check_training(args, train_dataset, dropped=len(rows) - len(train_dataset))
    if eval_dataset is not None:
        eval_dataset = drop_long_prompts(eval_dataset, tokenizer, env, context_length, args.chat_template_kwargs)
    args.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(args.model_init_kwargs or {}),
    }
    left = contextlib.nullcontext() if writes else nothing_left(args)
    with libraries_may_refuse("The trainer cannot be built from these options"), left:
        return MTGRPOEnvTrainer(
            model=name,
            env=env,
            turn_reward_funcs=turn_rewards,
            outcome_reward_funcs=outcome_rewards,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            quantization_config=get_quantization_config(model),
            peft_config=peft_config,
        )


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
