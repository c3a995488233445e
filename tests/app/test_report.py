"""What a run shows while it works, and says at its end: its commands can be copied, and are run here."""

import asyncio
import io
import re
import shlex
import signal
import warnings

import pytest
from rich.console import Console
from support.app_fixtures import SAVE
from support.conversations import Talk, user
from support.forked import Forked
from support.models import CPU_RUN
from support.waiting import until, until_true

from mt_grpo.app.rollout import _findings, _show_audit
from mt_grpo.app.train import _next_steps, _plot, run_training
from mt_grpo.credit import RewardAudit
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training.rollout_batch import RolloutBatch
from mt_grpo.training.step_log import Activity


def commands(printed: str) -> list[list[str]]:
    """The commands below "What to do next:", as words without the program."""
    pattern = r"(?:mt-grpo|\S*python\S* -m mt_grpo) (.*)"
    return [shlex.split(words) for words in re.findall(pattern, printed.split("What to do next:")[1])]


def test_a_finished_run_says_how_to_go_on(recipe, prints, tmp_path):
    folder, plugin = tmp_path / "run", tmp_path / "plugin.py"
    plugin.touch()  # is not in the current folder, so that commands have `--trust`
    printed = prints("train", *recipe(**SAVE, overwrite_output_dir=True, external_plugins=[str(plugin)]))
    assert f"{folder}/rollouts  (every conversation)" in printed
    assert (
        f"{folder}/checkpoint-2  (the latest of 2 to resume from)" in printed
        and f"{folder}/checkpoint-1 " not in printed
    )
    view, rollout, chat, resume = commands(printed)
    assert view == ["view", str(folder)]
    assert rollout == f"rollout --config {folder}/config.yaml --trust --model_name_or_path {folder}".split()
    assert "conversation 1" in prints(*rollout, "--num_prompts", "1") and chat == ["chat", str(folder), "--trust"]
    assert resume[-2:] == ["--max_steps", "4"] and "step 4/4" in prints(*resume)
    assert (folder / "checkpoint-1").exists()  # it was resumed, not begun anew


def test_an_environment_that_asks_by_itself_is_not_talked_with(recipe, prints, tmp_path):
    (tmp_path / "asks.py").write_text(
        "from mt_grpo.envs import Step, StepEnv\n\n\nclass Asks(StepEnv):\n    def reset(self, row):\n"
        "        return row['prompt']\n\n    def step(self, turn):\n        return Step(done=True, reward=1.0)\n"
    )
    unset = dict.fromkeys(("tools", "call_protocol", "turn_reward_funcs"))
    printed = prints("train", *recipe(**unset, env=f"{tmp_path / 'asks.py'}:Asks"))
    assert [words[0] for words in commands(printed)] == ["view", "rollout"]


@pytest.mark.slow
def test_an_adapter_is_put_into_its_model_first(recipe, prints, tmp_path):
    adapter = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"], "do_eval": False}
    merge, _, rollout, _ = commands(prints("train", *recipe(**adapter)))
    prints(*merge)
    assert (tmp_path / "run" / "merged" / "model.safetensors").exists()
    prints(*rollout, "--num_prompts", "1")


def test_a_run_with_a_server_serves_the_trained_model(tmp_path):
    options = {**CPU_RUN, "report_to": ["tensorboard", "trackio"]}
    args = MTGRPOConfig(str(tmp_path), **options, use_vllm=True, weight_sync="lora")
    served, _, rolled, _, board, track = [command for _, command in _next_steps(args, adapter=False)]
    model = f"--config {tmp_path}/config.yaml --model_name_or_path {tmp_path} --weight_sync auto"
    assert served.endswith(f" serve {model}") and rolled.endswith(f" rollout {model}")
    assert board == f"tensorboard --logdir {tmp_path}" and track == "trackio show --project huggingface"


def test_what_cannot_be_resumed_is_not_said_to_be(tmp_path):
    (_, view), (what, _), _ = _next_steps(MTGRPOConfig(str(tmp_path), **CPU_RUN), adapter=False)
    assert view.endswith(f" view {tmp_path}") and what == "see what the trained agent does"


def test_a_curve_without_a_number_is_drawn_without_a_warning(tmp_path):
    history = [{"step": step, "reward": None, "rewards/a/mean": None} for step in (1, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _plot(history, tmp_path / "curve.png", "t")
        _plot([], tmp_path / "empty.png", "t")
    assert (tmp_path / "curve.png").stat().st_size


# While it works


def test_without_a_terminal_each_step_is_a_line(recipe, prints):
    lines = prints("train", *recipe(max_steps=3, eval_strategy="steps", eval_steps=2)).splitlines()
    first, _, last = (line for line in lines if line.startswith("step "))
    assert re.fullmatch(
        r"step 1/3  reward \d\.\d{3}  loss -?\d\.\d{4}  turns \d\.\d\d  \d+\.\d s  0:0\d:\d\d left", first
    )
    assert last.startswith("step 3/3  ") and "left" not in last
    measured = [line for line in lines if line.startswith("evaluation at step ")]
    assert [line.split()[3] for line in measured] == ["0/3", "2/3", "3/3"]  # the last step once
    assert re.fullmatch(r"evaluation at step 2/3  reward \d\.\d{3}  turns \d\.\d\d  \d+\.\d s", measured[1])


def test_steps_that_are_not_logged_have_a_line(recipe, prints):
    printed = prints("train", *recipe(max_steps=3, do_eval=False, logging_steps=2))
    steps = [line for line in printed.splitlines() if line.startswith("step ")]
    assert ["reward" in line for line in steps] == [False, True, False, True]
    assert re.fullmatch(r"step 1/3  \d+\.\d s  0:0\d:\d\d left", steps[0])


HOLDS = """
import time

def holds(completions, trainer_state, **row):
    if trainer_state.global_step == 1:
        time.sleep(600)
    return [0.0] * len(completions)
"""


@pytest.mark.slow
def test_a_line_is_there_before_the_next_step_begins(recipe, tmp_path):
    """Whoever reads a pipe or a file sees each line when it is written."""
    log, rewards = tmp_path / "log", tmp_path / "rewards.py"
    rewards.write_text(HOLDS)
    keys = {"max_steps": 2, "do_eval": False, "outcome_reward_funcs": [f"{rewards}:holds"]}
    run = Forked(["-m", "mt_grpo", "train", *recipe(**keys)], log)
    until(lambda: re.search("^step 1/2", log.read_text(), re.M), lambda: run.poll() is None, seen=log.read_text)
    run.kill()
    assert run.wait() == -signal.SIGKILL


def test_a_terminal_shows_what_a_step_waits_for(build):
    trainer = build()
    trainer.eval_dataset = None
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    run_training(trainer, {}, console)
    shown = console.file.getvalue()
    for words in ("training, 0:0", "reward 2.475", "turns 2.25", "waiting for", "\x1b[?25h"):  # the cursor is back
        assert words in shown
    assert "0/?" not in shown


def test_an_activity_counts_conversations_turns_and_waits(tokenizer):
    """One conversation has ended, one waits for its tool, one for the engine."""
    described, activity, held = [], Activity(), asyncio.Event()

    class Held(Talk):
        async def step(self, turn):
            if self.session == "1" and turn.index == 1:
                await held.wait()
            return await super().step(turn)

    class Slow(ScriptedEngine):
        async def generate(self, context, sampling, session):
            if session == "2":
                await held.wait()
            return await super().generate(context, sampling, session)

    batch = RolloutBatch("train", [{}] * 4, [False, False, False, True])
    runner = RolloutRunner(Held([user("more"), user("more")]), Slow(tokenizer, lambda session, turn: "a<|im_end|>"))
    requests = [RolloutRequest("q", str(number)) for number in range(3)]

    async def run() -> None:
        work = asyncio.ensure_future(runner.run(requests, SamplingParams(), batch.trajectories.append))
        await until_true(lambda: batch.trajectories and len(runner.under_way["1"].turns) >= 2)
        described.append(activity.describe())
        held.set()
        await work
        described.append(activity.describe())

    with activity.sampling(batch, runner.under_way):
        asyncio.run(run())
    assert described == [
        "1 of 3 conversations, 5 turns; waiting for sampling (1) and tools (1)",
        "3 of 3 conversations, 9 turns; waiting for sampling (0) and tools (0)",
    ]
    assert activity.describe() == "waiting for forward and backward"
    with activity.of("rewards"):
        with activity.of("weight sync"):
            assert activity.describe() == "waiting for weight sync"
        assert activity.describe() == "waiting for rewards"


# The table of an audit, and the sentences below it

GOOD = {**dict.fromkeys(RewardAudit.__dataclass_fields__, 0.5), "causal": True}
NOTHING = {**dict.fromkeys(RewardAudit.__dataclass_fields__), "causal": None}


def record(**keys):
    numbers = {"groups": 4, "conversations": 32, "failed": 0, "groups_without_signal": 0.25, "sign_agreement": None}
    return {**numbers, "advice": None, "rewards": {"good": GOOD}, **keys}


def test_an_audit_says_what_stands_out():
    assert _findings(record()) == ["1 of 4 groups have no signal: their advantages are 0 at every turn."]
    rewards = {
        "silent": {**NOTHING, "applies": 0.0, "equal_groups": 1.0},
        "equal": {**GOOD, "equal_groups": 1.0},
        "late": {**GOOD, "causal": False},
    }
    advice = "`mt_grpo` leaves 71%"
    lines = _findings(record(failed=3, sign_agreement=0.25, rewards=rewards, advice=advice))[1:]
    assert [re.split("[,:]", line)[0] for line in lines] == [
        "3 of 32 conversations failed",
        "Turn and outcome advantages point the same way at 25% of the turns that have both.",
        "The reward 'silent' never applied",
        "The reward 'equal' teaches nothing here",
        "The reward 'late' depends on later turns",
        advice,
    ]


@pytest.mark.parametrize("width", [80, 40])
def test_the_table_fits_80_columns_and_is_whole_in_fewer(width):
    rewards = {"exist_answer_in_search_results": GOOD, "silent\x1b[31m": NOTHING}
    console = Console(file=io.StringIO(), width=width, soft_wrap=True)
    _show_audit(record(rewards=rewards), console)
    printed = console.file.getvalue()
    assert "\x1b" not in printed and "follows" in printed and "exist_answer_in" in printed
    table = printed.split("- 1 of 4")[0].splitlines()
    assert max(map(len, table)) <= 80 and "50% 0.500   0.500    50%   +0.50   50%    yes" in printed
