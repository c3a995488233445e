"""
From a request to a trainer: a YAML file and command-line options over it, as dataclasses; the JSON schema that is made
from these; and everything they name, checked and put together before any work starts.
"""

from __future__ import annotations

import argparse
import enum
import json
import logging
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, Field, asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_type_hints

import datasets
import torch
import yaml
from datasets import Dataset, IterableDataset
from pydantic import TypeAdapter
from torch import nn
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    get_scheduler,
)
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from mt_grpo.app.request import Request
from mt_grpo.data import DatasetError, check_apart, fingerprint, load_rows, slice_rows
from mt_grpo.data.images import naming_rows
from mt_grpo.envs import EnvSource, MultiTurnToolEnv
from mt_grpo.envs.protocols import LearntTagProtocol
from mt_grpo.envs.source import COLUMN, source_of
from mt_grpo.errors import MISREAD, ConfigError, describe_error, libraries_may_refuse
from mt_grpo.forward.media import media_tokens
from mt_grpo.forward.probe import context_length
from mt_grpo.media import decoded, read_messages
from mt_grpo.options.table import OF_LIBRARIES, DataOptions, Option, options_of, with_options_in_docstring
from mt_grpo.options.values import (
    brings_rows,
    parse_dataset_filter,
    parse_eval_datasets,
    parse_mapping,
    refuse_unknown,
)
from mt_grpo.rewards import REWARDS
from mt_grpo.rollout import ChatRenderer
from mt_grpo.rollout.endpoint import ChatEndpoint
from mt_grpo.rollout.token_row import examine_template
from mt_grpo.runlog.files import Silence
from mt_grpo.tools.function import cut
from mt_grpo.tools.loading import TOOLS
from mt_grpo.training.checkpoint import adapter_settings, batch_options, check_adapter, check_checkpoint, resume_point
from mt_grpo.training.columns import Rows, check_rows_suffice, with_column_media
from mt_grpo.training.config import MTGRPOConfig, changed, registered_names
from mt_grpo.training.environment import build_env
from mt_grpo.training.model import resolve_base, resolve_model, source_options, subfolder_of, tokenizer_in
from mt_grpo.training.preflight import check_batch_sizes, check_folder, check_surroundings
from mt_grpo.training.reward_batch import refuse_scorers
from mt_grpo.training.trainer import MTGRPOEnvTrainer
from mt_grpo.trajectory import Row, visible

logger = logging.getLogger(__name__)

_MAX_ROWS_READ = 1000  # most rows that are read to find one of each environment
HIDDEN_TOOLS = "describe them in `system_prompt`, or in the prompts themselves"
"""What to do where a prompt lacks the tools."""
_NO_MODEL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
"""Sizes of a model for a trainer whose turns an endpoint takes: nothing is sampled from it."""
_MAX_SHOWN = 10_000  # most characters of a prompt that a dry run prints


@with_options_in_docstring
@dataclass
class MTGRPOScriptArguments(DataOptions, ScriptArguments):
    """TRL's script arguments; `dataset_name` is `embedded`, `triviaqa`, `gsm8k`, a file, a folder or a Hub id."""


@dataclass
class Recipe:
    """A recipe and its command line, parsed."""

    script: MTGRPOScriptArguments
    training: MTGRPOConfig
    model: ModelConfig

    def init_options(self) -> dict[str, Any]:
        """The options with which the model is loaded."""
        model = self.model
        named = {"revision": model.model_revision, "attn_implementation": model.attn_implementation}
        return {**named, "dtype": model.dtype, **(self.training.model_init_kwargs or {})}

    def resolved(self) -> dict[str, Any]:
        """Every option with its value, as plain YAML types, secrets masked: a recipe of the same run."""
        options = {**asdict(self.script), **asdict(self.model), **self.training.to_dict()}
        del options["generation_batch_size"]  # follows from the others, beside which TRL refuses it
        return json.loads(json.dumps(options, default=str))


DATACLASSES = (MTGRPOScriptArguments, MTGRPOConfig, ModelConfig)
"""The dataclasses that hold the options of a recipe."""


class _Parser(TrlParser):
    """TRL's parser, whose errors are the user's to mend."""

    def error(self, message: str) -> None:
        raise ConfigError(message[0].upper() + message[1:] + ".")


def build_recipe(request: Request) -> Recipe:
    """The options of a request, as TRL's parser and the dataclasses take them."""
    parser = _Parser(DATACLASSES, allow_abbrev=False)
    known = {action.dest for action in parser._actions}
    for key in request.recipe:
        refuse_unknown(key, f"The key {key!r} in {request.path}", known)
    for argument in request.arguments:
        option = argument.split("=")[0]
        if option.startswith("--"):
            refuse_unknown(option, f"The option {option!r}", parser._option_string_actions)
    parser.set_defaults_with_config(**request.recipe)
    with libraries_may_refuse("The options do not fit together", TypeError, AttributeError, OverflowError):
        script, training, model = parser.parse_args_into_dataclasses(request.arguments)
    for name in ("lora_modules_to_save", "lora_target_parameters"):
        one = getattr(model, name)
        if isinstance(one, str):  # peft would take each letter for the end of a name
            setattr(model, name, [one])
    layers: Any = model.lora_target_modules
    if isinstance(layers, str) and layers.isidentifier():  # TRL makes a pattern of whole paths of a single name
        model.lora_target_modules = [layers]
    elif isinstance(layers, str):
        try:
            re.compile(layers)
        except re.error as error:
            raise ConfigError(
                f"`lora_target_modules: {layers}` is no regular expression ({error}): list names of layers, or write "
                "`all-linear`."
            ) from error
    script.column_mapping = _columns(script.column_mapping)
    script.eval_datasets = parse_eval_datasets(script.eval_datasets)
    script.dataset_filter = parse_dataset_filter(script.dataset_filter)
    if script.eval_datasets and not training.do_eval:
        raise ConfigError("`eval_datasets` are measured where `do_eval` is true: set it, or leave them out.")
    return Recipe(script, training, model)


def _columns(given: object) -> dict[str, str] | None:
    """The columns to rename, as a recipe or a command line gives them."""
    mapping = parse_mapping(given, "column_mapping")
    if mapping is None:
        return None
    if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in (*mapping, *mapping.values())):
        raise ConfigError(
            f"`column_mapping` is {given!r}: give a mapping from the wanted column to the one that is there, such as "
            "`{prompt: question}`."
        )
    return mapping


# The JSON schema that is made from the dataclasses

_LIBRARIES = ("trl", "transformers")  # whose options are among those of a recipe


def build_schema(options: Sequence[type] = DATACLASSES) -> dict[str, Any]:
    """A JSON schema (draft 7, which editors know) of a recipe."""
    items = {"tools": list(TOOLS), "turn_reward_funcs": list(REWARDS), "outcome_reward_funcs": list(REWARDS)}
    actions = {action.dest: action for action in reversed(_Parser(options)._actions)}
    properties = {}
    for holder in options:
        hints, ours = get_type_hints(holder), options_of(holder)
        for field in fields(holder):
            if field.init:
                owner = next(base for base in holder.__mro__ if field.name in vars(base).get("__annotations__", {}))
                described = ours.get(field.name) or OF_LIBRARIES.get(field.name, Option())
                properties[field.name] = {
                    **_property(field, hints[field.name], actions[field.name], described),
                    "x-owner": "mt_grpo" if field.name in ours else owner.__module__.split(".")[0],
                }
    for name, known in registered_names().items():
        properties[name]["examples"] = known
    for name, known in items.items():
        properties[name]["items"]["examples"] = known
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A recipe of mt-grpo",
        "x-versions": {library: version(library) for library in _LIBRARIES},
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _property(field: Field[Any], hint: Any, action: argparse.Action, described: Option) -> dict[str, Any]:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    default = json.loads(json.dumps(default.value if isinstance(default, enum.Enum) else default, default=str))
    kinds, item = _types(hint)
    flag, many = action.nargs == "?", action.nargs == "+"
    if item == "string":  # one name stands for a list of one
        kinds.append("string")
    kinds += [described.also] if described.also and not item else []
    kinds += ["null"] * (default is None) + ["boolean"] * flag
    takes = list(dict.fromkeys(kinds))
    texts = [described.description, *([] if field.metadata.get("help") == described.description else [action.help])]
    option: dict[str, Any] = {
        "description": " ".join(" ".join(filter(None, texts)).replace("%%", "%").split()),
        "type": takes[0] if len(takes) == 1 else takes,
        "default": default,
    }
    if item:
        option["items"] = {"type": [item, described.also] if described.also else item}
    choices = described.names or action.choices
    if choices:
        option["enum"] = [*choices, *([None] if "null" in takes else [])]
    marks = {"x-flag": flag, "x-many": many, "x-group": described.group, "x-of-server": described.of_server}
    return option | {name: value for name, value in marks.items() if value}


def _types(hint: Any) -> tuple[list[str], str | None]:
    """The JSON types of a type hint, and the type of its items where it may be a list."""
    schema = TypeAdapter(hint).json_schema()

    def resolved(part: dict[str, Any]) -> dict[str, Any]:
        return schema["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part

    parts = [resolved(part) for part in schema.get("anyOf", [schema])]
    items = next((resolved(part["items"])["type"] for part in parts if "items" in part), None)
    return list(dict.fromkeys(part.get("type", "object") for part in parts)), items


# From a recipe to a trainer


def load_datasets(recipe: Recipe) -> tuple[Rows | None, Rows | dict[str, Rows] | None]:
    """The training rows of a recipe, and its evaluation rows, or sets of these, where it evaluates (`do_eval`)."""
    script = recipe.script
    if script.dataset_name is None:  # some environments bring their own rows
        if recipe.training.do_eval and not brings_rows(recipe.training.env):
            raise ConfigError("`do_eval: true` needs a dataset of questions to measure: set `dataset_name`.")
        if script.dataset_filter is not None and not brings_rows(recipe.training.env):
            raise ConfigError("`dataset_filter` chooses rows of a dataset: set `dataset_name`, or leave it out.")
        return None, None

    def load(split: str, name: str = script.dataset_name, config: str | None = script.dataset_config) -> Rows:
        mapping, streaming = script.column_mapping, script.dataset_streaming
        return load_rows(name, split, config=config, column_mapping=mapping, streaming=streaming)

    def held_out(split: str = script.dataset_test_split, **other: str) -> Rows:
        if other.get("dataset_name", script.dataset_name) == script.dataset_name:
            check_apart(script.dataset_name, script.dataset_train_split, split, train)
        elif "dataset_config" not in other:
            other["dataset_config"] = None
        return load(split, *(other.get(key, getattr(script, key)) for key in ("dataset_name", "dataset_config")))

    train = _filtered(load(script.dataset_train_split), script)
    if not recipe.training.do_eval:
        return train, None
    if script.eval_datasets is None:
        return train, held_out()
    return train, {name: held_out(**one) for name, one in script.eval_datasets.items()}


def _own_rows(recipe: Recipe, source: EnvSource) -> tuple[Dataset | None, Dataset | None]:
    """The same of the rows that an environment brings itself."""
    script, chosen = recipe.script, list[Dataset | None]()
    for name, split in (("train", script.dataset_train_split), ("eval", script.dataset_test_split)):
        rows = source.rows(name) if name == "train" or recipe.training.do_eval else None
        chosen.append(rows and slice_rows(rows, split))
        if rows and not chosen[-1]:
            raise DatasetError(f"The split {split!r} has none of the {len(rows)} rows of the environment.")
    train, evaluated = chosen
    return train and _filtered(train, script), evaluated or None


def _filtered(rows: Rows, script: MTGRPOScriptArguments) -> Rows:
    """Rows that `dataset_filter` chooses."""
    chosen = script.dataset_filter
    return rows if chosen is None else _between_rates(rows, chosen["file"], *chosen["between"])


def _between_rates(rows: Rows, file: str, low: float, high: float) -> Rows:
    """The rows of which a model passed from `low` to `high` of its attempts, as `rollout --difficulty` wrote them."""
    if isinstance(rows, datasets.IterableDataset):
        raise DatasetError("`dataset_filter` looks for each row in a file: leave `dataset_streaming` out.")
    attempts: Counter[str] = Counter()
    passed: defaultdict[str, float] = defaultdict(float)
    try:
        for line in Path(file).expanduser().read_text(encoding="utf-8").splitlines():
            found = json.loads(line)
            rate, number, digest = found["rate"], found["attempts"], found["digest"]
            if not isinstance(number, int) or number < 0:
                raise ValueError(f"`attempts` is {number!r}")
            if number and not (isinstance(rate, (int, float)) and 0 <= rate <= 1):
                raise ValueError(f"a `rate` is {rate!r}")
            attempts[digest] += number
            passed[digest] += rate * number if number else 0
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DatasetError(
            f"`dataset_filter` cannot read {file} ({describe_error(error)}): name a file that `mt-grpo rollout "
            "--difficulty` wrote."
        ) from None
    digests = [fingerprint(row)[1] for row in rows]
    unknown = [place for place, each in enumerate(digests) if each not in attempts]
    if unknown:
        raise DatasetError(
            f"{len(unknown)} of {len(rows)} training rows are not in {file}, the first is row {unknown[0]} (counted "
            "from 0): the dataset or `column_mapping` changed since the file was written, or they were not sampled; "
            "run `mt-grpo rollout --difficulty` again, or set `dataset_train_split` to rows that were."
        )
    means = [passed[each] / attempts[each] if attempts[each] else None for each in digests]
    chosen = [place for place, mean in enumerate(means) if mean is not None and low <= mean <= high]
    if not chosen:
        raise DatasetError(
            f"No training row has a rate between {low} and {high} in {file}: set `dataset_filter: between` wider."
        )
    return rows.select(chosen)


def env_of_prompt(source: EnvSource, row: Row) -> MultiTurnToolEnv | None:
    """The environment that makes a row's first messages; `None` if only a conversation can tell, or none is named."""
    try:
        env = next(iter(source.of_row(row).prototypes()), None)
    except ValueError:  # the trainer refuses such a row
        return None
    return env if isinstance(env, MultiTurnToolEnv) and type(env).reset is MultiTurnToolEnv.reset else None


def prompt_lengths(
    tokenizer: PreTrainedTokenizerBase, source: EnvSource, template_kwargs: dict[str, Any] | None = None
) -> Callable[[Row], int]:
    """Returns a function from a row to the tokens of its prompt, 0 for a row whose first messages are not known."""
    renderers: dict[int, ChatRenderer] = {}

    def length(row: Row) -> int:
        env = env_of_prompt(source, row)
        if env is None:
            return 0
        try:
            if id(env) not in renderers:
                renderers[id(env)] = ChatRenderer(tokenizer, env.tool_schemas, template_kwargs, env.protocol.tags)
            return len(renderers[id(env)].prompt_ids(env.start(row["prompt"])))
        except Exception:  # the user's code or the template refuses the row: so will its conversation, and say why
            return 0

    return length


def first_rows(rows: Rows, source: EnvSource) -> list[Row]:
    """The first row, or of several environments the first of each, as far as the beginning of the dataset has one."""
    found: dict[object, Row] = {}
    for row in rows.take(_MAX_ROWS_READ):
        found.setdefault(row.get(COLUMN) if source.names else None, row)
        if len(found) == max(1, len(source.names)):
            break
    return list(found.values())


def tools_not_in(shown: str, env: MultiTurnToolEnv) -> str:
    """The names of tools that a rendered prompt lacks, joined; empty for a model that has learnt them."""
    if isinstance(env.protocol, LearntTagProtocol):
        return ""
    return ", ".join(name for name in env.tools if name not in shown)


def _drop_long_prompts(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    source: EnvSource,
    context_length: int,
    template_kwargs: dict[str, Any] | None = None,
    note: Callable[[str], object] = str,
) -> Dataset:
    """Drops rows whose prompt leaves no room for an answer in the model's context, with a counted warning."""
    if source.writes_prompts:
        return dataset
    length = prompt_lengths(tokenizer, source, template_kwargs)
    if isinstance(dataset, IterableDataset):
        return dataset.filter(lambda row: length(row) < context_length)
    lengths = []
    for row in dataset.select_columns([name for name in ("prompt", COLUMN) if name in dataset.column_names]):
        lengths.append(length(row))
        note(f"measuring prompts, {len(lengths):,} of {len(dataset):,}")
    keep = [index for index, size in enumerate(lengths) if size < context_length]
    if not keep:
        raise ConfigError(
            f"Every prompt is too long for the model's context of {context_length} tokens (the shortest has "
            f"{min(lengths)}): use a model with a longer context, a shorter `system_prompt` or fewer tools."
        )
    if len(keep) < len(dataset):
        logger.warning(
            "Dropped %d of %d rows: their prompts leave no room in the model's context of %d tokens.",
            len(dataset) - len(keep),
            len(dataset),
            context_length,
        )
    return dataset.select(keep)


def build_trainer(
    recipe: Recipe, trains: bool = True, writes: bool = True, endpoint: ChatEndpoint | None = None
) -> MTGRPOEnvTrainer:
    """Everything a recipe names, checked and put together; with an `endpoint` of the model its tokenizer alone."""
    doing = ["reading the data"]

    def note(words: str) -> None:
        doing[0] = words

    silent = sys.stderr.isatty() or recipe.training.process_index > 0
    with nullcontext() if silent else Silence(lambda: print(f"{doing[0]} ...", file=sys.stderr, flush=True)):
        return _build(recipe, trains, writes, endpoint, note)


def _build(
    recipe: Recipe, trains: bool, writes: bool, endpoint: ChatEndpoint | None, note: Callable[[str], None]
) -> MTGRPOEnvTrainer:
    args, model = recipe.training, recipe.model
    if endpoint is not None:
        args = changed(args, use_vllm=False, use_cpu=True, bf16=False, fp16=False, rollout_timeout=None)
    if trains:
        check_batch_sizes(args)
    replays = trains and args.replay is not None  # rows come with the conversations
    args = changed(
        args,
        replay=args.replay if trains else None,
        push_to_hub=args.push_to_hub and trains,
        report_to=args.report_to if trains else [],
        resume_from_checkpoint=resume_point(args.resume_from_checkpoint, args),
        model_init_kwargs=recipe.init_options(),
    )
    check_surroundings(args)  # the trainer does too, but rows are not loaded for a machine that cannot train
    if args.use_vllm:
        from mt_grpo.training.servers import check_own_servers  # loaded for runs that have servers

        check_own_servers(args)
    checkpoint = Path(args.resume_from_checkpoint) if trains and args.resume_from_checkpoint else None
    if checkpoint is not None:
        check_checkpoint(checkpoint, batch_options(args), args.process_index, args.world_size)
    if trains:
        check_folder(args, model.model_name_or_path)
    datasets.disable_progress_bars()
    train_dataset, eval_dataset = (None, None) if replays else load_datasets(recipe)
    source = source_of(build_env(args))
    if train_dataset is None and not replays:
        train_dataset, eval_dataset = _own_rows(recipe, source)
    if trains and train_dataset is not None:
        check_rows_suffice(args, train_dataset)
    name = resolve_model(model.model_name_or_path, model.model_revision, subfolder_of(args))
    base, peft_config = resolve_base(name), get_peft_config(model)
    if checkpoint is not None:
        check_adapter(checkpoint, adapter_settings(name) or (peft_config and peft_config.to_dict()))
    where = source_options(args)
    with libraries_may_refuse(f"The model {name!r} cannot be loaded", *MISREAD):
        config = AutoConfig.from_pretrained(base, **where)
        processing_class = _load_processing(base, config, **where)
    tokenizer = tokenizer_in(processing_class)
    if endpoint is not None:
        endpoint.tokenizer = tokenizer
    longest = context_length(config)
    if args.use_vllm and args.vllm_max_model_length:
        longest = min(longest, args.vllm_max_model_length)
    rows = train_dataset

    def short(data: Rows | dict[str, Rows] | None) -> Any:
        if isinstance(data, dict):
            return {name: short(one) for name, one in data.items()}
        if data is None:
            return None
        return _drop_long_prompts(data, tokenizer, source, longest, args.chat_template_kwargs, note)

    train_dataset, eval_dataset = short(train_dataset), short(eval_dataset)
    if trains and isinstance(rows, Dataset) and len(train_dataset) < len(rows):
        check_rows_suffice(args, train_dataset, dropped=len(rows) - len(train_dataset))
    note("loading the model")
    left = nullcontext() if writes else _nothing_left(args)
    with libraries_may_refuse("The trainer cannot be built from these options", TypeError), left:
        trainer = MTGRPOEnvTrainer(
            model=name if endpoint is None else LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **_NO_MODEL)),
            env=source,
            args=changed(
                args,
                push_to_hub=args.push_to_hub and writes,
                model_init_kwargs=args.model_init_kwargs if endpoint is None else None,
            ),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            engine=endpoint,
            processing_class=processing_class,
            quantization_config=None if endpoint is not None else get_quantization_config(model),
            peft_config=None if endpoint is not None else peft_config,
        )
        adapts = model.use_peft and endpoint is None
        layers = [layer for layer, _ in trainer.model.named_modules()] if adapts else []
        for wanted in (layers and model.lora_modules_to_save) or []:
            if not any(layer.endswith(wanted) for layer in layers):
                raise ConfigError(f"`lora_modules_to_save` names {wanted!r}, and the model has no such layer.")
        if trains:
            # its package may be missing; one that works layer by layer hooks into the model each time it is asked for
            asked = changed(args, optim=args.optim.removesuffix("_layerwise"))
            make, options = trainer.get_optimizer_cls_and_kwargs(asked, trainer.model)
            plain = isinstance(make, type) and issubclass(make, torch.optim.Optimizer) and "params" not in options
            try:
                if plain and not {"model", "optimizer_dict"} & options.keys():
                    optimizer, steps = make([nn.Parameter(torch.zeros(1, 1))], **options), max(args.max_steps, 1)
                    warmup = args.get_warmup_steps(steps)
                    get_scheduler(args.lr_scheduler_type, optimizer, warmup, steps, args.lr_scheduler_kwargs)
            except (ValueError, TypeError, OverflowError) as error:
                raise ConfigError(f"The optimiser cannot be made from these options: {error}.") from error
    if endpoint is not None:
        refuse_scorers([*trainer.turn_reward_funcs, *trainer.outcome_reward_funcs], endpoint.url)
        trainer.state_scores = []  # they are for credit
    return trainer


def _load_processing(name: str, config: PreTrainedConfig, **where: Any) -> PreTrainedTokenizerBase | ProcessorMixin:
    """The processor of a model that takes images or sounds, if it loads, else its tokenizer, with a warning."""
    if media_tokens(config):
        try:
            return AutoProcessor.from_pretrained(name, **where)
        except (ImportError, AttributeError, OSError, ValueError) as error:
            # without torchvision, transformers raises the second for a processor of videos
            logger.warning(
                "The processor of %s cannot be loaded (%s), so its model is given text only: `pip install "
                "'mt-grpo[images]'`.",
                name,
                " ".join(str(error).split())[:200],
            )
    return AutoTokenizer.from_pretrained(name, **where)


@contextmanager
def _nothing_left(args: MTGRPOConfig) -> Iterator[None]:
    """Keeps `output_dir` from staying, which a trainer makes when it is built."""
    folder = Path(args.output_dir)
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    finally:
        for path in missing if args.should_save else []:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def finish_dry_run(trainer: MTGRPOEnvTrainer, resolved: dict[str, Any]) -> None:
    """Lets the servers go, prints the resolved recipe as YAML, and on standard error what the model is shown."""
    if trainer.weight_sync is not None:
        trainer.weight_sync.close()
    if trainer.accelerator.is_main_process:
        said = [examine_template(trainer.runner.renderer)]
        if trainer.replay is None:
            with naming_rows({"training dataset": trainer.train_dataset}):
                rows = first_rows(trainer.train_dataset, source_of(trainer.env))
            said[:0] = [_shown(trainer, row) for row in rows]
        print(yaml.safe_dump(resolved, sort_keys=True), end="", flush=True)
        print(*said, sep="\n", file=sys.stderr)
        print("mt-grpo: everything is in place for this run; nothing was sampled or written.", file=sys.stderr)


def _shown(trainer: MTGRPOEnvTrainer, row: Row) -> str:
    """What the model is shown of a row before its first turn, as text."""
    env = env_of_prompt(source_of(trainer.env), row)
    of_which = f" of `{COLUMN}: {row[COLUMN]}`" if COLUMN in row else ""
    if env is None:
        return (
            f"mt-grpo: what the model is shown first{of_which} is known once a conversation has begun: `mt-grpo "
            "rollout` prints some."
        )
    renderer = trainer.runner.sampler.renderer(env.tool_schemas, env.protocol.tags)
    try:
        prompt = with_column_media(row)["prompt"]
        messages = prompt if isinstance(prompt, str) else list(read_messages(prompt, of_row=True))
        shown = decoded(renderer.prompt_ids(env.start(messages)), renderer.tokenizer)
    except Exception as error:  # the user's code or the template refuses the row
        raise ConfigError(f"The first prompt{of_which} cannot be rendered: {describe_error(error)}") from error
    text = f"mt-grpo: the model is first shown this, for the first row{of_which}:\n{visible(cut(shown, _MAX_SHOWN))}"
    missing = tools_not_in(shown, env)
    return f"{text}\nmt-grpo: it is not shown its tools ({missing}): {HIDDEN_TOOLS}." if missing else text
