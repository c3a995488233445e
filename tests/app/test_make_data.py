"""`mt-grpo rollout --model`: data for SFT, DPO and a choice of rows, from the conversations of any model."""

import json
import re
import shlex
from pathlib import Path

import pytest
from datasets import load_dataset
from safetensors.torch import load_file
from support.endpoints import refusal
from support.runs import EMBEDDED
from trl import DPOConfig, DPOTrainer
from trl.scripts import sft

from mt_grpo.cli import main
from mt_grpo.data.embedded.corpus import questions
from mt_grpo.runlog import open_run

ROOT = Path(__file__).parents[2]
RIGHT, WRONG = "<answer>Lima</answer>", "<answer>Cusco</answer>"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Strong:
    """Answers the rows 0 and 1 right, 2 every second time, and 3 never."""

    def __init__(self):
        self.seen = 0

    def __call__(self, number, body):
        asked = int(body["messages"][-1]["content"].split()[2])
        self.seen += asked == 2
        return RIGHT if asked < 2 or (asked == 2 and self.seen % 2) else WRONG


@pytest.fixture
def sampled(endpoint, recipe, prints, tmp_path):
    """Has a strong model answer four training rows twice: the server, the words of the command, what it printed."""
    server = endpoint(Strong())
    words = [*recipe(), "--save", tmp_path / "data", "--model", f"{server.url}/v1", "--num_generations", "2"]
    says = prints("rollout", *words, "--keep", "exact_match>=1", "--prices", "1", "2", "0.5", "--difficulty")
    return server, words, says


def test_what_passes_and_pairs_are_written(sampled, prints, tmp_path):
    server, words, says = sampled
    assert "8 conversations of 4 rows, 5 pass exact_match>=1\n" in says
    assert "8 requests, 800 tokens in (320 cached), 80 out, cost 0.0008" in says
    run, sft, messages, pairs = (tmp_path / "data" / name for name in ("", "sft", "messages", "dpo"))
    assert [line["messages"][-1]["content"] for line in lines(messages / "train.jsonl")] == [RIGHT] * 5
    tokenizer = open_run(run).tokenizer
    for line in lines(sft / "train.jsonl"):
        own = [token for token, mask in zip(line["input_ids"], line["assistant_masks"], strict=True) if mask]
        assert tokenizer.decode(own, skip_special_tokens=False) == RIGHT
    (pair,) = lines(pairs / "train.jsonl")
    assert "What is 2 of Peru" in pair["prompt"] and RIGHT in pair["chosen"] and WRONG in pair["rejected"]
    asked = len(server.requests)
    says = prints("rollout", *words, "--keep", "exact_match<1")
    assert "3 pass exact_match<1" in says and f"No {pairs / 'train.jsonl'}: of no pair the better one passes." in says
    assert len(server.requests) == asked
    assert len(lines(sft / "train.jsonl")) == 3 and not (pairs / "train.jsonl").exists()


@pytest.mark.slow
def test_the_commands_of_the_page_lead_to_rl(endpoint, prints, tmp_path, monkeypatch):
    answers = {row["question"]: row["answer"][0] for row in questions("train")}

    def expert(number, body):
        said = body["messages"]
        if len(said) > 2:
            return f"<answer>{answers[said[1]['content']]}</answer>" if number % 3 else "<answer>?</answer>"
        return f"<tool>{json.dumps({'name': 'search', 'args': {'query': said[1]['content']}})}</tool>"

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_KEY", "secret")
    model = str(EMBEDDED.parent)
    named = {"RECIPE.yaml": str(ROOT / "recipes/quickstart.yaml"), "MODEL": model}
    named["NAME@https://api.example.com/v1"] = f"big@{endpoint(expert).url}/v1"
    page = re.findall(r"^    (mt-grpo|trl) (.*)$", (ROOT / "docs/start.md").read_text(), re.MULTILINE)
    rollout, trl, train, rates = ([named.get(word, word) for word in shlex.split(words)] for _, words in page)
    small = ["--max_turn_length", "16", "--dataset_train_split", "train[:6]"]
    assert " pass exact_match>=1" in prints(*rollout, *small[2:])
    run = [*trl[1:], "--max_steps", "2", "--use_cpu", "--bf16", "false", "--report_to", "none"]
    sft.main(*sft.make_parser().parse_args_and_config(run))
    before, after = (load_file(Path(folder, "model.safetensors")) for folder in (model, "runs/sft"))
    assert any((before[name] != after[name]).any() for name in before)
    prints(*rates, *small)
    chosen = json.dumps({"file": "runs/rates/difficulty.jsonl", "between": [0, 1]})
    small += [
        "--do_eval",
        "false",
        "--max_steps",
        "1",
        "--per_device_train_batch_size",
        "8",
        "--dataset_filter",
        chosen,
    ]
    prints(*train, *small, "--output_dir", "runs/rl")
    assert open_run("runs/rl").about["model"] == "runs/sft"
    pairs = load_dataset("json", data_files="runs/strong/dpo/train.jsonl", split="train")
    options = {"max_steps": 1, "use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no"}
    trainer = DPOTrainer(model, args=DPOConfig("runs/dpo", max_length=None, **options), train_dataset=pairs)
    assert trainer.train().training_loss == pytest.approx(0.693, abs=0.01)  # its reference is still the same


def test_rows_are_chosen_by_how_often_they_were_passed(sampled, recipe, prints, refused, tmp_path):
    file = tmp_path / "data" / "difficulty.jsonl"
    found = [(line["row"], line["rate"], line["attempts"], line["prompt"]) for line in lines(file)]
    assert found == [(row, rate, 2, f"What is {row} of Peru") for row, rate in enumerate([1.0, 1.0, 0.5, 0.0])]
    chosen = {"file": str(file), "between": [0.1, 0.9]}
    prints("train", *recipe(dataset_filter=chosen, max_steps=1, do_eval=False, per_device_train_batch_size=2))
    assert {row["prompt"] for row in open_run(tmp_path / "run").rows} == {"What is 2 of Peru"}
    chosen = {"dataset_filter": chosen, "do_eval": False, "output_dir": str(tmp_path / "other")}
    says = refused("train", *recipe(**chosen, dataset_train_split="train[2:6]"))
    assert "2 of 4 training rows are not in" in says and "the first is row 2 (counted from 0)" in says
    unread = tmp_path / "unread.jsonl"
    other = {**chosen, "dataset_filter": {"file": str(unread), "between": [0, 1]}}
    for old, new, says in (
        ('"rate": 0.5', '"rate": "0.5"', "a `rate` is '0.5'"),
        ('"attempts": 2', '"attempts": -1', "`attempts` is -1"),
    ):
        unread.write_text(file.read_text().replace(old, new))
        assert f"(ValueError: {says})" in refused("train", *recipe(**other))
    words = recipe(**chosen)
    rows = tmp_path / "train.jsonl"
    rows.write_text(rows.read_text().replace("1 of Peru", "9 of Peru"))
    assert "1 of 4 training rows are not in" in refused("train", *words)


def test_rules_are_not_compared_on_an_endpoints_conversations(sampled, refused, tmp_path):
    says = refused("credit", tmp_path / "data")
    assert "An endpoint had the conversations of" in says and "config.yaml --num_prompts 32 --save FOLDER`" in says


def test_what_an_endpoint_was_paid_before_a_stop_is_counted(endpoint, recipe, prints, refused, tmp_path):
    """Conversations that a stop breaks off are sampled again, and were paid."""
    paid = [True]
    call = '<tool>{"name": "search", "args": {"query": "Peru"}}</tool>'

    def answer(number, body):
        if len(body["messages"]) > 2 and paid[0]:
            return refusal(402, "no money left")
        return RIGHT if len(body["messages"]) > 2 else call

    server = endpoint(answer)
    words = [*recipe(max_concurrent_rollouts=1), "--save", tmp_path / "data", "--model", f"{server.url}/v1"]
    words += ["--num_generations", "1"]
    assert "no money left" in refused("rollout", *words)
    paid[0] = False
    assert "9 requests, 900 tokens in" in prints("rollout", *words)


def test_nothing_that_passes_is_told_with_what_was_earned(sampled, capsys, tmp_path):
    _, words, _ = sampled
    assert main(["rollout", *map(str, words), "--keep", "exact_match>1"]) == 1
    said = capsys.readouterr().out
    assert "0 pass exact_match>1\n" in said and "The rewards were: exact_match_reward_func 0 to 1" in said
    assert not (tmp_path / "data/sft/train.jsonl").exists()


def test_a_folder_of_something_else_is_left_alone(recipe, refused, tmp_path):
    file = tmp_path / "data/sft/train.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    says = refused("rollout", *recipe(), "--save", tmp_path / "data", "--keep", "exact_match>1")
    assert "is there already: give `--save` another folder" in says and file.read_text() == "mine"


def test_difficulty_is_measured_on_all_rows(sampled, recipe, prints, tmp_path):
    server, words, _ = sampled
    file = tmp_path / "data" / "difficulty.jsonl"
    file.unlink()
    recipe(dataset_filter={"file": str(file), "between": [0.1, 0.9]})
    prints("rollout", *words, "--difficulty")
    assert [line["rate"] for line in lines(file)] == [1.0, 1.0, 0.5, 0.0]  # by the first outcome reward


def test_a_row_that_no_reward_judges_has_no_rate(endpoint, recipe, prints, tmp_path):
    (tmp_path / "judge.py").write_text(
        "def judged(prompts, **columns):\n    return [None if '1 of' in str(prompt) else 1.0 for prompt in prompts]"
    )
    words = [*recipe(outcome_reward_funcs=[f"{tmp_path}/judge.py:judged"]), "--save", tmp_path / "data", "--model"]
    words += [f"{endpoint(lambda number, body: RIGHT).url}/v1", "--num_generations", "2", "--difficulty"]
    for more in ([], ["--keep", "judged>=1"]):
        prints("rollout", *words, *more)
        found = [(line["rate"], line["attempts"]) for line in lines(tmp_path / "data/difficulty.jsonl")]
        assert found == [(1.0, 2), (None, 0), (1.0, 2), (1.0, 2)]


def test_failures_are_told_and_sampled_again(endpoint, recipe, prints, tmp_path):
    down = [True]
    server = endpoint(lambda number, body: refusal(400, "no") if down[0] and "1 of" in str(body) else RIGHT)
    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "do_eval": True}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "early_stopping_patience": 2}
    words = [*recipe(**evaluates, **best), "--save", tmp_path / "data", "--model", f"{server.url}/v1"]
    words += ["--num_generations", "1"]
    says = prints("rollout", *words)
    assert "4 conversations of 4 rows, 1 failed" in says and "status 400: no" in says
    assert len(lines(tmp_path / "data/sft/train.jsonl")) == 3
    down[0] = False
    assert "failed" not in prints("rollout", *words) and len(lines(tmp_path / "data/sft/train.jsonl")) == 4
    assert len(server.asked("/v1/chat/completions")) == 5


def test_a_name_that_sampled_nothing_can_be_mended(endpoint, recipe, prints, refused, tmp_path):
    said = refusal(404, "no such model")
    url = f"{endpoint(lambda number, body: RIGHT if body['model'] == 'big' else said).url}/v1"
    words = ["rollout", *recipe(), "--save", tmp_path / "data", "--num_generations", "2", "--model"]
    assert "refuses the model 'bgi'" in refused(*words, f"bgi@{url}")
    assert "8 conversations of 4 rows" in prints(*words, f"big@{url}")


def test_an_endpoint_that_counts_no_tokens_has_no_cost(endpoint, recipe, prints, tmp_path):
    answer = {"choices": [{"message": {"content": RIGHT}, "finish_reason": "stop"}]}
    server = endpoint(lambda number, body: RIGHT if "1 of" in str(body) else (200, answer))
    words = [*recipe(), "--num_generations", "1", "--model", f"{server.url}/v1", "--prices", "1", "2"]
    says = prints("rollout", *words, "--save", tmp_path / "data")
    assert "\n4 requests, 100 tokens in (40 cached), 10 out, and those of 3 requests, which it did not count\n" in says
    says = prints("eval", *words, "--save", tmp_path / "evals")
    assert "which it did not count" in " ".join(says.split()) and "cost" not in says


@pytest.mark.parametrize(
    ("keys", "words", "says"),
    [
        ({}, ["--model", "http://127.0.0.1:9/v1"], "cannot be reached"),
        ({}, ["--model", "m@http://127.0.0.1:9/v1", "--api_key_env", "NO_SUCH_KEY"], "is not set"),
        ({}, ["--keep", "exact_mach>=1"], "there is no column 'exact_mach'; the nearest is 'exact_match'"),
        ({}, ["--keep", "exact_match>=one"], "compares with no number"),
        ({}, ["--keep", "exact_match > 1"], "cannot be read from `> 1` on"),
        ({}, ["--keep", "exact_match"], "which compares nothing"),
        ({}, ["--keep", "exact_match>=1", "--audit"], "leave it out"),
        ({}, ["--prices", "1", "2"], "is of the endpoint that `--model` names"),
        ({"outcome_reward_funcs": []}, ["--difficulty"], "say what `--keep` is"),
        ({"dataset_name": None, "environment_factory": "a.b"}, ["--difficulty"], "set `dataset_name`"),
    ],
)
def test_bad_conditions_are_refused_before_sampling(recipe, refused, tmp_path, keys, words, says):
    assert says in refused("rollout", *recipe(**keys), "--save", tmp_path / "data", *words)
    assert not (tmp_path / "data").exists()


def test_wrong_key_is_refused_before_sampling(endpoint, recipe, refused, monkeypatch, tmp_path):
    server = endpoint(Strong())
    monkeypatch.setenv("MY_KEY", "wrong")
    server.key = "right"
    words = ["--model", f"m@{server.url}/v1", "--api_key_env", "MY_KEY", "--save", tmp_path / "data"]
    assert "refuses the key in MY_KEY (status 401)" in refused("rollout", *recipe(), *words)


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"file": "no.jsonl", "between": [0, 1]}, "which is not there: `mt-grpo rollout --difficulty` writes one"),
        ({"file": "train.jsonl", "between": [0, 1]}, "name a file that `mt-grpo rollout --difficulty` wrote"),
        ({"file": "train.jsonl", "between": [0.9, 0.1]}, "give the lowest and the highest rate"),
        ({"file": "train.jsonl"}, "has no `between`"),
    ],
)
def test_bad_choice_of_rows_is_refused(recipe, refused, tmp_path, monkeypatch, chosen, says):
    monkeypatch.chdir(tmp_path)
    assert says in refused("train", *recipe(dataset_filter=chosen))
