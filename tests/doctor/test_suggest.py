"""`mt-grpo doctor --suggest`: its recipe fits, holds what was given, and has the numbers of the docs."""

import shutil
from pathlib import Path

import pytest
import yaml
from support.runs import EMBEDDED
from transformers import Qwen2Config

from mt_grpo.doctor.suggest import STARTS, fill_numbers

PAGE = Path(__file__).parents[2] / "docs" / "choose.md"
SIZES = {"1.5b": (1536, 28, 8960, 2, 12), "7b": (3584, 28, 18944, 4, 28), "70b": (8192, 80, 29568, 8, 64)}


@pytest.fixture
def shaped(tmp_path):
    """A folder with the shape of a model of Qwen's, and another's tokenizer."""

    def build(size: str) -> Path:
        folder, (width, layers, inner, kv_heads, heads) = tmp_path / size, SIZES[size]
        shutil.copytree(EMBEDDED.parent, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        Qwen2Config(
            hidden_size=width,
            num_hidden_layers=layers,
            intermediate_size=inner,
            num_key_value_heads=kv_heads,
            num_attention_heads=heads,
            vocab_size=152064,
            architectures=["Qwen2ForCausalLM"],
        ).save_pretrained(folder)
        return folder

    return build


@pytest.fixture
def suggested(prints, tmp_path):
    """Asks for a recipe, which passes all checks, and reads it."""

    def ask(*words: object) -> dict:
        path = tmp_path / "new" / "R.yaml"
        said = prints("doctor", "--dataset_name", "embedded", "--suggest", path, *map(str, words))
        assert "nothing stands in the way of this run" in said
        return yaml.safe_load(path.read_text())

    return ask


def test_the_page_has_the_table():
    assert fill_numbers(PAGE.read_text()) == PAGE.read_text(), "run `python scripts/write_options.py`"
    assert all(one.source for one in STARTS)


def test_a_recipe_for_this_machine_passes(suggested):
    recipe = suggested("--model_name_or_path", "embedded", "--use_cpu", "true", "--num_generations", 4, "--seed", 7)
    assert (recipe["learning_rate"], recipe["call_protocol"], recipe["seed"]) == (3e-4, "learnt_tags", 7)
    assert recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"] == 16 * 4


@pytest.mark.parametrize(
    ("size", "gpu", "processes", "way"),
    [
        ("1.5b", "RTX-4090", 1, {"use_peft": True, "use_vllm": True, "learning_rate": 1e-5}),
        ("7b", "RTX-4090", 1, {"use_peft": True, "load_in_4bit": True, "use_vllm": None, "learning_rate": 1e-5}),
        ("7b", "H100", 8, {"use_peft": None, "use_vllm": True, "learning_rate": 1e-6}),
    ],
)
def test_the_gpu_decides_what_is_trained(suggested, shaped, size, gpu, processes, way):
    recipe = suggested("--model_name_or_path", shaped(size), "--gpu", gpu, "--num_processes", processes)
    assert {name: recipe.get(name) for name in way} == way
    assert recipe["call_protocol"] == "native" and "xml_reward_func" not in recipe["outcome_reward_funcs"]
    batch = recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"] * processes
    assert batch == 16 * 8 and recipe["max_completion_length"] >= 1024


def test_what_cannot_be_suggested_is_refused(refused, shaped, tmp_path):
    (tmp_path / "mine.yaml").write_text("mine")
    ask = ("doctor", "--dataset_name", "embedded", "--gpu", "RTX-4090", "--model_name_or_path")
    assert "is there already" in refused(*ask, "embedded", "--suggest", tmp_path / "mine.yaml")
    assert "No way is known here to train" in refused(*ask, shaped("70b"), "--suggest", tmp_path / "R.yaml")
    assert not (tmp_path / "R.yaml").exists() and (tmp_path / "mine.yaml").read_text() == "mine"
