"""Dataset rows from small files in the schemas of their sources; every refusal is one clear sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from mt_grpo.data import DatasetError, load_rows
from mt_grpo.data.loaders import as_messages, gsm8k_row, triviaqa_row
from mt_grpo.errors import ConfigError
from mt_grpo.training.columns import check_prompts

TRIVIAQA = [
    {
        "question": "Which American-born Sinclair won the Nobel Prize for Literature in 1930?",
        "question_id": "tc_1",
        "question_source": "http://www.triviacountry.com/",
        "entity_pages": {"doc_source": [], "filename": [], "title": [], "wiki_context": []},
        "search_results": {
            "description": [],
            "filename": [],
            "rank": [],
            "search_context": [],
            "title": [],
            "url": [],
        },
        "answer": {
            "aliases": ["(Harry) Sinclair Lewis", "Sinclair Lewis", "Lewis, (Harry) Sinclair"],
            "matched_wiki_entity_name": "",
            "normalized_aliases": ["grace hegger", "sinclair lewis"],
            "normalized_matched_wiki_entity_name": "",
            "normalized_value": "sinclair lewis",
            "type": "WikipediaEntity",
            "value": "Sinclair Lewis",
        },
    },
    {
        "question": "Where in England was Dame Judi Dench born?",
        "question_id": "tc_3",
        "question_source": "http://www.triviacountry.com/",
        "entity_pages": {"doc_source": [], "filename": [], "title": [], "wiki_context": []},
        "search_results": {
            "description": [],
            "filename": [],
            "rank": [],
            "search_context": [],
            "title": [],
            "url": [],
        },
        "answer": {
            "aliases": ["Park Grove (1895)", "York UA", "York"],
            "matched_wiki_entity_name": "",
            "normalized_aliases": ["york", "york ua"],
            "normalized_matched_wiki_entity_name": "",
            "normalized_value": "york",
            "type": "WikipediaEntity",
            "value": "York",
        },
    },
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


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        table = datasets.Dataset.from_list(rows)
        table.to_parquet(path) if path.suffix == ".parquet" else table.to_csv(path)
    return str(path)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_triviaqa_becomes_prompts_and_flat_answers(tmp_path: Path, ending: str, streaming: bool) -> None:
    path = write(tmp_path / f"data.{ending}", TRIVIAQA)
    rows = list(load_rows(f"triviaqa:{path}", "validation", streaming=streaming))
    assert [row["prompt"] for row in rows] == [user(row["question"]) for row in TRIVIAQA]
    assert rows[0]["answer"] == ["Sinclair Lewis", "(Harry) Sinclair Lewis", "Lewis, (Harry) Sinclair"]
    assert rows[1]["answer"] == ["York", "Park Grove (1895)", "York UA"]
    assert [row["question_id"] for row in rows] == ["tc_1", "tc_3"]
    assert set(rows[0]) == {"prompt", "answer", "question", "question_id", "question_source"}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_gsm8k_keeps_the_worked_answer_and_adds_the_final_one(tmp_path: Path, ending: str, streaming: bool) -> None:
    path = write(tmp_path / f"data.{ending}", GSM8K)
    rows = list(load_rows(f"gsm8k:{path}", "train", streaming=streaming))
    assert [row["prompt"] for row in rows] == [user(row["question"]) for row in GSM8K]
    assert [row["answer"] for row in rows] == [row["answer"] for row in GSM8K]
    assert [row["final_answer"] for row in rows] == ["72", "130000"]


def test_the_row_functions_leave_their_input_alone() -> None:
    trivia, math = json.loads(json.dumps(TRIVIAQA[0])), dict(GSM8K[1])
    assert set(triviaqa_row(trivia)) == {"prompt", "answer", "question_id"}
    assert set(gsm8k_row(math)) == {"prompt", "answer", "final_answer"}
    assert (trivia, math) == (TRIVIAQA[0], GSM8K[1])


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
def test_hub_names_lead_to_their_dataset_configuration_and_split(
    monkeypatch: pytest.MonkeyPatch, name: str, config: str | None, source: str, loaded_config: str | None
) -> None:
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


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet", "csv"])
def test_any_file_loads_through_a_column_mapping(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / f"qa.{ending}", [{"q": "One?", "gold": "1a", "level": 3}, {"q": "Two?", "gold": "2a"}])
    rows = load_rows(path, "train", column_mapping={"prompt": "q", "answer": "gold"})
    assert [row["prompt"] for row in rows] == [user("One?"), user("Two?")]
    assert rows["answer"][:] == rows["gold"][:] == ["1a", "2a"]
    assert rows[0]["level"] == 3


def test_a_mapping_serves_the_known_schemas_too(tmp_path: Path) -> None:
    path = write(tmp_path / "gsm.jsonl", [{"q": row["question"], "answer": row["answer"]} for row in GSM8K])
    rows = load_rows(f"gsm8k:{path}", "train", column_mapping={"question": "q"})
    assert rows[0]["prompt"] == user(GSM8K[0]["question"])
    assert rows[0]["final_answer"] == "72"


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_messages_are_kept_as_they_are(tmp_path: Path, ending: str) -> None:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write(tmp_path / f"chat.{ending}", [{"messages": prompt}, {"messages": prompt[1:]}])
    rows = load_rows(path, "train", column_mapping={"prompt": "messages"})
    assert [row["prompt"] for row in rows] == [prompt, prompt[1:]]


def test_messages_with_keys_of_their_own_gain_none(tmp_path: Path) -> None:
    prompts = [user("a"), [{"role": "user", "content": "b", "name": "Ann"}]]
    path = write(tmp_path / "chat.jsonl", [{"prompt": prompt} for prompt in prompts])
    assert load_rows(path, "train")["prompt"][:] == prompts


def test_a_folder_holds_one_file_or_its_shards_for_each_split(tmp_path: Path) -> None:
    write(tmp_path / "set/train.jsonl", [{"prompt": f"t{i}"} for i in range(4)])
    write(tmp_path / "set/validation-00000-of-00002.parquet", [{"prompt": "v0"}])
    write(tmp_path / "set/validation-00001-of-00002.parquet", [{"prompt": "v1"}])
    write(tmp_path / "set/training.jsonl", [{"prompt": "other"}])
    folder = str(tmp_path / "set")
    assert [row["prompt"] for row in load_rows(folder, "train")] == [user(f"t{i}") for i in range(4)]
    assert [row["prompt"] for row in load_rows(folder, "validation")] == [user("v0"), user("v1")]
    assert [row["prompt"] for row in load_rows(folder, "train[1:3]")] == [user("t1"), user("t2")]


def test_a_single_file_serves_as_any_split(tmp_path: Path) -> None:
    path = write(tmp_path / "all.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    assert load_rows(path, "train")[:] == load_rows(path, "validation")[:]
    assert len(load_rows(path, "validation[:1]")) == 1


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(DatasetError) as error:
        list(load_rows(*arguments, **options))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "qa.jsonl", [{"prompts": "One?", "gold": "1"}])
    said = refusal(path, "train")
    assert "has no column 'prompt'; the nearest is 'prompts': its columns are prompts, gold" in said
    assert "`column_mapping: {prompt: its name}`" in said
    said = refusal(path, "train", column_mapping={"prompt": "prompts", "answer": "golden"})
    assert "has no column 'golden', which `column_mapping` names; the nearest is 'gold'" in said
    assert "has no column 'question'" in refusal(f"gsm8k:{path}", "train")
    said = refusal(path, "train", column_mapping={"prompts": "prompt"})
    assert said.endswith("its columns are prompts, gold; write the new name first, `{prompt: prompts}`.")
    assert "has no column 'prompt'" in refusal(path, "train", streaming=True)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "human", "content": "Hi"}, "has a message of role 'human': write 'user'."),
        ({"role": "User", "content": "Hi"}, "has a message of role 'User': write 'user'."),
        ({"role": "gpt", "content": "Hi"}, "has a message of role 'gpt': write 'assistant'."),
        ({"from": "human", "value": "Hi"}, "Write `role` for `from`, `content` for `value`, and the role `user` for"),
    ],
)
def test_roles_of_other_datasets_are_refused_with_ours(tmp_path: Path, message: dict[str, str], says: str) -> None:
    path = write(tmp_path / "qa.jsonl", [{"prompt": [message]}])
    assert says in refusal(path, "train")
    with pytest.raises(ConfigError, match="The first row of `train_dataset` has"):
        check_prompts(datasets.Dataset.from_list([{"prompt": [message]}]), None, False)


def test_a_role_of_a_templates_own_is_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "qa.jsonl", [{"prompt": [{"role": "context", "content": "A"}, *user("Q")]}])
    assert load_rows(path, "train")[0]["prompt"][0]["role"] == "context"


def test_a_missing_split_is_refused_with_those_there_are(tmp_path: Path) -> None:
    write(tmp_path / "set/train.jsonl", [{"prompt": "a"}])
    said = refusal(str(tmp_path / "set"), "validation")
    assert said.endswith("has no file for the split 'validation': it holds train.jsonl.")
    (tmp_path / "none").mkdir()
    assert "it holds no .jsonl, .json, .parquet, .csv file" in refusal(str(tmp_path / "none"), "train")
    assert "no split 'dev': it has train, validation, test" in refusal("embedded", "dev")


def test_a_split_in_two_formats_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "set/train.jsonl", [{"prompt": "a"}])
    write(tmp_path / "set/train.parquet", [{"prompt": "a"}])
    assert "in several formats: train.jsonl, train.parquet; keep one" in refusal(str(tmp_path / "set"), "train")


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "/no/such/folder", "a/b/c", "gsm8k:missing.parquet"])
def test_a_path_to_nothing_is_refused_without_asking_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", None)
    assert f"There is no file or folder {name.rpartition(':')[2]!r}" in refusal(name, "train")


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a")
    assert "is none of the formats .jsonl, .json, .parquet, .csv" in refusal(str(tmp_path / "notes.txt"), "train")


def test_what_the_hub_does_not_have_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(**arguments: Any) -> None:
        raise ValueError('Unknown split "dev".\nShould be one of ["train"].')

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    said = refusal("trivaqa", "dev")
    assert said == (
        "The split 'dev' of the dataset 'trivaqa' does not load; the nearest is 'triviaqa': "
        'Unknown split "dev". Should be one of ["train"].'
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_an_empty_dataset_is_refused(tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    assert "is empty" in refusal(str(tmp_path / "empty.jsonl"), "train", streaming=streaming)
    (tmp_path / "header.csv").write_text("prompt,answer\n")
    assert "is empty" in refusal(str(tmp_path / "header.csv"), "train", streaming=streaming)


def test_an_empty_slice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "some.jsonl", [{"prompt": "a"}])
    assert f"The split 'train[5:]' of the dataset {path!r} is empty" in refusal(path, "train[5:]")


@pytest.mark.parametrize(
    ("streaming", "content"), [(False, '{"prompt": "a"}\n{"prompt": \n'), (True, '{"prompt": \n')]
)
def test_a_broken_file_is_refused_with_the_reason(tmp_path: Path, streaming: bool, content: str) -> None:
    (tmp_path / "broken.jsonl").write_text(content)
    assert "does not load: JSON parse error" in refusal(str(tmp_path / "broken.jsonl"), "train", streaming=streaming)


@pytest.mark.parametrize("prompt", [3, None, [], ["a"], [{"content": "a"}], {"role": "user"}])
def test_a_prompt_that_is_no_text_or_messages_names_its_row(tmp_path: Path, prompt: Any) -> None:
    path = write(tmp_path / "qa.jsonl", [{"prompt": "fine"}, {"prompt": prompt}])
    assert "Row 1 (counted from 0) of the dataset" in refusal(path, "train")
    with pytest.raises(DatasetError, match="has a prompt that is neither text nor a list of messages"):
        as_messages(prompt)


def test_a_message_that_says_nothing_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "qa.jsonl", [{"prompt": [{"role": "user"}]}])
    assert "Row 0 (counted from 0) of the dataset" in (said := refusal(path, "train"))
    assert said.endswith("has a message without `content`: \"{'role': 'user'}\".")
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    assert as_messages([call]) == [call]


def test_rows_of_another_schema_are_refused_with_their_number(tmp_path: Path) -> None:
    hidden = {**TRIVIAQA[0], "answer": {**TRIVIAQA[0]["answer"], "value": "<unk>", "aliases": []}}
    path = write(tmp_path / "test.jsonl", [TRIVIAQA[0], hidden])
    assert "Row 1 (counted from 0)" in (said := refusal(f"triviaqa:{path}", "test"))
    assert "has a hidden answer" in said
    path = write(tmp_path / "flat.jsonl", [{"question": "q", "question_id": "1", "answer": "York"}])
    assert "without the value and aliases of TriviaQA" in refusal(f"triviaqa:{path}", "train")
    path = write(tmp_path / "math.jsonl", [{"question": "q", "answer": "72"}])
    assert "without the `####`" in refusal(f"gsm8k:{path}", "train")


def test_loading_rows_needs_no_torch() -> None:
    code = "import sys, mt_grpo.data, mt_grpo.tools; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_embedded_questions_can_be_sliced():
    whole = load_rows("embedded", "validation")
    assert load_rows("embedded", "validation[2:4]").to_list() == whole.select([2, 3]).to_list()
    assert len(load_rows("embedded", "train[:10%]")) == pytest.approx(len(load_rows("embedded", "train")) / 10, abs=1)
