"""Dataset rows from small files in the schemas of their sources; every refusal is one clear sentence."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from support.conversations import user

from mt_grpo.app.build import _between_rates
from mt_grpo.data import DatasetError, as_messages, check_apart, load_rows
from mt_grpo.errors import ConfigError, UserError
from mt_grpo.training.columns import _check_prompts
from mt_grpo.training.model import resolve_model


def trivia(number: int, question: str, value: str, *aliases: str) -> dict[str, Any]:
    """A row in the schema of TriviaQA."""
    empty: dict[str, list] = {"filename": [], "title": []}
    answer = {"aliases": [*aliases], "normalized_aliases": [value.lower()], "normalized_value": value.lower()}
    answer |= {"matched_wiki_entity_name": "", "normalized_matched_wiki_entity_name": "", "type": "WikipediaEntity"}
    return {
        "question": question,
        "question_id": f"tc_{number}",
        "question_source": "http://www.triviacountry.com/",
        "entity_pages": {**empty, "doc_source": [], "wiki_context": []},
        "search_results": {**empty, "description": [], "rank": [], "search_context": [], "url": []},
        "answer": {**answer, "value": value},
    }


TRIVIAQA = [
    trivia(1, "Which Sinclair won in 1930?", "Sinclair Lewis", "(Harry) Sinclair Lewis", "Sinclair Lewis", "Lewis"),
    trivia(3, "Where in England was Dame Judi Dench born?", "York", "Park Grove (1895)", "York UA", "York"),
]
GSM8K = [
    {
        "question": "Natalia sold clips to 48 friends in April, and half as many in May. How many altogether?",
        "answer": "In May she sold 48/2 = <<48/2=24>>24 clips.\nAltogether 48+24 = <<48+24=72>>72.\n#### 72",
    },
    {"question": "How much is a house?", "answer": "80,000+50,000=$<<80000+50000=130000>>130,000\n#### 130,000"},
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def write(tmp_path: Path):
    """Writes rows, or prompts, into a file of a format."""

    def to(name: str, *rows: Any) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row if isinstance(row, dict) else {"prompt": row} for row in rows]
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows))
        else:
            table = datasets.Dataset.from_list(rows)
            table.to_parquet(path) if path.suffix == ".parquet" else table.to_csv(path)
        return str(path)

    return to


def asked(*arguments: Any, **options: Any) -> list[str]:
    """What the prompts of rows are, each a question."""
    prompts = [row["prompt"] for row in load_rows(*arguments, **options)]
    assert prompts == [user(prompt[0]["content"]) for prompt in prompts]
    return [prompt[0]["content"] for prompt in prompts]


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(DatasetError) as error:
        list(load_rows(*arguments, **options))
    assert "\n" not in str(error.value)
    return str(error.value)


STREAMING = pytest.mark.parametrize("streaming", [False, True])


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@STREAMING
def test_known_schemas_become_prompts_and_answers(write, ending: str, streaming: bool) -> None:
    name = f"triviaqa:{write(f'data.{ending}', *TRIVIAQA)}"
    rows = list(load_rows(name, "validation", streaming=streaming))
    assert asked(name, "validation", streaming=streaming) == [row["question"] for row in TRIVIAQA]
    answers = [["Sinclair Lewis", "(Harry) Sinclair Lewis", "Lewis"], ["York", "Park Grove (1895)", "York UA"]]
    assert [(row["answer"], row["question_id"]) for row in rows] == [*zip(answers, ("tc_1", "tc_3"), strict=True)]
    assert set(rows[0]) == {"prompt", "answer", "question", "question_id", "question_source"}
    name = f"gsm8k:{write(f'math.{ending}', *GSM8K)}"
    rows = list(load_rows(name, "train", streaming=streaming))
    assert asked(name, "train", streaming=streaming) == [row["question"] for row in GSM8K]
    finals = zip([row["answer"] for row in GSM8K], ("72", "130000"), strict=True)
    assert [(row["answer"], row["final_answer"]) for row in rows] == [*finals]


@pytest.mark.parametrize(
    ("name", "config", "source", "loaded_config"),
    [
        ("triviaqa", None, "mandarjoshi/trivia_qa", "rc.nocontext"),
        ("triviaqa", "unfiltered.nocontext", "mandarjoshi/trivia_qa", "unfiltered.nocontext"),
        ("triviaqa:someone/copy", None, "someone/copy", None),
        ("gsm8k", None, "openai/gsm8k", "main"),
        ("gsm8k:someone/copy", "socratic", "someone/copy", "socratic"),
        ("someone/questions", "hard", "someone/questions", "hard"),
    ],
)
def test_hub_names_lead_to_their_dataset_configuration_and_split(monkeypatch, name, config, source, loaded_config):
    asked = {}

    def load_dataset(**arguments: Any) -> datasets.Dataset:
        asked.update(arguments)
        content = {"triviaqa": TRIVIAQA, "gsm8k": GSM8K}.get(name.partition(":")[0], [{"prompt": "x"}])
        return datasets.Dataset.from_list(content)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_rows(name, "train[:10]", config=config)[0]["prompt"][0]["role"] == "user"
    assert asked == {"path": source, "name": loaded_config, "split": "train[:10]", "streaming": False}


def test_the_embedded_task_loads_with_validation_as_test() -> None:
    train, validation, test = (load_rows("embedded", split) for split in ("train", "validation", "test"))
    assert train[0]["prompt"] == user(train[0]["question"])
    assert {"prompt", "answer", "hops"} <= set(train.column_names)
    assert test[:] == validation[:] != train[:]
    assert next(iter(load_rows("embedded", "test", streaming=True))) == test[0]
    assert load_rows("embedded", "validation[2:4]").to_list() == validation.select([2, 3]).to_list()
    assert len(load_rows("embedded", "train[:10%]")) == pytest.approx(len(train) / 10, abs=1)
    assert load_rows("embedded", "train[5:7]+train[:1]")[:] == {
        name: [values[5], values[6], values[0]] for name, values in train[:7].items()
    }
    for split in ("train[:2", "train[:2]+validation[:2]"):
        assert f"The split {split!r} is not read (" in refusal("embedded", split)


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet", "csv"])
def test_any_file_loads_through_a_column_mapping(write, ending: str) -> None:
    path = write(f"qa.{ending}", {"q": "One?", "gold": "1a", "level": 3}, {"q": "Two?", "gold": "2a"})
    mapping = {"prompt": "q", "answer": "gold"}
    rows = load_rows(path, "train", column_mapping=mapping)
    assert asked(path, "train", column_mapping=mapping) == ["One?", "Two?"]
    assert rows["answer"][:] == rows["gold"][:] == ["1a", "2a"] and rows[0]["level"] == 3


def test_a_mapping_serves_the_known_schemas_too(write) -> None:
    path = write("gsm.jsonl", *({"q": row["question"], "answer": row["answer"]} for row in GSM8K))
    row, _ = load_rows(f"gsm8k:{path}", "train", column_mapping={"question": "q"})
    assert (row["prompt"], row["final_answer"]) == (user(GSM8K[0]["question"]), "72")


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_messages_are_kept_as_they_are(write, ending: str) -> None:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write(f"chat.{ending}", {"messages": prompt}, {"messages": prompt[1:]})
    rows = load_rows(path, "train", column_mapping={"prompt": "messages"})
    assert [row["prompt"] for row in rows] == [prompt, prompt[1:]]


@pytest.mark.parametrize(
    "message", [{"role": "user", "content": "b", "name": "Ann"}, {"role": "context", "content": "A"}]
)
def test_keys_and_roles_of_a_templates_own_are_taken(write, message) -> None:
    prompts = [user("a"), [message]]
    assert load_rows(write("chat.jsonl", *prompts), "train")["prompt"][:] == prompts


# Files, folders and splits


def test_a_folder_holds_one_file_or_its_shards_for_each_split(write, tmp_path: Path) -> None:
    write("set/train.jsonl", "t0", "t1", "t2", "t3")
    write("set/validation-00000-of-00002.parquet", "v0")
    write("set/validation-00001-of-00002.parquet", "v1")
    write("set/training.jsonl", "other")
    found = [asked(str(tmp_path / "set"), split) for split in ("train", "validation", "train[1:3]")]
    assert found == [["t0", "t1", "t2", "t3"], ["v0", "v1"], ["t1", "t2"]]
    write("set/data/train-00000-of-00001.parquet", "other")
    write("set/data/test-00000-of-00001.parquet", "e0")  # where the Hub has them
    found = [asked(str(tmp_path / "set"), split) for split in ("train", "test")]
    assert found == [["t0", "t1", "t2", "t3"], ["e0"]]


@pytest.fixture
def ten(write) -> str:
    return write("rows.jsonl", *(f"q{number}" for number in range(10)))


def test_a_single_file_serves_as_any_split(ten) -> None:
    assert asked(ten, "train") == asked(ten, "validation") and asked(ten, "validation[:1]") == ["q0"]


@STREAMING
def test_a_file_is_sliced(ten, streaming: bool) -> None:
    found = [asked(ten, split, streaming=streaming) for split in ("train[7:]", "train[:2]", "train[2:4]")]
    assert found == [["q7", "q8", "q9"], ["q0", "q1"], ["q2", "q3"]]


@pytest.mark.parametrize(("split", "rows"), [("train[:50%]", 5), ("train[-2:]", 2)])
def test_a_slice_that_a_stream_cannot_have_is_refused(ten, split: str, rows: int) -> None:
    assert len(asked(ten, split)) == rows
    assert "count rows from the first on, as `train[:100]`" in refusal(ten, split, streaming=True)


@STREAMING
def test_what_is_empty_is_refused(write, tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "header.csv").write_text("prompt,answer\n")
    for path, columns in (("columns", {}), ("rows", {"prompt": []})):
        pq.write_table(pa.table(columns), tmp_path / f"{path}.parquet")
    for name, split in (
        (write("empty.jsonl"), "train"),
        *((str(tmp_path / name), "train") for name in ("header.csv", "columns.parquet", "rows.parquet")),
        ("embedded", "train[5:5]"),
        ("embedded", "train[7:5]"),
    ):
        assert "is empty" in refusal(name, split, streaming=streaming)
    path = write("some.jsonl", "a")
    assert f"The split 'train[5:]' of the dataset {path!r} is empty" in refusal(path, "train[5:]", streaming=streaming)


def test_a_split_that_is_not_there_is_refused_with_what_is(write, tmp_path: Path) -> None:
    path, folder = write("set/train.jsonl", "a"), str(tmp_path / "set")
    (tmp_path / "none").mkdir()
    for name, split, said in (
        (folder, "validation", "has no file for the split 'validation': it holds train.jsonl."),
        (str(tmp_path / "none"), "train", "it holds no .jsonl, .json, .parquet, .csv file"),
        ("embedded", "dev", "no split 'dev': it has train, validation, test"),
        ("embedded", "validaton[:4]", "'validaton'; the nearest is 'validation'"),
        (folder, "trian", "'trian'; the nearest is 'train'"),
        (path, "trian", "'trian'; the nearest is 'train'"),
    ):
        assert said in refusal(name, split)
    write("set/train.parquet", "a")
    assert "in several formats: train.jsonl, train.parquet; keep one" in refusal(folder, "train")


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "/no/such/folder", "a/b/c", "gsm8k:missing.parquet"])
def test_a_path_to_nothing_is_refused_without_asking_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", None)
    assert f"There is no file or folder {name.rpartition(':')[2]!r}" in refusal(name, "train")


def test_files_that_cannot_be_read_are_refused_with_the_reason(tmp_path: Path) -> None:
    for streaming, name, content, said in (
        (False, "notes.txt", "a", "is none of the formats .jsonl, .json, .parquet, .csv"),
        (False, "broken.jsonl", '{"prompt": "a"}\n{"prompt": \n', "does not load: JSON parse error"),
        (True, "stream.jsonl", '{"prompt": \n', "does not load: JSON parse error"),
        (False, "null.json", "null", "begins with `null`"),
        (False, "first.json", '[null, {"prompt": "a"}]', "begins with `null`"),
        (True, "null.jsonl", '\nnull\n{"prompt": "a"}', "begins with `null`, which is no row: remove it."),
        (True, "mixed.json", '[{"prompt": "a"}, 3]', "does not load: 'int' object is not iterable"),
        (False, "latin.csv", "prompt,answer\nWo liegt Zürich?,Schweiz\n", "byte: save the file in UTF-8."),
        (False, "deep.jsonl", '{"prompt":' * 2000 + "1" + "}" * 2000, "does not load: maximum recursion depth"),
    ):
        (tmp_path / name).write_text(content, encoding="latin-1")
        assert said in refusal(str(tmp_path / name), "train", streaming=streaming)
    (tmp_path / "folder" / "train.jsonl").mkdir(parents=True)
    assert "does not load: Unable to find" in refusal(str(tmp_path / "folder"), "train")
    for line in (f'{{"rate": 0.5, "attempts": 1{"0" * 400}, "digest": "a"}}', "[" * 100_000):
        (tmp_path / "difficulty.jsonl").write_text(line)
        with pytest.raises(DatasetError, match="name a file that `mt-grpo rollout --difficulty` wrote"):
            _between_rates(datasets.Dataset.from_list([{"prompt": "a"}]), str(tmp_path / "difficulty.jsonl"), 0, 1)


@pytest.mark.parametrize("config", ["{size: ", "size", "{size: 2026-99-99}", "[" * 1500])
def test_options_of_a_task_that_are_no_mapping_are_refused(config: str) -> None:
    with pytest.raises(UserError, match="`dataset_config` is "):
        load_rows("reasoning_gym:leg_counting", "train", config=config)


@pytest.mark.parametrize("train", ["train", "train[2:]", "train[:-1]"])
def test_a_file_is_not_measured_on_what_it_trains_on(ten, train: str) -> None:
    for test in ("test", "train", "train[:3]", "validation[:4]"):
        for name in (ten, f"gsm8k:{ten}"):
            with pytest.raises(DatasetError) as refused:
                check_apart(name, train, test, load_rows(ten, train))
        assert "`dataset_train_split: train[20:]` and `dataset_test_split: train[:20]`" in str(refused.value)


def test_slices_without_a_row_in_common_are_taken(ten, tmp_path: Path) -> None:
    for train, test in (
        ("train[2:]", "train[:2]"),
        ("train[2:]", "test[:2]"),
        ("train[:80%]", "train[80%:]"),
        ("train[:-2]", "train[-2:]"),
    ):
        check_apart(ten, train, test, load_rows(ten, train))
    for name in (str(tmp_path), "somebody/dataset"):  # other sources are told apart by their splits
        check_apart(name, "train", "test")
        check_apart(name, "train+validation[:10]", "validation[10:]")
    for split in ("test", "dev", "test[x"):  # a wrong one is refused where it is read
        check_apart("embedded", "train", split)


@pytest.mark.parametrize(
    ("name", "train", "test"),
    [
        (".", "train", "train[:20]"),
        ("somebody/dataset", "train+validation", "validation[10:]"),
        ("embedded", "validation", "test[:4]"),
    ],
)
def test_splits_that_overlap_are_refused(name: str, train: str, test: str) -> None:
    with pytest.raises(DatasetError):
        check_apart(name, train, test)


# Columns and prompts


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "has no column 'prompt'; the nearest is 'prompts': its columns are prompts, gold"),
        ({}, "`column_mapping: {prompt: its name}`"),
        ({"streaming": True}, "has no column 'prompt'"),
        ({"column_mapping": {"prompt": "prompts", "answer": "golden"}}, "'golden'; the nearest is 'gold'"),
        ({"column_mapping": {"prompts": "prompt"}}, "are prompts, gold; write the new name first, `{prompt: prompts}"),
    ],
)
def test_a_missing_column_is_named_with_those_there_are(write, options: dict, said: str) -> None:
    path = write("qa.jsonl", {"prompts": "One?", "gold": "1"})
    assert said in refusal(path, "train", **options)
    assert "has no column 'question'" in refusal(f"gsm8k:{path}", "train")


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "human", "content": "Hi"}, "has a message of role 'human': write 'user'."),
        ({"role": "User", "content": "Hi"}, "has a message of role 'User': write 'user'."),
        ({"role": "gpt", "content": "Hi"}, "has a message of role 'gpt': write 'assistant'."),
        ({"from": "human", "value": "Hi"}, "Write `role` for `from`, `content` for `value`, and the role `user` for"),
    ],
)
def test_roles_of_other_datasets_are_refused_with_ours(write, message: dict[str, str], says: str) -> None:
    assert says in refusal(write("qa.jsonl", [message]), "train")
    with pytest.raises(ConfigError, match="The first row of `train_dataset` has"):
        _check_prompts(datasets.Dataset.from_list([{"prompt": [message]}]), "train_dataset")


@pytest.mark.parametrize("prompt", [3, None, [], ["a"], [{"content": "a"}], {"role": "user"}])
def test_a_prompt_that_is_no_text_or_messages_names_its_row(write, prompt: Any) -> None:
    path = write("qa.jsonl", "fine", {"prompt": prompt})
    assert "Row 1 (counted from 0) of the dataset" in refusal(path, "train")
    with pytest.raises(DatasetError, match="has a prompt that is neither text nor a list of messages"):
        as_messages(prompt)


@pytest.mark.parametrize(
    ("schema", "row", "said"),
    [
        ("", [{"role": "user"}], "has a message without `content`: \"{'role': 'user'}\"."),
        ("triviaqa:", trivia(2, "q", "<unk>"), "has a hidden answer"),
        ("triviaqa:", {"question": "q", "question_id": "1", "answer": "York"}, "the value and aliases of TriviaQA"),
        ("gsm8k:", {"question": "q", "answer": "72"}, "without the `####`"),
    ],
)
def test_rows_of_another_schema_are_refused_with_their_number(write, schema: str, row: Any, said: str) -> None:
    found = refusal(f"{schema}{write('rows.jsonl', row)}", "train")
    assert "Row 0 (counted from 0) of the dataset" in found and said in found
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    assert as_messages([call]) == [call]


# What is not here and cannot be fetched

NOBODY = "http://127.0.0.1:9"  # the port that discards; nothing listens there


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without a network, and with an empty cache, whose folder this is."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_what_the_hub_does_not_have_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(**arguments: Any) -> None:
        raise ValueError('Unknown split "dev".\nShould be one of ["train"].')

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert refusal("trivaqa", "dev") == (
        "The split 'dev' of the dataset 'trivaqa' does not load; the nearest is 'triviaqa': "
        'Unknown split "dev". Should be one of ["train"].'
    )


def test_a_home_that_cannot_be_written_is_named_with_its_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container without a home."""
    rows = tmp_path / "rows.csv"
    rows.write_text("prompt\nWhere is Lima?\n")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(rows / "datasets"))  # which cannot be made
    assert refusal(str(rows), "train").endswith(": set `HF_HOME` to a folder that can be written.")


def test_a_hub_that_is_out_of_reach_is_named(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=rf"'some/thing' is neither .* {NOBODY} cannot be reached .*: name a folder"):
        resolve_model("some/thing")
    with pytest.raises(DatasetError, match=rf"'trivaqa' .* the nearest is 'triviaqa': .* {NOBODY} cannot be reached"):
        load_rows("trivaqa", "train")
    with pytest.raises(DatasetError, match=rf"'puzzles:chain' is neither .* {NOBODY} cannot be reached"):
        load_rows("puzzles:chain", "train")  # no name that the Hub would take
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="since `HF_HUB_OFFLINE` is set"):
        resolve_model("some/thing")


def test_a_model_in_the_cache_needs_no_hub(closed: Path) -> None:
    folder = closed / "models--some--thing"
    for name, content in (("refs/main", "0" * 40), (f"snapshots/{'0' * 40}/config.json", "{}")):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(content)
    assert resolve_model("some/thing") == "some/thing"


def test_missing_prompts_are_found_without_reading_rows(monkeypatch):
    rows = datasets.Dataset.from_dict({"prompt": ["a", None, "b", "c"]})
    with pytest.raises(ConfigError, match=r"Row 2 .counted from 0. of `train_dataset` has no prompt"):
        _check_prompts(rows.select([3, 0, 1]), "train_dataset")
    read = []
    of = datasets.Dataset.__getitem__
    monkeypatch.setattr(datasets.Dataset, "__getitem__", lambda self, key: read.append(key) or of(self, key))
    _check_prompts(rows.select([3, 0, 2]), "train_dataset")  # those that are left out are missed by nobody
    read.clear()
    _check_prompts(datasets.Dataset.from_dict({"prompt": ["a", "b", "c"]}).select([2, 0, 1]), "train_dataset")
    assert read == [0]
