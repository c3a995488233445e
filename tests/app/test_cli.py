"""The command line on small inputs: bad ones are refused before any work, good ones leave what they promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml
from support.forked import Forked
from support.models import build_model, build_tokenizer
from support.registered import keep_estimators

from mt_grpo.cli import main
from mt_grpo.runlog import open_run, read_trajectories


def test_train_leaves_everything_it_promises(recipe, tmp_path, capsys):
    assert main(["train", *recipe(), "--advantage_estimator", "grpo_mr"]) == 0
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["advantage_estimator"] == "grpo_mr"
    assert summary["steps"] == 2 and summary["seconds"] > 0
    assert summary["before"].keys() == summary["after"].keys() >= {"tool_execution", "exact_match", "format", "turns"}
    assert summary["versions"]["trl"]
    assert yaml.safe_load((folder / "config.yaml").read_text())["advantage_estimator"] == "grpo_mr"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) >= 2
    assert len(list(read_trajectories(folder))) == 4 + 2 * 4 + 4
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "model.safetensors").exists()
    printed = capsys.readouterr().out
    assert "tool-execution rate" in printed and "before: example 1" in printed and "summary.json" in printed


def test_what_a_model_samples_does_nothing_to_the_terminal(recipe, capfd):
    """Its weights are random, and so a quarter of what it samples is single bytes."""
    assert main(["train", *recipe(log_completions=True)]) == 0
    assert main(["rollout", *recipe(), "--num_prompts", "4"]) == 0
    printed, errors = capfd.readouterr()
    assert "\\x1" in printed and "step 2: conversation 4 of 4" in printed
    assert not [c for c in printed + errors if c not in "\n\t\r" and (ord(c) < 32 or 127 <= ord(c) < 160)]


def test_the_same_seed_gives_the_same_run(recipe, tmp_path):
    runs = []
    for name in ("one", "two"):
        assert main(["train", *recipe(output_dir=str(tmp_path / name), learning_rate=1e-2)]) == 0
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        trajectories = list(read_trajectories(tmp_path / name))
        runs.append((summary["before"], summary["after"], [row["tree"] for row in trajectories]))
    assert runs[0] == runs[1]


def test_a_run_is_resumed_from_its_latest_checkpoint(recipe, tmp_path):
    save = ("--save_strategy", "steps", "--save_steps", "1", "--do_eval", "false")
    assert main(["train", *recipe(), *save]) == 0
    (tmp_path / "run" / "checkpoint-9").mkdir()  # of a run that was killed while it wrote it
    assert main(["train", *recipe(), *save, "--max_steps", "3", "--resume_from_checkpoint", "true"]) == 0
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").open() if '"loss"' in line]
    assert steps == [1, 2, 3]


def test_the_first_and_the_last_step_are_evaluated_once(recipe, tmp_path):
    """Weights that were evaluated while the run trained are what it has at its end."""
    assert main(["train", *recipe(eval_strategy="steps", eval_steps=2, eval_on_start=True)]) == 0
    run = open_run(tmp_path / "run")
    steps = [step for step, mode in zip(run.column("step"), run.column("mode"), strict=True) if mode == "eval"]
    assert steps == [0] * 4 + [2] * 4
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["after"]["questions"] == 4


def test_the_best_by_what_is_not_measured_is_refused(recipe, tmp_path, capsys):
    keys = {"load_best_model_at_end": True, "metric_for_best_model": "rewrd"}
    keys |= dict.fromkeys(("eval_strategy", "save_strategy"), "steps") | dict.fromkeys(("eval_steps", "save_steps"), 1)
    assert main(["train", *recipe(**keys)]) == 1
    said = capsys.readouterr().err
    assert "`metric_for_best_model: rewrd` is nothing that an evaluation measures; the nearest is 'reward'" in said
    assert "train" not in open_run(tmp_path / "run").column("mode")  # the measure before training has told


def test_a_reward_that_raises_later_leaves_a_checkpoint(recipe, tmp_path, capsys):
    (tmp_path / "rewards.py").write_text(REWARD)
    broken = recipe(outcome_reward_funcs=[f"{tmp_path / 'rewards.py'}:Broken"])
    assert main(["train", *broken, "--do_eval", "false"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mt-grpo: ")]
    assert "gold" in line and "--resume_from_checkpoint" in line
    assert f"in {tmp_path / 'rewards.py'}, line {REWARD.splitlines().index(RAISED) + 1}, in score" in line
    assert (tmp_path / "run" / "checkpoint-1" / "model.safetensors").exists()
    assert len(list(read_trajectories(tmp_path / "run"))) == 2 * 4


STEADY = """
from mt_grpo.rewards import TurnReward

class Steady(TurnReward):
    def score(self, turn, trajectory, **row):
        return 0.5
"""


@pytest.mark.parametrize(("rule", "share"), [("grpo_or", 1.0), ("reward_to_go", 0.0)])
def test_a_run_tells_what_turn_rewards_have_no_credit(recipe, tmp_path, caplog, rule, share):
    (tmp_path / "rewards.py").write_text(STEADY)
    options = recipe(turn_reward_funcs=[f"{tmp_path / 'rewards.py'}:Steady"], advantage_estimator=rule)
    assert main(["train", *options, "--do_eval", "false", "--max_steps", "1"]) == 0
    warned = "`grpo_or` leaves 100% of the turn rewards of this batch without credit"
    assert (warned in caplog.text) == bool(share)
    audit = json.loads((tmp_path / "run" / "summary.json").read_text())["audit"]
    assert audit["uncredited_at_turn"] == audit["uncredited_up_to_turn"] == share


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


def test_rollout_shows_conversations_and_trains_nothing(recipe, tmp_path, capsys):
    assert main(["rollout", *recipe(), "--num_prompts", "3"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("<|im_start|>assistant") >= 3
    assert "conversation 3" in printed and "conversation 4" not in printed
    assert "«" in printed and "outcome reward exact_match_reward_func: 0" in printed
    assert not (tmp_path / "run" / "summary.json").exists()


def test_rollout_audits_rewards_in_groups(recipe, tmp_path, capsys):
    assert main(["rollout", *recipe(num_generations=3), "--num_prompts", "2", "--audit"]) == 0
    printed = capsys.readouterr().out
    conversations, table = printed.split("audit: 2 prompts × 3 conversations")
    assert conversations.count("─ conversation ") == 2
    for name in ("tool_execution_reward_func", "exact_match_reward_func", "format_reward_func"):
        assert name in table
    assert "of 2 groups have no signal: their advantages are 0 at every turn." in table
    assert "The reward 'exact_match_reward_func' teaches nothing here" in table
    assert not (tmp_path / "run" / "audit.jsonl").exists()


REWARD = """
from mt_grpo.rewards import OutcomeReward


class Broken(OutcomeReward):
    calls = 0

    def score(self, trajectory, **row):
        self.calls += 1
        if self.calls > 4:
            raise KeyError("gold")
        return float(len(trajectory.turns[0].text))
"""

RAISED = '            raise KeyError("gold")'

TOOLS = '''
def undocumented(query: str) -> str:
    return query


def untyped(query):
    """
    Looks up.

    Args:
        query: What.
    """
    return query
'''


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"column_mapping": None}, "'prompt'"),
        ({"outcome_reward_funcs": ["exact_match"]}, "exact_match_reward_func"),
        ({"outcome_reward_funcs": ["no.such.reward"]}, "'no.such.reward' does not import"),
        ({"tools": ["no.such.tool"]}, "'no.such.tool' does not import"),
        ({"tools": ["TOOLS:undocumented"]}, "undocumented"),
        ({"tools": ["TOOLS:untyped"]}, "untyped"),
        ({"env": "mt_grpo.envs.Missing"}, "Missing"),
        ({"importance_sampling_level": "sequence"}, "leave it at `token`, or choose a rule"),
        ({"importance_sampling_level": "sequence", "loss_type": "luspo"}, "choose another `loss_type`"),
        ({"external_plugins": ["missing_plugin.py"]}, "missing_plugin.py"),
        ({"system_prompt": "word " * 600}, "Every prompt is too long"),
        ({"environments": {"one": {"tools": ["calculator"]}}}, "(one), but the dataset has no column `environment`"),
        ({"resume_from_checkpoint": "true"}, "There is no checkpoint in `output_dir"),
        ({"column_mapping": "[1,2]"}, "give a mapping from the wanted column to the one that is there"),
        ({"resume_from_checkpoint": "/no/such/checkpoint"}, "is no folder"),
    ],
)
def test_bad_input_is_one_sentence_and_a_non_zero_exit(recipe, tmp_path, capsys, keys, message):
    (tmp_path / "tools.py").write_text(TOOLS)
    if "tools" in keys:
        keys = {"tools": [name.replace("TOOLS", str(tmp_path / "tools.py")) for name in keys["tools"]]}
    assert main(["train", *recipe(**keys)]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("mt-grpo: ") and message in lines[-1]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


PLUGIN = """
from mt_grpo.credit import advantage_estimator, grpo_or


@advantage_estimator("NAME", splits_turns=SPLITS)
def mine(batch, *, turn_coef=1.0, scale_rewards="group"):
    return grpo_or(batch)
"""


def test_a_rule_of_a_plugin_says_whether_it_splits_turns(recipe, tmp_path, capsys, monkeypatch):
    keep_estimators(monkeypatch)
    for splits, status in ((True, 1), (False, 0)):
        plugin = tmp_path / f"plugin_{splits}.py"
        plugin.write_text(PLUGIN.replace("SPLITS", str(splits)).replace("NAME", f"mine_{splits}"))
        keys = {"advantage_estimator": f"mine_{splits}", "external_plugins": [str(plugin)]}
        arguments = recipe(**keys, importance_sampling_level="sequence", loss_type="grpo")
        assert main(["rollout", *arguments, "--num_prompts", "1"]) == status
        assert (f"credit that `advantage_estimator: mine_{splits}`" in capsys.readouterr().err) == splits
    keys["advantage_estimator"] = "mien_False"
    assert main(["rollout", *recipe(**keys), "--num_prompts", "1"]) == 1
    assert "the nearest is 'mine_False'" in capsys.readouterr().err


def test_a_rule_that_returns_nan_ends_training_with_a_sentence(recipe, tmp_path, capsys, monkeypatch):
    keep_estimators(monkeypatch)
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        PLUGIN.replace("SPLITS", "True").replace("NAME", "mine").replace("grpo_or(batch)", "grpo_or(batch) / 0")
    )
    keys = {"advantage_estimator": "mine", "external_plugins": [str(plugin)], "do_eval": False}
    assert main(["train", *recipe(**keys)]) == 1
    assert "mt-grpo: The advantage estimator 'mine' gave nan to turn 1" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("*.safetensors"))


def test_the_native_protocol_needs_a_template_with_tools(recipe, tmp_path, capsys):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    build_model(tokenizer).save_pretrained(tmp_path / "model")
    keys = {"model_name_or_path": str(tmp_path / "model"), "call_protocol": "native"}
    assert main(["train", *recipe(**keys)]) == 1
    assert "no tool support" in capsys.readouterr().err


def test_prompts_that_do_not_fit_are_dropped_and_counted(recipe, tmp_path, caplog):
    long = {"question": "word " * 600, "answer": "x"}
    arguments = recipe()
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps(long) + "\n")
    assert main(["rollout", *arguments, "--num_prompts", "1"]) == 0
    assert "Dropped 1 of 5 rows" in caplog.text


def test_a_terminal_without_utf8_shows_what_it_can(tmp_path):
    (tmp_path / "recipe.yaml").write_text("max_stepß: 1\n", encoding="utf-8")
    command = [sys.executable, "-m", "mt_grpo", "train", str(tmp_path / "recipe.yaml")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 1 and run.stderr.startswith("mt-grpo: The key 'max_step?' in ")


def test_a_reader_that_has_enough_gets_no_traceback():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "mt_grpo", "completion", "bash"]
    with os.fdopen(writing, "wb") as stdout:
        run = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 1 and run.stderr == ""


def test_an_unknown_command_fails_loudly():
    run = subprocess.run([sys.executable, "-m", "mt_grpo", "trian"], capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.startswith("mt-grpo: the command 'trian' is unknown; the commands are train, ")
    assert run.stderr.count("\n") == 1


STUBBORN = """
import asyncio, signal
from mt_grpo.envs import MultiTurnToolEnv

pressed = []

class Env(MultiTurnToolEnv):
    async def step(self, turn):
        if not pressed:
            pressed.append(True)  # a second signal ends the process at once
            signal.raise_signal(signal.SIGINT)
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass
"""


# a model that knows nothing would sample for long
PRESSED = """
import sys
from mt_grpo.envs.protocols import TagProtocol
from mt_grpo import concurrency
concurrency.GRACE = 0.5
TagProtocol.stop = tuple("aeiou ")
from mt_grpo.cli import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "rollout"])
def test_ctrl_c_ends_a_command_though_a_conversation_swallows_it(recipe, tmp_path, command):
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    arguments = recipe(env=f"{tmp_path}/stubborn.py:Env", max_completion_length=2048, max_turn_length=None)
    (tmp_path / "pressed.py").write_text(PRESSED)
    run = Forked([str(tmp_path / "pressed.py"), command, *arguments], tmp_path / "log")
    said = (run.wait(), (tmp_path / "log").read_text())
    assert said[0] == 130 and "mt-grpo: interrupted by Ctrl-C." in said[1]
    assert "not ended within 0.5 s: conversation 'eval-0000" in said[1]


def test_a_bug_of_ours_keeps_its_traceback(recipe, monkeypatch):
    def broken(*args, **kwargs):
        raise ValueError("not the user's to mend")

    monkeypatch.setattr("mt_grpo.app.build.load_rows", broken)
    with pytest.raises(ValueError, match="not the user's to mend"):
        main(["train", *recipe()])


def test_what_a_library_refuses_is_one_sentence(recipe, tmp_path, capsys):
    assert main(["train", *recipe(model_name_or_path=str(tmp_path / "nowhere"))]) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith(f"mt-grpo: The model '{tmp_path / 'nowhere'}' cannot be loaded: ")
