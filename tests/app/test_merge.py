"""What a run trained, as one folder: its numbers, what comes with it, and a card that says what the run's log says."""

import io
import json
import re
import shutil

import pytest
import torch
import yaml
from huggingface_hub import HfApi, RepoUrl
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.app_fixtures import SAVE
from support.models import bring_code
from support.runs import write_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from mt_grpo.errors import ConfigError
from mt_grpo.runlog import RunWriter
from mt_grpo.training.card import write_card
from mt_grpo.training.checkpoint import find_trained

ADAPTER = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}


def logps(model, tokenizer):
    """Of every token of a text."""
    ids = tokenizer("What is 3 of Peru? Lima and 12 + 5", return_tensors="pt").input_ids
    with torch.no_grad():
        return model.eval()(ids).logits.log_softmax(-1)


def card_of(folder):
    """Its YAML, and its text."""
    _, meta, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(meta), text


@pytest.mark.slow
def test_a_merged_adapter_computes_what_it_did_on_its_base(recipe, prints, refused, model_folder, tmp_path):
    run, base = tmp_path / "run", AutoModelForCausalLM.from_pretrained(model_folder)
    prints("train", *recipe(**SAVE, **ADAPTER))
    for file in run.rglob("adapter_model.safetensors"):  # so few steps change little
        save_file({name: torch.randn_like(value) / 8 for name, value in load_file(file).items()}, file)
    for options, trained, to in (
        ((), run, run / "merged"),
        (("--checkpoint", 1, "--to", tmp_path / "first"), run / "checkpoint-1", tmp_path / "first"),
    ):
        printed = prints("merge", run, *options)
        assert re.match(rf"{to}: the model of step \d, its adapter merged into \S+ \(float32\)", printed)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(to), AutoTokenizer.from_pretrained(to)
        found = logps(model, tokenizer)
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), trained)
        torch.testing.assert_close(found, logps(adapted, tokenizer), rtol=1e-5, atol=1e-5)
        assert (found - logps(base, tokenizer)).abs().max() > 1e-3
        assert tokenizer.chat_template and not (to / "adapter_config.json").exists()
        assert f"trained for {1 if options else 2} optimiser steps" in card_of(to)[1]
    assert "is there already: give `--to` another folder" in refused("merge", run)
    assert not [path for path in run.iterdir() if path.name.startswith(".merged")]


def test_code_of_a_model_runs_where_it_is_trusted(prints, refused, monkeypatch, model_folder, tmp_path):
    base, run = shutil.copytree(model_folder, tmp_path / "base"), tmp_path / "run"
    adapter = LoraConfig(r=4, target_modules="all-linear")
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), adapter).save_pretrained(run)
    AutoTokenizer.from_pretrained(base).save_pretrained(run)
    (run / "config.yaml").write_text("model_name_or_path: a\ndataset_name: embedded\nuse_cpu: true\nbf16: false")
    (run / "metrics.jsonl").touch()
    bring_code(base)
    assert "cannot be merged" in (said := refused("merge", run)) and "trust_remote_code" in said
    prints("merge", run, "--trust_remote_code")
    merged = AutoModelForCausalLM.from_pretrained(run / "merged", trust_remote_code=True)
    assert type(merged).__name__ == "RemoteForCausalLM"
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "trust_remote_code" in refused("chat", run / "merged")
    prints("chat", run / "merged", "--trust_remote_code", "true")
    scored = write_run(tmp_path / "scored", steps=1, groups=2)
    named = "credit", scored, "--model_name_or_path", run / "merged"
    assert "trust_remote_code" in refused(*named)
    assert "is not the one that sampled" in refused(*named, "--trust_remote_code")  # it was loaded


def test_rollout_shows_the_adapter_and_not_its_base(recipe, prints, model_folder, tmp_path):
    torch.manual_seed(1)
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), adapter).save_pretrained(tmp_path / "adapter")
    options = [ADAPTER | {"model_name_or_path": str(folder)} for folder in (model_folder, tmp_path / "adapter")]
    base, adapted = (prints("rollout", *recipe(**keys), "--num_prompts", "1") for keys in options)
    assert base != adapted


def test_full_weights_are_copied_with_a_card_of_the_log(recipe, prints, tmp_path):
    run, away = tmp_path / "run", tmp_path / "away"
    prints("train", *recipe(system_prompt="Add things up.", advantage_estimator="grpo_or"))
    meta, text = card_of(run)
    assert meta["library_name"] == "transformers" and "base_model" not in meta  # which is no model of the Hub
    assert "Tools: `calculator`" in text and "> Add things up." in text and "credit" in text and "`grpo_or" in text
    assert "arXiv:2505.11821v1" in text and "lora" not in text
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = (row for row in rows if "eval_reward" in row)
    key = "eval_rewards/format_reward_func/mean"
    assert f"| `format_reward_func` | {first[key]:.4g} | {last[key]:.4g} |" in text
    assert "|  | step 0 | step 2 |" in text
    prints("merge", run, "--to", away)
    same = ("model.safetensors", "config.json", "generation_config.json", "chat_template.jinja", "config.yaml")
    assert all((run / name).read_bytes() == (away / name).read_bytes() for name in same)
    assert card_of(run) == card_of(away)  # what a push sends
    shutil.rmtree(run)
    AutoModelForCausalLM.from_pretrained(away), AutoTokenizer.from_pretrained(away)


def test_a_run_that_says_little_of_itself_is_merged(prints, refused, model_folder, tmp_path):
    run = shutil.copytree(model_folder, tmp_path / "run")
    rewards = [{"name": "found", "kind": "turn", "weight": 1.0}]
    nothing = dict.fromkeys(("options", "model", "rule", "rule_says", "tools"))
    RunWriter(run).append([{"kind": "run", "version": 1, "rewards": rewards, **nothing}])
    prints("merge", run)
    text = card_of(run / "merged")[1]
    assert "Trained from a model that the run does not name" in text and "| `found` | turn | 1 | - |" in text
    assert "Credit of a turn" not in text and "Tools" not in text
    for name, content, words in (
        ("trainer_state.json", "[]", "is damaged"),
        ("trainer_state.json", '{"global_step": 1e400}', "is damaged"),
        ("config.yaml", "", "is empty"),
        ("config.yaml", "system_prompt: 3", "`system_prompt` in"),
        ("config.yaml", "call_protocol: [tags]", "is ['tags'], a list: it takes text"),
        ("config.yaml", "environments: [1]", "`environments` in"),
        ("tokenizer_config.json", "3", "cannot be merged"),
        ("config.json", "null", "cannot be merged"),
    ):
        (run / name).write_text(content)
        assert words in (said := refused("merge", run, "--to", tmp_path / "other"))
        assert name in said or name.endswith("config.json")  # which the library does not name
        (run / name).unlink()


ABOUT = {
    "model": "Qwen/Qwen3-4B",
    "tools": [],
    "rule": {"name": "mt_grpo"},
    "rule_says": "It does.",
    "options": {"load_best_model_at_end": True, "metric_for_best_model": "reward", "dataset_name": "a/questions"},
}


@pytest.mark.parametrize(
    ("step", "best", "head"),
    [(9, True, "|  | step 0 | step 4 |"), (9, False, "|  | step 0 | step 8 |"), (4, False, "|  | step 0 | step 4 |")],
)
def test_a_card_has_the_numbers_of_the_model_that_was_kept(tmp_path, step, best, head):
    rows = [{"step": at, "eval_reward": reward} for at, reward in ((0, 0.1), (4, 0.9), (8, 0.5))]
    options = {"load_best_model_at_end": best, "system_prompt": "One.\n\nTwo."}
    write_card(tmp_path, "it", ABOUT, [], rows, step=step, options=options, adapter=True)
    meta, text = card_of(tmp_path)
    assert "> One.\n> \n> Two." in text  # one quotation
    assert head in text and (meta["base_model"], meta["datasets"]) == ("Qwen/Qwen3-4B", "a/questions")
    assert ("The model was kept after step 9" in text) == (step == 9 and not best)


def test_a_readme_that_is_no_card_is_kept(tmp_path, caplog):
    own = tmp_path / "README.md"
    own.write_text("# My project\n")
    write_card(tmp_path, "it", ABOUT, [], [], step=9)
    assert own.read_text() == "# My project\n" and "is no card of a model and stays as it is" in caplog.text


def test_a_push_ends_with_the_card_of_the_last_evaluation(build, monkeypatch, tmp_path):
    sent = []
    monkeypatch.setattr(HfApi, "create_repo", lambda *_, **__: RepoUrl("https://huggingface.co/me/agent"))
    monkeypatch.setattr(HfApi, "upload_folder", lambda *_, **__: sent.append(card_of(tmp_path)[1]))
    one = build(max_steps=1)
    one.train()
    one.evaluate()
    one.push_to_hub()
    assert len(sent) == 1 and "|  | step 1 |" in sent[0] and "`Calls`" in sent[0]


@pytest.mark.parametrize("number", ["no", "0", "9" * 5000])
def test_a_checkpoint_is_named_by_its_step(refused, tmp_path, number):
    assert "`--checkpoint` takes a whole number from 1 on" in refused("merge", tmp_path, "--checkpoint", number)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ((), "There is no trained model in"),
        (("adapter_config.json",), "There are no weights of a model in"),
        (("checkpoint-3/x",), "has no checkpoint 7; those that it has: 3"),
        (
            ("checkpoint-7/pytorch_model_fsdp_0/x",),
            "with `accelerate merge-weights {}/checkpoint-7/pytorch_model_fsdp",
        ),
        (("checkpoint-7/zero_to_fp32.py",), "with `python {0}/checkpoint-7/zero_to_fp32.py {0}/checkpoint-7"),
    ],
)
def test_what_cannot_be_merged_is_told_with_what_can_be_done(refused, tmp_path, files, words):
    (tmp_path / "metrics.jsonl").touch()
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    options = ("--checkpoint", "7") if files and "/" in files[0] else ()
    assert words.format(tmp_path) in refused("merge", tmp_path, *options)


def test_a_run_that_has_not_ended_gives_its_last_checkpoint(build, tmp_path):
    with pytest.raises(ConfigError, match="There is no folder"):
        find_trained(tmp_path / "none")
    build(max_steps=2, save_strategy="steps", save_steps=1).train()
    assert find_trained(tmp_path) == tmp_path / "checkpoint-2"
