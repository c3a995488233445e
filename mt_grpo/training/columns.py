"""
The columns of datasets: prompts, in the forms that TRL takes; images and sounds, and whether a run can show them; and
those that rewards need.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter
from typing import Any, TypeAlias

import pyarrow as pa
from datasets import Audio, Dataset, Image, IterableDataset, List
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin
from trl.data_utils import prepare_multimodal_messages

from mt_grpo.data import DatasetError, as_messages, lacks_column, with_contents_of_one_kind
from mt_grpo.data.images import ImageOfRowError, with_own_opener
from mt_grpo.envs import EnvSource
from mt_grpo.errors import ConfigError, refuse_first
from mt_grpo.forward.media import media_tokens
from mt_grpo.imports import did_you_mean
from mt_grpo.media import IMAGE, SOUND, MediumError, Part, decode, is_decoded, is_image, media_of, read_parts, to_file
from mt_grpo.rewards import FunctionReward, RewardFunc, StateScore, TurnReward
from mt_grpo.rewards.base import NOT_COLUMNS, ReadsAnswer, ScoreFunction
from mt_grpo.rollout import Engine
from mt_grpo.rollout.engines import MediaEngine
from mt_grpo.rollout.escaped_text import MediaEncoder, audio_feature_extractor
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.trajectory import Message, Row

_IMAGE_COLUMNS = ("image", "images")
"""Columns with the images of a prompt."""

_SOUND_COLUMNS = ("audio", "audios")
"""Columns with the sounds of a prompt."""

MEDIA_COLUMNS = (*_IMAGE_COLUMNS, *_SOUND_COLUMNS)


def with_column_media(row: Row) -> Row:
    """A row whose prompt has the media of its columns: in its places, or before the user's first words as in TRL."""
    try:
        messages = as_messages(row.get("prompt", _NO_PROMPT))
    except DatasetError as error:
        raise ConfigError(f"A row of the dataset {error}") from None
    images, sounds = (_listed(row, columns) for columns in (_IMAGE_COLUMNS, _SOUND_COLUMNS))
    if images is None and sounds is None:
        return row
    what = "sounds" if images is None else "images" if sounds is None else "images and sounds"
    try:
        messages = [
            {**message, "content": _places(message["content"])}
            if isinstance(message.get("content"), list)
            else message
            for message in messages
        ]
        if images is not None:
            shown = [_shown(image, row) for image in images]
            messages = prepare_multimodal_messages(messages, images=shown)
        if sounds is not None:
            messages = _with_sounds(messages, _decoded([{"type": "audio", "audio": sound} for sound in sounds]))
        return {**row, "prompt": [_with_text(message) for message in messages]}
    except ImageOfRowError:
        raise
    except ValueError as error:  # TRL counts images
        done = "played" if images is None else "shown"
        raise ConfigError(f"The {what} of a row cannot be {done}: {str(error).rstrip('.')}.") from error


def _shown(image: object, row: Row) -> Any:
    """An image of a row's column, decoded."""
    try:
        return _decoded([{"type": "image", "image": image}])[0]["image"]
    except MediumError as error:
        one, several = _IMAGE_COLUMNS
        value = {"bytes": to_file(image)} if is_image(image) and not is_decoded(image) else image
        raise ImageOfRowError(error, one if row.get(several) is None else several, value) from error


def _decoded(parts: list[Part]) -> list[Part]:
    """Parts of a row, read; decoded at once, so that the conversations of a batch begin together."""
    read = read_parts(parts, of_row=True)
    for medium in media_of(read):
        decode(medium)
    return read


def _listed(row: Row, columns: tuple[str, str]) -> list[Any] | None:
    """What the second of two columns has, or else the first, as a list; `None` where neither has any."""
    one, several = columns
    given = row.get(several) if row.get(several) is not None else row.get(one)
    if isinstance(given, (list, tuple)) and given and isinstance(given[0], (int, float)):
        return [given]  # samples: a table has arrays as lists
    return list(given) if isinstance(given, (list, tuple)) else None if given is None else [given]


def _with_sounds(messages: list[Message], sounds: list[Part]) -> list[Message]:
    """Messages with sounds in their places, or before the words of the first message of the user."""
    places = sum(part == _PLACE for message in messages for part in _parts(message))
    if not places:
        first = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise MediumError("no message of the user is there to play them with.")
        said = messages[first]["content"]
        words = said if isinstance(said, list) else [{"type": "text", "text": said}]
        return [*messages[:first], {**messages[first], "content": [*sounds, *words]}, *messages[first + 1 :]]
    if places != len(sounds):
        raise MediumError(f"the prompt has {places} places for sounds, and the row has {len(sounds)} sounds.")
    left = iter(sounds)
    return [
        {**message, "content": [next(left) if part == _PLACE else part for part in parts]}
        if (parts := _parts(message))
        else message
        for message in messages
    ]


_PLACE = {"type": "audio"}
"""The part of a prompt where a sound of the row's column stands."""


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _places(content: Sequence[Any]) -> list[Any]:
    """A content's parts without the empty keys of a table; those for images and sounds may be places without one."""
    parts = [
        {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else part
        for part in content
    ]
    return [part if part in ({"type": "image"}, _PLACE) else read_parts([part], of_row=True)[0] for part in parts]


def _with_text(message: Message) -> Message:
    """A message of one text as text, which environments may look at."""
    content = message.get("content")
    if isinstance(content, list) and len(content) == 1 and content[0]["type"] == "text":
        return {**message, "content": content[0]["text"]}
    return message


def media_encoder(
    processor: PreTrainedTokenizerBase | ProcessorMixin, config: PreTrainedConfig, engine: Engine, *data: object
) -> MediaEncoder | None:
    """What encodes the media of a run; `None` where none are taken, and `ConfigError` if a dataset has some then."""
    inside = vars(processor) if isinstance(processor, ProcessorMixin) else {}
    tokens = media_tokens(config)
    sees = IMAGE in tokens and "image_processor" in inside
    hears = SOUND in tokens and bool(inside) and audio_feature_extractor(processor) is not None
    encoder = MediaEncoder(processor, tokens) if (sees or hears) and isinstance(engine, MediaEngine) else None
    _check_media(encoder, tokens, engine, data)
    return encoder


def _is_server(engine: Engine) -> bool:
    from mt_grpo.rollout.engines.vllm import VLLMServerClient  # loaded for runs that have servers

    return isinstance(engine, VLLMServerClient)


def _check_media(encoder: MediaEncoder | None, tokens: dict[int, int], engine: Engine, data: Sequence[object]) -> None:
    every = list(named_datasets(*data).values())
    for columns, feature, part, token, what in (
        (_IMAGE_COLUMNS, Image, {"type": "image"}, tokens.get(IMAGE), "images"),
        (_SOUND_COLUMNS, Audio, _PLACE, tokens.get(SOUND), "sounds"),
    ):
        column = next((name for rows in every for name in columns if _holds(rows, name, feature)), None)
        if column is not None and feature is Audio and _is_server(engine):
            raise ConfigError(
                f"The column {column!r} of the dataset holds sounds, which are not sent to a vLLM server: set "
                f"`use_vllm: false`, or remove the column (`remove_columns({column!r})`)."
            )
        if column is None or (encoder is not None and encoder.takes(part)):
            continue
        if token is None:
            problem = "the model takes text only" if encoder is None else f"the model takes no {what}"
            mend = f"use a model that takes {what}"
        elif not isinstance(engine, MediaEngine):
            problem = f"{type(engine).__name__} is given tokens of text only"
            mend = "sample with the model itself (`use_vllm: false`)"
        else:
            problem, mend = f"there is no processor of {what}", "pass the model's processor as `processing_class`"
        raise ConfigError(
            f"The column {column!r} of the dataset holds {what}, and {problem}: {mend}, or remove the column "
            f"(`remove_columns({column!r})`)."
        )


def _check_decoding(rows: Rows) -> None:
    """Refuses a dataset with a column of sounds that nothing here decodes, before a row is looked at."""
    for column, feature in (rows.features or {}).items():
        inner = feature.feature if isinstance(feature, List) else feature
        if isinstance(inner, Audio) and inner.decode and importlib.util.find_spec("torchcodec") is None:
            raise ConfigError(
                f"The column {column!r} of the dataset is decoded with torchcodec, which is not installed: `pip "
                f"install torchcodec`, or give files as they are (`cast_column({column!r}, datasets.Audio(decode="
                "False))`)."
            )


def _holds(rows: Rows, name: str, kind: type) -> bool:
    feature = (rows.features or {}).get(name)
    return isinstance(feature, kind) or (isinstance(feature, List) and isinstance(feature.feature, kind))


_NO_PROMPT = [{"role": "user", "content": ""}]
"""The prompt of a row that has none: the environment's `reset` writes it."""


def rows_of(dataset: Rows | None, source: EnvSource, args: MTGRPOConfig) -> Rows:
    """The rows to train on: those given, the source's own, or as in TRL empty prompts that a factory fills in."""
    dataset = source.rows("train") if dataset is None else dataset
    if not source.writes_prompts:
        if dataset is None:
            raise ConfigError(
                "There is no dataset: `train_dataset` is required, unless an environment brings its own rows."
            )
        return dataset
    if dataset is None:
        refuse_first(
            (
                source.names,
                f"Several environments ({', '.join(source.names)}) need a dataset whose column `environment` says "
                "which one a row is for: give `train_dataset`, or a single factory.",
            ),
            (
                args.max_steps <= 0,
                "There is no dataset, so `reset` of the environment gives the prompts, and nothing says how long to "
                "train: set `max_steps`.",
            ),
        )
        dataset = Dataset.from_dict({"prompt": [_NO_PROMPT] * (args.generation_batch_size // args.num_generations)})
        source.check(dataset, "training dataset")
    return dataset


def with_prompts(train: Rows | None, evaluated: Any, source: EnvSource, args: MTGRPOConfig) -> tuple[Rows, Any]:
    """The datasets of a run, those of its environment where none are given, with prompts that can be asked."""
    train = _with_prompts(rows_of(train, source, args), source, "training dataset")
    evaluated = source.rows("eval") if evaluated is None and args.do_eval else evaluated
    evaluated = _with_prompts(evaluated, source, "evaluation dataset")
    if not source.writes_prompts:
        _check_prompts(train, "train_dataset")
        for rows in evaluated.values() if isinstance(evaluated, dict) else [evaluated]:
            _check_prompts(rows, "eval_dataset")
    return train, evaluated


def _with_prompts(data: Any, source: EnvSource, name: str) -> Any:
    """Datasets with the column `prompt`, whose images are opened as those of tools are."""
    if isinstance(data, dict):
        return {split: _with_prompts(rows, source, f"{name} {split!r}") for split, rows in data.items()}
    if data is None:
        return None
    data = with_own_opener(data)
    columns = data.column_names
    if not columns or "prompt" in columns:
        return data
    if not source.writes_prompts:
        raise ConfigError(
            f"The {name} has no column `prompt`{did_you_mean('prompt', columns)}: its columns are "
            f"{', '.join(columns)}; rename the one that holds what the model is asked."
        )
    if isinstance(data, Dataset):
        return data.add_column("prompt", [_NO_PROMPT] * len(data))
    return data.map(lambda row: {**row, "prompt": _NO_PROMPT})


_BATCH_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments of a plain TRL reward function besides the columns."""

Rows: TypeAlias = Dataset | IterableDataset


def named_datasets(train: Any = None, evaluated: Any = None) -> dict[str, Rows]:
    """The datasets of a run that are there, by what sentences call them."""
    several = evaluated if isinstance(evaluated, dict) else {"": evaluated}
    names = {f"evaluation dataset {name!r}" if name else "evaluation dataset": rows for name, rows in several.items()}
    return {name: rows for name, rows in {"training dataset": train, **names}.items() if rows is not None}


def check_rows_suffice(args: MTGRPOConfig, dataset: Rows, dropped: int = 0) -> None:
    """Checks that there are rows for a step."""
    needed = args.generation_batch_size // args.num_generations
    rows = sum(1 for _ in dataset.take(needed)) if isinstance(dataset, IterableDataset) else len(dataset)
    if rows < needed:
        left = f" left ({dropped} were dropped, whose prompts are too long)" if dropped else ""
        raise ConfigError(
            f"The training dataset has {rows} rows{left}, and one batch takes {needed} prompts "
            f"({args.generation_batch_size} completions, {args.num_generations} for each prompt): give it more rows, "
            "or make the batch smaller (`per_device_train_batch_size`, `steps_per_generation` or "
            "`gradient_accumulation_steps`), or raise `num_generations`."
        )


def check_reward_columns(
    rewards: Sequence[RewardFunc], train_dataset: Rows | None, eval_dataset: Rows | dict[str, Rows] | None
) -> None:
    """Checks that every reward can be called with the columns of each dataset, or a stream's first row."""
    for name, dataset in named_datasets(train_dataset, eval_dataset).items():
        columns = dataset.column_names or [column for row in dataset.take(1) for column in row]
        for reward in rewards if columns else ():
            _check(reward, columns, name)
            if isinstance(reward, ReadsAnswer):
                _check_answers(reward, dataset, columns, name)


def _check(reward: RewardFunc, columns: list[str], dataset: str) -> None:
    function: Callable[..., object]
    if isinstance(reward, FunctionReward):
        function, positional, mend = reward.function, 0, "let it take the rest with `**row`."
        given = [
            *_BATCH_ARGUMENTS,
            *reward.brings,
            *["environments"][: reward.takes_environments],
            *(column for column in columns if column not in (*NOT_COLUMNS, *reward.brings)),
        ]
    else:
        function, positional = reward.score, 1 + isinstance(reward, TurnReward | StateScore)
        mend = f"define it as `score(self, {'turn, ' * (positional - 1)}trajectory, **row)`."
        given = [column for column in columns if column != "prompt"]
    if isinstance(reward, ScoreFunction) and not {"ground_truth", "reward_model"} & set(columns):
        raise ConfigError(
            f"The reward {reward.name!r} takes the right answer from the column `ground_truth`, or `reward_model` as "
            f"in verl's rows, and the {dataset} has neither: its columns are {', '.join(columns)}; name the right one "
            "with `column_mapping: {ground_truth: its name}`."
        )
    try:
        # a wrapper takes what it takes itself, whatever it wraps
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # a function written in C may not say what it takes
        return
    for parameter in _needed(signature.parameters.values(), positional):
        if parameter not in (*given, "trajectory"):  # that is a place too many, which binding finds
            raise lacks_column(f"The reward {reward.name!r}", parameter, dataset, columns)
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(given))
    except TypeError as error:
        taken = [name for name in [*signature.parameters][:positional] if name in given]
        raise ConfigError(
            f"The reward {reward.name!r} cannot be called with the columns of the {dataset} ({error}): "
            + (f"rename its column `{taken[0]}`." if taken else mend)
        ) from error


def _check_answers(reward: ReadsAnswer, dataset: Rows, columns: list[str], name: str) -> None:
    label = reward.name  # type: ignore[attr-defined]  # it stands beside a class of rewards
    if reward.column not in columns:
        raise ConfigError(
            f"The reward {label!r} takes the right answer from the column {reward.column!r}, which the {name} "
            f"does not have{did_you_mean(reward.column, columns)}: its columns are {', '.join(columns)}; name one "
            "with the option `column`."
        )
    if isinstance(dataset, Dataset):  # of a stream, each row is looked at when its answer is scored
        for number, value in enumerate(dataset[reward.column]):
            try:
                reward.right_answer(value)
            except ConfigError:
                raise
            except ValueError as error:
                raise ConfigError(
                    f"The reward {label!r} cannot use the column {reward.column!r} of row {number + 1} of the {name}: "
                    f"{error}."
                ) from error


def _needed(parameters: Iterable[Parameter], positional: int) -> list[str]:
    """Names of the parameters without a default that are left when the first `positional` are given."""
    named = [Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY]
    left: list[Any] = [parameter for parameter in parameters if parameter.kind in named]
    while positional and left and left[0].kind is not Parameter.KEYWORD_ONLY:
        del left[0]
        positional -= 1
    return [parameter.name for parameter in left if parameter.default is Parameter.empty]


def as_datasets(train: object, evaluated: object) -> tuple[Any, Any]:
    """Datasets as they are, and lists of rows as datasets; refuses several to train on."""
    train, evaluated = _as_rows(train, "train_dataset"), _as_rows(evaluated, "eval_dataset")
    if isinstance(train, dict):
        raise ConfigError(
            f"`train_dataset` is several datasets ({', '.join(map(str, train))}): give one of them, as "
            f"`train_dataset[{next(iter(train), 'train')!r}]`."
        )
    return train, evaluated


def _as_rows(data: object, name: str) -> Any:
    if isinstance(data, dict):
        return {split: _as_rows(rows, f"{name}[{split!r}]") for split, rows in data.items()}
    if data is None:
        return None
    if isinstance(data, (Dataset, IterableDataset)):
        _check_decoding(data)
        return data
    rows = data if isinstance(data, (list, tuple)) else []
    others = ((number, row) for number, row in enumerate(rows) if not isinstance(row, Mapping))
    wrong = next((f"list whose element {number} is {str(row)[:80]!r}" for number, row in others), None)
    if wrong or rows is not data:
        raise ConfigError(
            f"`{name}` is a {wrong or type(data).__name__}: give a `datasets.Dataset`, or a list of rows such as "
            '`{"prompt": ...}`.'
        )
    try:
        return Dataset.from_list(with_contents_of_one_kind([dict(row) for row in rows]))
    except (pa.ArrowException, UnicodeEncodeError, OverflowError, TypeError) as error:
        raise ConfigError(
            f"The rows of `{name}` do not make a table ({error}): give each column values of one type."
        ) from error


def _check_prompts(rows: object, name: str) -> None:
    """Refuses prompts that are no text or messages, by the first row, and rows without one; a stream is not read."""
    if not isinstance(rows, Dataset) or not len(rows):
        return
    try:
        as_messages(rows[0]["prompt"])
    except DatasetError as error:
        raise ConfigError(f"The first row of `{name}` {error}") from None
    if not rows.data.column("prompt").null_count:  # of the table: rows that are shuffled are slow to read
        return
    for start in range(0, len(rows), _PART):
        prompts = rows.with_format("arrow", columns=["prompt"])[start : start + _PART]["prompt"]
        if prompts.null_count:
            raise ConfigError(
                f"Row {start + prompts.is_null().index(True).as_py()} (counted from 0) of `{name}` has no prompt: "
                "leave it out (`filter(lambda row: row['prompt'] is not None)`)."
            )


_PART = 10_000  # rows whose prompts are looked at together
