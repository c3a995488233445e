"""The model that a run begins with, by whatever name it is called."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from support.models import CPU_RUN, bring_code, build_model
from support.trainers import LETTERS
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.errors import MISREAD, ConfigError, libraries_may_refuse
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training.model import OF_SOURCE, resolve_model, source_options

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}


def change(file, **keys):
    """Writes other values into a file of JSON."""
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.fixture
def folder(tokenizer, tmp_path):
    """Of a model."""
    for part in (build_model(tokenizer), tokenizer):
        part.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(folder, tmp_path):
    """The folder of an adapter that changes what its base says."""
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(folder)
    get_peft_model(base, LoraConfig(**LORA, task_type="CAUSAL_LM")).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_the_embedded_model_has_its_name_in_python_too(build):
    given = {"processing_class": None, "engine": None, "train_dataset": Dataset.from_list([{"prompt": "Where?"}])}
    trainer = build(model="embedded", rewards=LETTERS, eval_dataset=None, **given)
    assert trainer.model.config.name_or_path == resolve_model("embedded")
    assert trainer.model.num_parameters() > 1_000_000


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        *((name, "there is no such folder") for name in ("./nowhere", "/no/such/model", "~/no/such/model")),
        ("runs/nowhere/checkpoint-1", "there is no such folder"),
        ("{0}", "no model in .* one of its checkpoints"),
        ("{0}/base", "'.*base' cannot be loaded, since its model.safetensors is damaged"),
        ("{0}/half", "'.*half' cannot be loaded, since its model.safetensors is damaged"),
        ("{0}/adapter", "was trained on the model '/gone'. .* no such folder"),
        ("{0}/alone", "adapter_config.json in .*alone' has no `base_model_name_or_path`: write the model there"),
        ("{0}/number", "adapter_config.json in .*number' has no `base_model_name_or_path`"),
        ("my model", "'my model' cannot be loaded: Repo id must use"),
        ("{0}/light", "The adapter in .*light' is not whole: it needs adapter_model.safetensors, and a `peft_type`"),
    ],
)
def test_a_folder_without_a_whole_model_is_refused(build, adapter, folder, name, problem):
    """It is not there, has none, has weights that are cut off, or an adapter whose base is gone."""
    shutil.copytree(folder, folder.parent / "half")
    for name_of, share in (("base", 0.0), ("half", 0.5)):
        weights = folder.parent / name_of / "model.safetensors"
        os.truncate(weights, int(weights.stat().st_size * share))
    alone, light, number = (shutil.copytree(adapter, folder.parent / name) for name in ("alone", "light", "number"))
    (light / "adapter_model.safetensors").unlink()
    change(number / "adapter_config.json", base_model_name_or_path=3)
    change(alone / "adapter_config.json", base_model_name_or_path=None)
    change(adapter / "adapter_config.json", base_model_name_or_path="/gone")
    with pytest.raises(ConfigError, match=problem):
        build(None, name.format(folder.parent))


def test_a_tokenizer_that_is_no_json_is_refused_by_its_model(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="The model cannot be loaded: Expecting property name"):
        with libraries_may_refuse("The model cannot be loaded"):
            AutoTokenizer.from_pretrained(folder)


def test_a_fault_in_a_models_own_code_is_no_sentence():
    code = {"__name__": "transformers_modules.mine", "Config": PreTrainedConfig}
    with pytest.raises((TypeError, AttributeError)), libraries_may_refuse("The model cannot be loaded", *MISREAD):
        exec("Config.from_dict(None)", code)


def test_the_folder_of_an_adapter_is_trained_on(build, adapter, folder):
    trainer = build(None, str(adapter), LETTERS, max_steps=1, beta=0.1, max_turn_length=8)
    learnt = {name: weight for name, weight in trainer.model.named_parameters() if ".default" in name}
    before = {name: weight.detach().clone() for name, weight in learnt.items()}
    embedding = trainer.model.base_model.model.model.embed_tokens.weight
    assert trainer.model.config.name_or_path == str(folder) and all(each.requires_grad for each in learnt.values())
    assert torch.equal(embedding, AutoModelForCausalLM.from_pretrained(folder).model.embed_tokens.weight)
    assert any(weight.abs().sum() > 0 for name, weight in before.items() if "lora_B" in name)
    trainer.train()
    assert any(not torch.equal(weight, before[name]) for name, weight in learnt.items())


@pytest.fixture
def from_folder(build):
    """Makes a trainer of a folder alone, which brings its tokenizer."""

    def make(folder, **options):
        given = {"processing_class": None, "train_dataset": Dataset.from_list([{"prompt": "Where?"}] * 4)}
        given |= {"env": MultiTurnToolEnv(), "eval_dataset": None, "rewards": LETTERS}
        return build(None, str(folder), **given, **{"max_steps": 1, "max_completion_length": 16, **options})

    return make


@pytest.mark.parametrize("options", [{"trust_remote_code": True}, {"model_init_kwargs": {"trust_remote_code": True}}])
def test_a_model_with_code_of_its_own_is_trained_from_python(folder, from_folder, tmp_path, options):
    bring_code(folder)
    with pytest.raises(ValueError, match="trust_remote_code"):
        from_folder(folder)
    trainer = from_folder(folder, **options)
    assert type(trainer.model).__name__ == "RemoteForCausalLM"
    trainer.train()
    source = dict.fromkeys(OF_SOURCE, "a")
    assert source_options(MTGRPOConfig(str(tmp_path), **CPU_RUN, model_init_kwargs=source)) == source


def test_a_model_in_a_subfolder_has_its_tokenizer_there(folder, from_folder, tokenizer):
    trainer = from_folder(folder.parent, model_init_kwargs={"subfolder": folder.name})
    assert trainer.processing_class.get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ConfigError, match="There is no model in '.*/other'"):
        from_folder(folder.parent, model_init_kwargs={"subfolder": "other"})


def test_a_script_cannot_resume_an_adapter_as_a_whole_model(build, folder, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    config = LoraConfig(**LORA, task_type="CAUSAL_LM")
    build(model=str(folder), peft_config=config, **options).train()
    with pytest.raises(ConfigError, match="resume with `use_peft: true`"):
        build(model=str(folder)).train(resume_from_checkpoint=True)
