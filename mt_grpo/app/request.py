"""What a command is asked to do: its recipe and its command line, checked before torch is imported."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mt_grpo.app.recipe_file import (
    CONFIG,
    Schema,
    SchemaOption,
    as_json,
    check_trust,
    load_schema,
    pop_variables,
    read_file,
    recipes_in,
)
from mt_grpo.errors import ConfigError, refuse_first
from mt_grpo.imports import FORMATS, check_place, did_you_mean, in_home, looks_like_path
from mt_grpo.options.rules import check_batches, check_names, check_options, check_trainable
from mt_grpo.options.table import OF_ENVIRONMENT, Values
from mt_grpo.options.values import (
    SELF,
    SYNONYMS,
    brings_rows,
    is_bare,
    parse_agent,
    parse_dataset_filter,
    parse_mapping,
    parse_reward,
    parse_teacher,
    refuse_unknown,
    with_env_options,
)


def _flag(description: str) -> SchemaOption:
    return SchemaOption(description, ("boolean",), False, flag=True)


def _number(description: str, least: int, kind: str = "integer", **more: int) -> SchemaOption:
    return SchemaOption(description, (kind,), None, least, **more)


def _list(description: str, kind: str = "string") -> SchemaOption:
    return SchemaOption(description, ("array",), items=SchemaOption(kinds=(kind,)), many=True)


_TRUST = {"trust": _flag("Run the code and the commands that the `config.yaml` of a run names.")}

_MOST = 10**6  # conversations for a row: each has a place in memory before it begins

_CHECKPOINT = _number("Of a run the model after so many steps, instead of the last one.", 1)

_KEY = SchemaOption("Environment variable with the key of endpoints.")
_PRICES = _list("Prices of a million tokens: of prompts, of answers, and of prompts from the cache.", "number")

OWN_OPTIONS: dict[str, dict[str, SchemaOption]] = {
    "train": {
        **_TRUST,
        "dry_run": _flag("Check and build everything; sample and write nothing."),
        "accelerate_config": SchemaOption("Launch with accelerate: fsdp2, zero2, zero3, or a file."),
        "num_processes": _number("Processes to launch, instead of the configuration's.", 1),
        "num_machines": _number("Hosts that train, each of which runs this command.", 1),
        "machine_rank": _number("Which of the hosts this is, from 0.", 0),
        "main_process_ip": SchemaOption("Address of the first host."),
        "main_process_port": _number("Port at which the hosts meet there.", 1),
        "max_restarts": _number("How often all begin again where a process has died.", 0),
    },
    "rollout": {
        **_TRUST,
        "num_prompts": _number("Prompts to answer: 4 of the evaluation set if there is one; all to make data.", 1),
        "num_generations": _number(
            "Conversations for each prompt; the recipe's `num_generations` without it.", 1, maximum=_MOST
        ),
        "audit": _flag("Run `num_generations` conversations for each prompt, and say what the rewards tell apart."),
        "save": SchemaOption("Folder for `num_generations` conversations of each prompt, as a run's."),
        "again": SchemaOption("Folder of a run, one of whose conversations is taken again, and goes on from a turn."),
        "conversation": SchemaOption("Which of its conversations, by its name in the run."),
        "turn": _number("The first turn that is sampled, from 1; those before are taken as they were.", 1),
        "model": SchemaOption("Make data of the training rows with it: a folder, adapter, Hub id, NAME@URL or a URL."),
        "keep": SchemaOption("Make data of the conversations that pass, such as 'exact_match>=1'."),
        "difficulty": _flag("Write how often each training row is passed, for `dataset_filter`."),
        "api_key_env": _KEY,
        "prices": _PRICES,
    },
    "eval": {
        **_TRUST,
        "model": _list("Models instead of the recipe's: folders, checkpoints, adapters, Hub ids, NAME@URL, or a URL."),
        "num_generations": _number(
            "Conversations for each row; 1, or the recipe's `num_generations_eval`.", 1, maximum=_MOST
        ),
        "num_prompts": _number("Rows to take, from the first on; all without it.", 1),
        "by": _list("Columns of the rows by whose values results are split."),
        "save": SchemaOption("Folder of the results, `evals/RECIPE` without it; what is there is not sampled again."),
        "api_key_env": _KEY,
        "prices": _PRICES,
        "json": _flag("Print the line of `results.jsonl`, and no tables."),
    },
    "serve": {
        **_TRUST,
        "replicas": _number("Servers to start, each on GPUs of its own.", 1),
        "checkpoint": _CHECKPOINT,
        "metrics_address": SchemaOption("Where Prometheus reads which replicas live: a port, or HOST:PORT."),
    },
    "chat": {
        **_TRUST,
        "checkpoint": _CHECKPOINT,
        "server": SchemaOption(
            "Address of the server that `mt-grpo serve RUN` started, instead of loading the model."
        ),
    },
    "doctor": {
        **_TRUST,
        "num_processes": _number("Processes that train, instead of the accelerate configuration's, or 1.", 1),
        "gpu": SchemaOption(
            "The kind of GPU of the run, such as H100; that of the first one here where there is one."
        ),
        "gpu_memory": _number("GB of a GPU of the run, where they are not those of its kind.", 1, kind="number"),
        "accelerate_config": SchemaOption("What the run is launched with: fsdp2, zero2, zero3, or a file."),
        "calibrate": SchemaOption("Folder of a run whose metrics correct the time of a step, where not `output_dir`."),
        "suggest": SchemaOption("File to write a recipe to, with numbers to start from that fit this model and GPU."),
        "probe": _flag("Run one micro-batch of the greatest length, forward and backward, and measure its memory."),
        "json": _flag("Print JSON."),
    },
}
"""The commands that take a recipe, with the options that are the command's and no recipe's."""

WORDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "view": (("--port", "--filter", "--export"), ("--no_browser", "--overwrite")),
    "runs": (("--sort", "--filter"), ("--json",)),
    "compare": ((), ("--json",)),
    "export": (("--to", "--filter", "--output"), ("--overwrite",)),
    "merge": (("--checkpoint", "--to"), ("--trust_remote_code",)),
    "credit": (("--step", "--max_groups", "--model_name_or_path"), ("--json", "--trust_remote_code")),
}
"""The commands that take folders of runs, with their options that take a value, and their flags."""

OF_HOSTS = ("num_machines", "machine_rank", "main_process_ip", "main_process_port", "max_restarts")
"""Options of `train` on several hosts; the short help leaves them out."""
OF_LAUNCHER = ("num_processes", *OF_HOSTS)
"""Options of `train` that are accelerate's, and take the place of what its configuration says."""

WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Where launchers say how many processes there are."""

_IMPORTED = {"tools": "tool", "turn_reward_funcs": "turn reward", "outcome_reward_funcs": "outcome reward"}
"""Lists of names or paths, with what each names."""


_OF_RUNS = ("serve", "chat")
"""Commands that take the folder of a run, or of a merged model, in place of a recipe: they use what it trained."""


def read_words(command: str, arguments: list[str], one: str = "") -> tuple[list[str], dict[str, str]]:
    """The folders and options of one of `WORDS`; a flag's value is empty. `one` says what the only folder is."""
    values, flags = WORDS[command]
    folders, options = [], {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if not name.startswith("-"):
            folders.append(word)
        elif name in flags and not equals:
            options[name] = ""
        elif name in values:
            options[name] = value if equals else next(words, "")
            if not options[name]:
                raise ConfigError(f"`mt-grpo {command}` needs a value after `{name}`.")
        else:
            raise ConfigError(f"`mt-grpo {command}` has no option {word}{did_you_mean(word, (*values, *flags))}.")
    if one and len(folders) != 1:
        raise ConfigError(f"`mt-grpo {command}` takes one folder, {one}: `mt-grpo {command} runs/NAME`.")
    return folders, options


def whole_number(options: dict[str, str], name: str, least: int, most: int = 10**9) -> int | None:
    """The number that one of these options has; `None` where it is not given."""
    text = options.get(name)
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 10 or not least <= int(text) <= most:
        end = "on" if most == 10**9 else f"to {most}"
        raise ConfigError(f"`{name}` takes a whole number from {least} {end}; {text[:40]!r} is none.")
    return int(text)


@dataclass
class Request:
    """A recipe's file and options, words for argparse, the command's own options and all values; `run` is a folder."""

    path: str | None = None
    run: str | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    own: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def check_processes(self) -> None:
        """Checks that batches divide into whole groups, on the processes of the launcher."""
        schema = load_schema()
        if schema.exact:
            processes = next((int(os.environ[name]) for name in WORLD_SIZES if name in os.environ), 1)
            check_batches(schema.defaults | self.values, processes)


def read_request(arguments: list[str], command: str = "serve") -> Request:
    """Reads `R.yaml --field value ...`, and sets the variables of an `env:` block in this process, as TRL does."""
    schema = load_schema()
    request = Request(own={name: option.default for name, option in OWN_OPTIONS[command].items()})
    given = _read_command_line(list(arguments), schema, command, request)
    if request.own.get("save"):
        request.own["save"] = str(in_home(request.own["save"]))
    of_run = request.path is None and (given.get("replay") if command == "train" else request.own.get("again"))
    if of_run:
        request.path = _recipe_of_run(of_run, f"{command} RECIPE.yaml --{'replay' if command == 'train' else 'again'}")
    if command in _OF_RUNS and request.path is not None and Path(request.path).is_dir():
        request.run = request.path
        request.path = _recipe_of_folder(request.run, command, given)
    elif request.own.get("checkpoint") is not None:
        raise ConfigError(f"`--checkpoint` is one of a run: write `mt-grpo {command} RUN --checkpoint N`.")
    for name in OF_LAUNCHER if command == "train" and request.own["accelerate_config"] is None else ():
        if request.own[name] is not None:
            raise ConfigError(f"`--{name}` needs `--accelerate_config` beside it, e.g. `--accelerate_config zero3`.")
    variables: dict[str, Any] = {}
    if request.path is not None:
        request.recipe, lines = read_file(request.path)
        if of_run:
            request.recipe.pop("resume_from_checkpoint", None)  # a replay begins where the run began
        if request.run is not None:
            request.recipe |= {"model_name_or_path": request.run, "use_peft": False, "resume_from_checkpoint": None}
        variables = pop_variables(request.recipe)
        _check_recipe(request, lines, schema)
        if not request.own["trust"]:
            check_trust(
                request.path, {name: request.recipe[name] for name in request.recipe if name not in given}, variables
            )
    request.recipe |= {name: value for name, value in given.items() if value is None}
    request.values = with_env_options({**request.recipe, **given})
    _check_whole(request, schema, command)
    for name in (*WORLD_SIZES, "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if not re.fullmatch(r"-?\d+", text := str(variables.get(name, os.environ.get(name, "1")))):
            raise ConfigError(
                f"The environment variable {name} is {text!r}, and launchers set it to a number: unset it, or "
                "leave it out of `env`."
            )
    try:
        os.environ.update({str(name): str(value) for name, value in variables.items()})
    except ValueError as error:
        raise ConfigError(f"`env` in {request.path} sets a variable that no system takes: {error}.") from error
    return request


def _recipe_of_run(folder: str, with_recipe: str) -> str:
    path = Path(folder, CONFIG)
    refuse_first(
        (not Path(folder).is_dir(), f"There is no folder {folder}: name the `output_dir` of a run."),
        (
            not path.is_file(),
            f"{folder} has no `{CONFIG}`, which `mt-grpo train` writes: give the recipe of the run, as `mt-grpo "
            f"{with_recipe} {folder}`.",
        ),
    )
    return str(path)


def _recipe_of_folder(folder: str, command: str, given: Values) -> str:
    path, found = Path(folder, CONFIG), recipes_in(Path(folder))
    hint = f"; for the recipe in it, give {str(found[0])!r}" if found else ""
    refuse_first(
        (
            not path.is_file(),
            f"{folder} has no `{CONFIG}`, which `mt-grpo train` and `mt-grpo merge` leave beside a model{hint}.",
        ),
        (
            "model_name_or_path" in given,
            f"`mt-grpo {command} {folder}` takes the model in that folder: leave `--model_name_or_path` out, or give "
            f"the recipe, {path}.",
        ),
    )
    return str(path)


def _read_command_line(tokens: list[str], schema: Schema, command: str, request: Request) -> dict[str, Any]:
    """The values of the recipe's options; the path, the own options and what argparse is to see go to `request`."""
    options = {**schema.options, **OWN_OPTIONS[command]}
    given = {}
    while tokens:
        token = tokens.pop(0)
        written, equals, text = token.partition("=")
        name = written[2:].replace("-", "_")
        if not token.startswith("-"):
            _set_path(request, token)
        elif name == "config":
            if not equals and not _is_value(tokens):
                raise ConfigError("`--config` needs the path of a recipe behind it.")
            _set_path(request, text if equals else tokens.pop(0))
        elif name in options:
            texts = [text] if equals else _take(tokens, options[name], written)
            if {"object"} & {*options[name].kinds, *(options[name].items or options[name]).kinds}:
                texts = list(map(as_json, texts))
            if texts == ["null"] and name in schema.options and "null" in options[name].kinds:
                given[name] = None  # as in a recipe, whose value it takes away
                continue
            value = _value(name, options[name], texts, written, name in OWN_OPTIONS[command] or schema.decides(name))
            if name in OWN_OPTIONS[command]:
                request.own[name] = value
                continue
            given[name] = value
            request.arguments += [f"--{name}={texts[0]}"] if len(texts) == 1 else [f"--{name}", *texts]
        elif name.startswith("no_") and name[3:] in options and options[name[3:]].default is True and not equals:
            given[name[3:]] = False
            request.arguments.append(f"--{name}")
        else:
            _refuse_option(name, written, schema, command)
            request.arguments.append(token)
            while _is_value(tokens):
                request.arguments.append(tokens.pop(0))
    return given


def _set_path(request: Request, path: str) -> None:
    if request.path is not None:
        raise ConfigError(
            f"Two recipes are given, {request.path!r} and {path!r}: leave one out."
            if _is_recipe(path) or Path(path).exists()
            else f"The word {path!r} belongs to no option: write `--option value`."
        )
    request.path = path


def _is_value(tokens: list[str]) -> bool:
    return bool(tokens) and not tokens[0].startswith("--")


def _is_recipe(token: str) -> bool:
    return Path(token).suffix in (".yaml", ".yml")


def _take(tokens: list[str], option: SchemaOption, written: str) -> list[str]:
    """Takes the texts behind an option from the command line."""
    if option.flag and (not _is_value(tokens) or _is_recipe(tokens[0])):
        return []
    texts = [tokens.pop(0)] if _is_value(tokens) else []
    while option.many and _is_value(tokens) and not _is_recipe(tokens[0]):
        texts.append(tokens.pop(0))
    if not texts:
        raise _without_value(option, written)
    return texts


def _without_value(option: SchemaOption, written: str) -> ConfigError:
    return ConfigError(f"`{written}` is given without a value: it takes {option.wanted}.")


def _value(name: str, option: SchemaOption, texts: list[str], written: str, checked: bool) -> Any:
    if not texts:
        return True
    if not texts[0] and "string" not in option.kinds:
        raise _without_value(option, written)
    value = option.read(texts if option.many else texts[0])
    if checked:
        option.check(name, value, f"`{written}`", in_file=False)
    return value


def _refuse_option(name: str, written: str, schema: Schema, command: str) -> None:
    for other, own in OWN_OPTIONS.items():
        if name in own and not any(name in others.split() for others in SYNONYMS.values()):
            raise ConfigError(f"`{written}` is an option of `mt-grpo {other}`, not of `mt-grpo {command}`.")
    if not written.startswith("--"):
        raise ConfigError(f"The option {written!r} is unknown: options begin with two dashes, as `--max_steps 10`.")
    if schema.exact:
        refuse_unknown(name, f"The option {written!r}", [*schema.options, *OWN_OPTIONS[command], "config"])


def _check_recipe(request: Request, lines: dict[str, int], schema: Schema) -> None:
    for key, value in request.recipe.items():
        place = f"in {request.path}, line {lines[str(key)]}," if str(key) in lines else f"in {request.path}"
        if schema.exact:
            refuse_unknown(str(key), f"The key {key!r} {place}", schema.options)
        if key in schema.options and schema.decides(key):
            option = schema.options[key]
            value = request.recipe[key] = option.read(value)
            option.check(key, value, f"`{key}` {place}", in_file=True)


def _check_whole(request: Request, schema: Schema, command: str) -> None:
    given = request.values
    if request.path is None and not given.get("model_name_or_path"):
        raise ConfigError(
            f"No recipe is given: write `mt-grpo {command} RECIPE.yaml`, or name at least `--model_name_or_path` and "
            "`--dataset_name`."
        )
    for name, what in (("model_name_or_path", "model"), ("dataset_name", "dataset")):
        own = name == "dataset_name" and (
            given.get("environment_factory") or brings_rows(given.get("env")) or given.get("replay")
        )
        if not given.get(name) and not own:
            raise ConfigError(f"The recipe names no {what}: set `{name}`.")
    if not schema.exact:  # the defaults of the installed libraries may be others
        return
    whole = schema.defaults | given
    for name in _IMPORTED:
        if isinstance(whole[name], str):  # one name stands for a list of one
            whole[name] = [whole[name]]
    several = parse_mapping(whole["environments"], "environments")
    owns = {f"environments: {name}: ": own for name, own in several.items()} if isinstance(several, dict) else {}
    for place, own in {"": given, **owns}.items():  # those in `env: {type: ...}` are among the first
        for key in OF_ENVIRONMENT if isinstance(own, dict) else ():
            if own.get(key) is not None:
                option = schema.options[key]
                option.check(key, option.read(own[key]), f"`{place}{key}`", in_file=True)
    listed = [parse_reward(entry)[0] for name in _IMPORTED for entry in whole[name] or []]
    plugins = whole["external_plugins"] or whole["env"] or whole["environment_factory"] or whole["agent"]
    named = {name: option.examples for name, option in schema.options.items() if option.examples}
    check_options(whole, {} if plugins else named)
    if not plugins and all(is_bare(entry) or entry.startswith("mt_grpo.") for entry in listed):
        tools, rewards = (schema.options[name].items.examples for name in ("tools", "turn_reward_funcs"))
        check_names(whole, tools, rewards)
    if command in ("train", "doctor"):
        check_trainable(whole)


def check_places(values: Values, command: str) -> None:
    """Looks for the model, rows and code that a recipe names as files, and a folder that the run can write."""
    if command == "train":
        check_writable("." if values.get("output_dir") is None else str(values["output_dir"]))
    models = {"model": values["model_name_or_path"]}
    if values.get("teacher") and command not in _OF_RUNS:
        teacher = parse_teacher(values["teacher"])["model"]
        models |= {} if teacher == SELF else {"teacher": teacher}
    for what, model in models.items():
        if looks_like_path(model) and not in_home(model).exists():
            raise ConfigError(f"The {what} {model!r} cannot be loaded: there is no such folder (from {Path.cwd()}).")
    if command in _OF_RUNS:
        return
    chosen = None if command == "rollout" else parse_dataset_filter(values.get("dataset_filter"))
    if chosen is not None and not in_home(chosen["file"]).is_file():
        raise ConfigError(
            f"`dataset_filter` names the file {chosen['file']!r}, which is not there: `mt-grpo rollout --difficulty` "
            "writes one."
        )
    replays = command == "train" and values.get("replay")  # whose rows come with the conversations
    if values.get("dataset_name") and not replays:  # classes of `environment_factory` may need none
        source = values["dataset_name"].partition(":")[2] or values["dataset_name"]
        path = in_home(source)
        if not path.exists() and (path.suffix in FORMATS or looks_like_path(source)):
            raise ConfigError(f"There is no file or folder {source!r} (the current folder is {Path.cwd()}).")
    if values.get("external_plugins"):  # a plugin may change where modules are found
        return
    if values.get("agent") and "function" in (agent := parse_agent(values["agent"])):
        check_place(agent["function"], "agent")
    for option, what in _IMPORTED.items():
        listed = values.get(option) or []
        for entry in [listed] if isinstance(listed, str) else listed:
            name, _ = parse_reward(entry)
            if not is_bare(name):
                check_place(name, what)


def check_new(folder: str, option: str = "--save") -> None:
    """Checks that the folder of an option can be made."""
    if Path(folder).exists() and not (Path(folder).is_dir() and not any(Path(folder).iterdir())):
        raise ConfigError(f"{folder} is there already: give `{option}` another folder, or remove it.")
    check_writable(folder, f"`{option} {folder}`")


def check_writable(folder: str, given: str | None = None) -> None:
    """Checks that a folder can be made, or written to where it is there."""
    path, given = Path(folder).absolute(), given or f"`output_dir: {folder}`"
    if not folder or "\0" in folder:
        raise ConfigError(f"{given} names no folder: give it a name.")
    try:
        there = next(place for place in (path, *path.parents) if place.exists() or place.is_symlink())
        refuse_first(
            (not there.is_dir(), f"{given} cannot be a folder, since {there} is a file: name another."),
            (
                not os.access(there, os.W_OK | os.X_OK),
                f"{given} cannot be written, since {there} is not yours to write to, or read-only: name another.",
            ),
        )
        with tempfile.TemporaryDirectory(prefix=".mt-grpo-", dir=there):  # some say that they can be written to
            pass
    except OSError as error:
        raise ConfigError(f"{given} cannot be made or written to ({error.strerror}): name another folder.") from error
