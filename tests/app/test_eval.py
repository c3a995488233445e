"""`mt-grpo eval`: several models on held-out rows, killed and gone on with."""

import json
import shutil
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from support.endpoints import refusal
from support.forked import Forked

from mt_grpo.runlog import open_run
from mt_grpo.viewer.runs import Runs


def answers(number, body):
    """Is right about every second row."""
    asked = body["messages"][-1]["content"]
    return "<answer>Lima</answer>" if int(asked.split()[2]) % 2 else "<answer>Cusco</answer>"


@pytest.fixture
def results(recipe, prints, tmp_path):
    """Runs `mt-grpo eval`; the line of results."""

    def run(*models, keys=None, save=tmp_path / "evals", **options):
        given = [word for name, value in options.items() for word in (f"--{name}", *map(str, value))]
        model = ["--model", *map(str, models)] if models else []
        line = prints("eval", *recipe(**keys or {}), "--save", save, "--json", *model, *given)
        (written,) = (save / "results.jsonl").read_text().splitlines()
        assert json.loads(line) == json.loads(written)
        return json.loads(line)

    return run


@pytest.fixture(scope="module")
def other_model(model_folder, tmp_path_factory):
    return shutil.copytree(model_folder, tmp_path_factory.mktemp("other") / "model")


def test_models_and_an_endpoint_are_compared(endpoint, results, other_model, model_folder, tmp_path):
    server = endpoint(
        lambda number, body: refusal(429, "slow", {"Retry-After": "0.2"}) if number == 1 else answers(0, body)
    )
    big = f"big@{server.url}/v1"
    options = {"num_generations": [2], "by": ["question"], "prices": [1, 2, 0.5]}
    line = results(model_folder, other_model, big, keys={"model_revision": "of_it"}, **options)
    revisions = {
        path.parent.name: yaml.safe_load(path.read_text())["model_revision"]
        for path in tmp_path.glob("evals/*/config.yaml")
    }
    assert {name for name, revision in revisions.items() if revision != "of_it"} == {
        name for name in revisions if "other" in name
    }
    assert (line["rows"], line["num_generations"]) == (4, 2)
    first, second, third = line["models"].values()
    assert first["reward"] == second["reward"]  # the same weights, and the same draws
    assert third["pass@k"]["1"]["mean"] == third["pass^k"]["2"]["mean"] == 0.5
    assert third["pass@k"]["1"]["low"] == 0.0 and third["stop_reasons"] == {"answered": 8}
    assert third["usage"] == {"requests": 8, "prompt": 800, "cached": 320, "completion": 80}
    assert third["cost"] == pytest.approx((480 * 1 + 320 * 0.5 + 80 * 2) / 1e6)
    pairs = {(each["model"], each["minus"]): each for each in line["differences"]}
    assert len(pairs) == 3
    better = pairs[big, str(model_folder)]
    assert better["wins"] + better["losses"] + better["ties"] == 4 and better["wins"] >= 2
    assert pairs[str(other_model), str(model_folder)]["reward"]["mean"] == 0.0
    of_row = line["by"]["question"]["What is 5 of Peru"][big]
    assert (of_row["right"]["mean"], of_row["reward"]["rows"]) == (1.0, 1)
    table = pq.read_table(tmp_path / "evals" / "results.parquet").to_pylist()
    assert [(row["row"], row["sample"]) for row in table[:8]] == [(row, one) for row in range(4) for one in (0, 1)]
    assert {row["right"] for row in table if row["model"] == big and row["by/question"] == "What is 5 of Peru"} == {
        True
    }
    runs = Runs(tmp_path / "evals")  # what `mt-grpo view` shows
    names = [run["name"] for run in runs.answer("runs", {})["runs"]]
    seen = runs.answer("questions", {"runs": "\n".join(names)})
    assert (len(names), seen["asked"]) == (3, 4) and all(len(row["cells"]) == 3 for row in seen["rows"])


def test_tables_say_what_the_line_says(endpoint, recipe, prints, tmp_path, model_folder):
    server = endpoint(answers)
    models = model_folder, f"{server.url}/v1"
    said = prints("eval", *recipe(), "--save", tmp_path / "e", "--model", *models, "--by", "answer")
    for words in (
        "4 rows × 1",
        "pass@1",
        f"127.0.0.1:{server.port} minus {model_folder.name}: reward +",
        "better in",
        "reward by answer",
        "ended by",
    ):
        assert words in said


def test_a_recipe_whose_reference_moves_is_evaluated(endpoint, results):
    line = results(f"m@{endpoint(answers).url}/v1", keys={"beta": 0.1, "sync_ref_model": True})
    assert line["rows"] == 4


def test_an_endpoint_has_no_layers_that_an_adapter_names(endpoint, results):
    keys = {"use_peft": True, "lora_modules_to_save": ["visual"]}
    assert results(f"m@{endpoint(answers).url}/v1", keys=keys)["rows"] == 4


@pytest.mark.slow
def test_killed_evaluation_goes_on_without_sampling_twice(endpoint, recipe, results, tmp_path):
    def complete(number, body):
        time.sleep(0.0 if number < 3 else 0.3)
        return answers(number, body)

    server = endpoint(complete)
    options = {"max_concurrent_rollouts": 1}
    words = ["--save", str(tmp_path / "evals"), "--model", f"{server.url}/v1", "--num_generations", "3"]
    index = (
        tmp_path / "evals" / words[3].replace("://", "-").replace(":", "-").replace("/", "-") / "rollouts/index.jsonl"
    )
    process = Forked(["-m", "mt_grpo", "eval", *recipe(**options), *words], tmp_path / "log")
    while not index.is_file() or index.read_text().count('"kind":"evaluated"') < 4:
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.02)
    process.kill()
    process.wait()
    with index.open("ab") as file:
        file.write(b'{"kind":"rollout","session":"eval-0000')  # half a line, as a kill may leave
    before = {row["session"]: row["start"] for row in open_run(index.parents[1]).rows}
    asked = len(server.asked("/v1/chat/completions"))
    line = results(f"{server.url}/v1", keys=options, num_generations=[3])
    after = {row["session"]: row["start"] for row in open_run(index.parents[1]).rows}
    assert 4 <= len(before) < 12 == len(after) and before.items() <= after.items()
    assert len(server.asked("/v1/chat/completions")) - asked == 12 - len(before)
    assert line["models"][f"{server.url}/v1"]["stop_reasons"] == {"answered": 12}
    assert results(f"{server.url}/v1", keys=options, num_generations=[3]) == line  # there is nothing left to sample
    assert len(server.asked("/v1/chat/completions")) - asked == 12 - len(before)


def test_what_failed_is_left_out_and_sampled_again(endpoint, results):
    down = [True]
    server = endpoint(lambda number, body: refusal(400, "no") if down[0] and "5 of" in str(body) else answers(0, body))
    (first,) = results(f"{server.url}/v1")["models"].values()
    assert (first["conversations"], first["failed"]) == (3, 1) and "status 400: no" in first["first_failure"]
    down[0] = False
    (second,) = results(f"{server.url}/v1")["models"].values()
    assert (second["conversations"], second["failed"]) == (4, 0)


def test_other_options_and_rows_are_not_mixed(endpoint, results, recipe, refused, tmp_path):
    server = endpoint(answers)
    again = ["--save", tmp_path / "evals", "--model", f"{server.url}/v1"]
    results(f"{server.url}/v1", num_prompts=[2])
    results(f"{server.url}/v1")  # more rows are no others
    assert len(server.asked("/v1/chat/completions")) == 4
    assert "sampled with other `temperature` (there 1.0, here 0.5)" in refused(
        "eval", *recipe(temperature=0.5), *again
    )
    assert "sampled with other `num_generations`" in refused("eval", *recipe(), *again, "--num_generations", 2)
    words = recipe()
    rows = (tmp_path / "train.jsonl").read_text().replace("4 of Peru", "9 of Peru")
    (tmp_path / "train.jsonl").write_text(rows)
    assert "Row 0 (counted from 0) of the dataset is another" in refused("eval", *words, *again)


@pytest.mark.parametrize(("save", "folder"), [("http://there", "http:/there"), ("~/there", "home/there")])
def test_results_are_in_the_folder_that_is_named(endpoint, recipe, prints, monkeypatch, tmp_path, save, folder):
    """Also where pyarrow would take its name for an address."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    prints("eval", *recipe(), "--save", save, "--model", f"{endpoint(answers).url}/v1", "--num_prompts", "1")
    assert {"results.parquet", "results.jsonl"} <= {path.name for path in Path(folder).iterdir()}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--by", "hops"], "names no column of the evaluation set"),
        (["--prices", "1"], "`--prices` takes two or three numbers"),
        (["--prices", "1", "nan"], "`--prices` takes two or three numbers"),
        (["--model", "~nobody_here/model"], "there is no such folder"),
        (["--model", "http://[::"], "The address 'http://[::' of an endpoint cannot be read (Invalid IPv6 URL)"),
        (["--model", "m@http://127.0.0.1:99999/v1"], "cannot be read (Port out of range 0-65535)"),
        (["--model", "no/such/folder/"], "there is no such folder"),
        (["--model", "http://127.0.0.1:9/v1"], "cannot be reached"),
        (["--api_key_env", "NO_SUCH_KEY", "--model", "m@http://127.0.0.1:9/v1"], "is not set"),
        (["--dataset_test_split", "train[:4]"], "rows that are trained on"),
        (["--dataset_test_split", "train[x"], "The split 'train[x' of the dataset"),
    ],
)
def test_bad_input_is_refused_before_any_work(recipe, refused, tmp_path, words, says):
    assert says in refused("eval", *recipe(), "--save", tmp_path / "evals", *words)
    assert not (tmp_path / "evals").exists()


def test_one_server_is_not_asked_for_two_models(recipe, refused, other_model, model_folder, tmp_path):
    words = ["--use_vllm", "true", "--save", tmp_path / "evals", "--model", model_folder, other_model]
    assert "a server has one model, and `--model` names several" in refused("eval", *recipe(), *words)


def test_reward_that_needs_log_probs_refuses_an_endpoint(endpoint, recipe, refused, tmp_path):
    words = ["--save", tmp_path / "evals", "--model", f"{endpoint(answers).url}/v1"]
    assert "needs log-probs of the policy" in refused("eval", *recipe(turn_reward_funcs=["information_gain"]), *words)


SETS = {"low": "train[4:6]", "high": {"split": "train[6:]"}}


@pytest.mark.slow
def test_training_measures_sets_by_name_and_stops_early(recipe, prints, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.0, "save_strategy": "steps"}
    stops = {"metric_for_best_model": "high_reward", "early_stopping_patience": 2, "save_steps": 1}
    printed = prints("train", *recipe(eval_datasets=SETS, max_steps=2, **options, **stops))
    goes_on = {"max_steps": 6, "resume_from_checkpoint": True}  # after one evaluation without a better one
    printed += prints("train", *recipe(eval_datasets=SETS, **goes_on, **options, **stops))
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    names = [name for line in logged for name in line if name.startswith("eval_") and name.endswith("_reward")]
    assert names == ["eval_high_reward", "eval_low_reward"] * 4  # before training, and after each step
    assert not any(name in line for line in logged for name in ("eval_reward", "eval_turns/mean"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3
    assert "evaluation of low at step" in printed and "4 held-out questions" in printed
    prompts = {row["prompt"] for row in open_run(tmp_path / "run").rows if row["mode"] == "eval"}
    assert prompts == {f"What is {number} of Peru" for number in (4, 5, 6, 7)}


def test_eval_splits_its_results_by_set(endpoint, results):
    line = results(f"{endpoint(answers).url}/v1", keys={"eval_datasets": SETS})
    assert line["rows"] == 4 and list(line["by"]["eval_dataset"]) == ["high", "low"]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"eval_datasets": {"a b": "train[4:]"}}, "has the name 'a b', which metrics cannot have"),
        ({"eval_datasets": {"low": {"rows": "train"}}}, "give a split, or a mapping with some of dataset_name, split"),
        ({"eval_datasets": {"low": "train[:4]"}}, "rows that are trained on"),
        ({"eval_datasets": SETS, "do_eval": False}, "are measured where `do_eval` is true"),
        ({"early_stopping_patience": 2}, "set `eval_strategy: steps` and `metric_for_best_model`"),
        ({"early_stopping_patience": 0}, "set a number above 0"),
    ],
)
def test_sets_and_patience_are_checked_before_training(recipe, refused, keys, says):
    assert says in refused("train", *recipe(**keys))
