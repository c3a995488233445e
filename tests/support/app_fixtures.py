"""A small model, a recipe for it, and trainers."""

import json

import pytest
import yaml

from mt_grpo.cli import main
from support.models import build_model, build_tokenizer
from support.replicas import Replica

SAVE = {"save_strategy": "steps", "save_steps": 1, "do_eval": False}
"""Keys of a recipe: a checkpoint of each step, and no measure before or after."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    build_model(tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def server(tokenizer, model_folder):
    replica = Replica(tokenizer, folder=model_folder)
    yield replica.http
    replica.http.stop()


@pytest.fixture
def recipe(tmp_path, model_folder):
    return recipe_writer(tmp_path, model_folder)


def recipe_writer(folder, model_folder):
    """Writes a recipe and its data into the folder; keys given replace its own."""
    rows = [{"question": f"What is {number} of Peru", "answer": "Lima"} for number in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write(**keys):
        options = {
            "model_name_or_path": str(model_folder),
            "dtype": "float32",
            "dataset_name": str(folder / "train.jsonl"),
            "dataset_train_split": "train[:4]",
            "dataset_test_split": "train[4:]",
            "column_mapping": {"prompt": "question"},
            "tools": ["calculator"],
            "call_protocol": "learnt_tags",
            "outcome_reward_funcs": ["exact_match_reward_func", "format_reward_func"],
            "turn_reward_funcs": ["tool_execution_reward_func"],
            "max_turn_length": 8,
            "num_generations": 2,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "num_generations_eval": 1,
            "max_steps": 2,
            "do_eval": True,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "save_strategy": "no",
            "logging_steps": 1,
            "report_to": "none",
            "output_dir": str(folder / "run"),
            **keys,
        }
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in options.items() if value is not None}))
        return ["--config", str(path)]

    return write


@pytest.fixture
def prints(capsys):
    """Runs a command, which has to end well; what it printed."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys):
    """Runs a command, which has to end with the status 1 and one sentence; that sentence."""

    def run(command: str, *arguments: object) -> str:
        capsys.readouterr()
        assert main([command, *map(str, arguments)]) == 1
        printed, errors = capsys.readouterr()
        (line,) = [line for line in errors.splitlines() if line.startswith("mt-grpo: ")]
        assert errors.endswith(f"{line}\n") and "Traceback" not in errors
        if command not in ("train", "rollout", "doctor", "eval"):  # which may have begun, and said so
            assert (printed, errors) == ("", f"{line}\n")
        return line

    return run
