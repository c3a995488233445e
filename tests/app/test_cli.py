"""The command line on small inputs: bad ones are refused before any work, good ones leave what they promise."""

import io
import json
import os
import subprocess
import sys

import pytest
import yaml
from support.app_fixtures import SAVE
from support.models import build_model, build_tokenizer
from support.registered import keep_estimators

from mt_grpo import MTGRPOEnvTrainer
from mt_grpo.cli import main
from mt_grpo.credit import CreditError
from mt_grpo.errors import ServerGoneError, WeightSyncError
from mt_grpo.rewards import OutcomeReward
from mt_grpo.rollout import RolloutError
from mt_grpo.runlog import open_run, read_trajectories
from mt_grpo.training.model import NonFiniteError


class Broken(OutcomeReward):
    calls = 0

    def score(self, trajectory, **row):
        self.calls += 1
        if self.calls > 4:
            raise KeyError("gold")
        return float(len(trajectory.turns[0].text))


def untyped(query):
    return query


def test_train_leaves_everything_it_promises(recipe, prints, tmp_path):
    printed = prints("train", *recipe(), "--advantage_estimator", "grpo_mr")
    assert all(words in printed for words in ("tool-execution rate", "before: example 1", "summary.json"))
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["advantage_estimator"], summary["steps"]) == ("grpo_mr", 2) and summary["seconds"] > 0
    assert summary["before"].keys() == summary["after"].keys() >= {"tool_execution", "exact_match", "format", "turns"}
    assert summary["versions"]["trl"] and summary["audit"]["groups"] > 0
    assert yaml.safe_load((folder / "config.yaml").read_text())["advantage_estimator"] == "grpo_mr"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) >= 2
    assert len(list(read_trajectories(folder))) == 4 + 2 * 4 + 4
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "model.safetensors").exists()


def test_what_a_model_samples_does_nothing_to_the_terminal(recipe, capfd):
    """Its weights are random, and so a quarter of what it samples is single bytes."""
    assert main(["train", *recipe(log_completions=True)]) == 0
    assert main(["rollout", *recipe(), "--num_prompts", "4"]) == 0
    printed, errors = capfd.readouterr()
    assert "\\x1" in printed and "step 2: conversation 4 of 4" in printed
    assert not [c for c in printed + errors if c not in "\n\t\r" and (ord(c) < 32 or 127 <= ord(c) < 160)]


def test_the_same_seed_gives_the_same_run(recipe, prints, tmp_path):
    def run(folder):
        prints("train", *recipe(output_dir=str(folder), learning_rate=1e-2))
        summary = json.loads((folder / "summary.json").read_text())
        return summary["before"], summary["after"], [row["tree"] for row in read_trajectories(folder)]

    assert run(tmp_path / "one") == run(tmp_path / "two")


def test_the_first_and_the_last_step_are_evaluated_once(recipe, prints, tmp_path):
    """Weights that were evaluated while the run trained are what it has at its end."""
    prints("train", *recipe(eval_strategy="steps", eval_steps=2, eval_on_start=True))
    run = open_run(tmp_path / "run")
    steps = [step for step, mode in zip(run.column("step"), run.column("mode"), strict=True) if mode == "eval"]
    assert steps == [0] * 4 + [2] * 4
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["after"]["questions"] == 4


def test_the_best_by_what_is_not_measured_is_refused(recipe, tmp_path, refused):
    keys = {"load_best_model_at_end": True, "metric_for_best_model": "rewrd", **SAVE, "do_eval": True}
    said = refused("train", *recipe(**keys, eval_strategy="steps", eval_steps=1))
    assert "`metric_for_best_model: rewrd` is nothing that an evaluation measures; the nearest is 'reward'" in said
    assert "train" not in open_run(tmp_path / "run").column("mode")  # the measure before training has told


def test_a_reward_that_raises_later_leaves_a_checkpoint(recipe, tmp_path, refused):
    line = refused("train", *recipe(outcome_reward_funcs=[f"{__file__}:Broken"], do_eval=False))
    assert "gold" in line and "--resume_from_checkpoint" in line
    assert f"in {__file__}, line {Broken.score.__code__.co_firstlineno + 3}, in score" in line
    assert (tmp_path / "run" / "checkpoint-1" / "model.safetensors").exists()
    assert len(list(read_trajectories(tmp_path / "run"))) == 2 * 4


@pytest.mark.parametrize("kind", [CreditError, NonFiniteError, RolloutError, ServerGoneError, WeightSyncError])
def test_what_ends_a_run_leaves_a_checkpoint(recipe, tmp_path, refused, monkeypatch, kind):
    def training_step(trainer, *args, **options):
        if trainer.state.global_step:
            raise kind("It ended.")
        return steps(trainer, *args, **options)

    steps = MTGRPOEnvTrainer.training_step
    monkeypatch.setattr(MTGRPOEnvTrainer, "training_step", training_step)
    assert "It ended. What was learnt up to step 1 is in " in refused("train", *recipe(do_eval=False))
    assert (tmp_path / "run" / "checkpoint-1" / "model.safetensors").exists()


@pytest.mark.parametrize("command", ["train", "rollout"])
def test_where_every_conversation_failed_the_exit_code_is_1(recipe, tmp_path, capsys, command):
    keys = {"agent": {"command": "false"}, "outcome_reward_funcs": ["env_reward"], "max_steps": 1, "do_eval": False}
    without = dict.fromkeys(("tools", "call_protocol", "turn_reward_funcs"))
    assert main([command, *recipe(**keys, **without), *(["--num_prompts", "2"] if command == "rollout" else [])]) == 1
    printed = capsys.readouterr()
    if command == "train":
        assert "mt-grpo: Every conversation of the run failed, the first with: CommandError: false" in printed.err
        assert (tmp_path / "run" / "model.safetensors").exists() and (tmp_path / "run" / "summary.json").exists()
    else:
        assert "2 of 2 conversations failed" in printed.out


def test_rollout_shows_conversations_and_audits_rewards(recipe, prints, tmp_path):
    printed = prints("rollout", *recipe(num_generations=3), "--num_prompts", "2", "--audit")
    conversations, table = printed.split("audit: 2 prompts × 3 conversations")
    assert conversations.count("─ conversation ") == 2 <= conversations.count("<|im_start|>assistant")
    assert "«" in conversations and "outcome reward exact_match_reward_func: 0" in conversations
    for name in ("tool_execution_reward_func", "exact_match_reward_func", "format_reward_func"):
        assert name in table
    assert "of 2 groups have no signal: their advantages are 0 at every turn." in table
    assert "The reward 'exact_match_reward_func' teaches nothing here" in table
    assert not any((tmp_path / "run" / name).exists() for name in ("audit.jsonl", "summary.json"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"column_mapping": None}, "'prompt'"),
        ({"outcome_reward_funcs": ["exact_match"]}, "exact_match_reward_func"),
        ({"tools": ["test_cli.untyped"]}, "untyped"),
        ({"env": "mt_grpo.envs.Missing"}, "Missing"),
        ({"importance_sampling_level": "sequence"}, "leave it at `token`, or choose a rule"),
        ({"importance_sampling_level": "sequence", "loss_type": "luspo"}, "choose another `loss_type`"),
        ({"external_plugins": ["missing_plugin.py"]}, "missing_plugin.py"),
        ({"system_prompt": "word " * 600}, "Every prompt is too long"),
        ({"environments": {"one": {"tools": ["calculator"]}}}, "(one), but the dataset has no column `environment`"),
        ({"resume_from_checkpoint": "true"}, "There is no checkpoint in `output_dir"),
        ({"column_mapping": "[1,2]"}, "give a mapping from the wanted column to the one that is there"),
        ({"resume_from_checkpoint": "/no/such/checkpoint"}, "is no folder"),
        ({"model_name_or_path": "/no/such/model"}, "mt-grpo: The model '/no/such/model' cannot be loaded: "),
    ],
)
def test_bad_input_is_one_sentence_and_a_non_zero_exit(recipe, tmp_path, refused, keys, message):
    assert message in refused("train", *recipe(**keys))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


RULE = """
from mt_grpo.credit import advantage_estimator, grpo_or

for name, splits in (("splits", True), ("joins", False)):
    @advantage_estimator(name, splits_turns=splits)
    def mine(batch, *, turn_coef=1.0, scale_rewards="group"):
        return grpo_or(batch)
"""


def test_a_rule_of_a_plugin_says_whether_it_splits_turns(recipe, prints, refused, tmp_path, monkeypatch):
    keep_estimators(monkeypatch)
    (tmp_path / "rules.py").write_text(RULE)

    def arguments(rule):
        keys = {"external_plugins": [str(tmp_path / "rules.py")], "importance_sampling_level": "sequence"}
        return ["rollout", *recipe(**keys, loss_type="grpo", advantage_estimator=rule), "--num_prompts", "1"]

    assert "credit that `advantage_estimator: splits`" in refused(*arguments("splits"))
    prints(*arguments("joins"))
    assert "the nearest is 'joins'" in refused(*arguments("jions"))


def test_the_native_protocol_needs_a_template_with_tools(recipe, tmp_path, refused):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    build_model(tokenizer).save_pretrained(tmp_path / "model")
    keys = {"model_name_or_path": str(tmp_path / "model"), "call_protocol": "native"}
    assert "no tool support" in refused("train", *recipe(**keys))


def test_a_terminal_without_utf8_shows_what_it_can(tmp_path):
    (tmp_path / "recipe.yaml").write_text("max_stepß: 1\n", encoding="utf-8")
    command = [sys.executable, "-m", "mt_grpo", "train", str(tmp_path / "recipe.yaml")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 1 and run.stderr.startswith("mt-grpo: The key 'max_step?' in ")


def test_input_that_was_read_from_already_is_no_harm(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
    sys.stdin.readline()
    assert main(["--version"]) == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_enough_gets_no_traceback(unbuffered):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as stdout:
        run = list_recipes(stdout, unbuffered)
    assert run.returncode == 1 and run.stderr == ""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_to_a_full_disk_is_one_sentence(unbuffered):
    with open("/dev/full", "wb") as stdout:
        run = list_recipes(stdout, unbuffered)
    said = "mt-grpo: the output of `mt-grpo recipes` cannot be written (No space left on device): free some.\n"
    assert (run.returncode, run.stderr) == (1, said)


def list_recipes(stdout, unbuffered):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "mt_grpo", "recipes", "ls"]
    return subprocess.run(command, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True)


def test_a_bug_of_ours_keeps_its_traceback(recipe, monkeypatch):
    def broken(*args, **kwargs):
        raise ValueError("not the user's to mend")

    monkeypatch.setattr("mt_grpo.app.build.load_rows", broken)
    with pytest.raises(ValueError, match="not the user's to mend"):
        main(["train", *recipe()])
