"""The comparison of credit rules by length: its task, what turn rewards say, and how runs are compared."""

import json

import pytest
from support.benchmarks import steps_of

from mt_grpo.rewards import load_rewards
from mt_grpo.trajectory import Trajectory, Turn


@pytest.fixture
def play(bench):
    """The rewards of a conversation with given calls, or with the right ones, and its steps."""

    def converse(setting: str, calls=None, session: str = "one"):
        task = bench.horizon_task
        env = task.environment(task.SETTINGS[setting])
        (row, *_) = task.rows(task.SETTINGS[setting], 2, seed=1)
        env.row, env.session = row, session
        parsed = [task.Calls().parse(call, None) for call in calls or row["right"]]
        turns = (Turn(index, each.message, tool_calls=each.calls) for index, each in enumerate(parsed))
        made = steps_of(env, row, turns)
        return [step.reward for step in made], made

    return converse


def test_right_calls_earn_a_share_each_and_the_outcome(play):
    rewards, steps = play("two-12")
    assert rewards == [pytest.approx(1 / 12)] * 12
    assert steps[-1].rewards == {"enough": 1.0} and all(not step.done for step in steps[:-1])


def test_the_second_half_asks_for_the_other_skill(bench):
    for row in bench.horizon_task.rows(bench.horizon_task.SETTINGS["two-12"], 3, seed=2):
        asked = [question.split()[-2] for question in row["questions"]]
        assert asked == ["find"] * 6 + ["count"] * 6
        for question, kind, call in zip(row["questions"], asked, row["right"], strict=True):
            words, (tool, before) = question.split(), {"find": ("search", "of"), "count": ("tally", "at")}[kind]
            assert call == f"{tool} {words[words.index(before) + 1]}"


def test_wrong_and_malformed_calls_earn_nothing(play):
    rewards, steps = play("two-12", ["search search", "tally", "of n1 n2", *["search n0"] * 9])
    assert rewards[:3] == [0, 0, 0] and steps[-1].rewards == {"enough": 0.0}


def test_a_noisy_judge_errs_in_a_fifth_of_the_calls(play):
    rewards = [reward for number in range(100) for reward in play("two-12-noisy", session=f"number {number}")[0]]
    assert sum(reward == 0 for reward in rewards) / len(rewards) == pytest.approx(0.2, abs=0.04)
    assert play("two-12-noisy")[0] == play("two-12-noisy")[0]


def test_misleading_rewards_pay_for_searching_alone(play):
    assert [reward > 0 for reward in play("two-12-misleading")[0]] == [True] * 6 + [False] * 6


def test_the_score_of_a_state_asks_for_the_next_right_call(bench):
    task = bench.horizon_task
    assert task.ARMS.keys() >= task.SCORES.keys()
    (score,) = load_rewards([task.SCORES["answer_baseline"]], "state")
    (row, *_) = task.rows(task.SETTINGS["two-4"], 2, seed=1)
    assert [score.answer_at(turn, row) for turn in range(4)] == row["right"]
    trajectory = Trajectory([], [Turn(0, {}), Turn(1, {})], answer_logprobs={score.name: [-3.0, -1.0]})
    assert [score.score(turn, trajectory, **row) for turn in trajectory.turns] == [-1.0, None]


def test_a_quick_run_has_two_designs_in_it(bench, tmp_path, monkeypatch, capsys):
    def run_missing(work, given, plan, *, folder, workers):
        for job in given:
            measures = {"right": [0.5] * 3, "start": 0.3, "end": 0.75, "over": 0.5, "plan": plan._asdict()}
            job.file(folder).write_text(json.dumps(job._asdict() | measures))

    for module in (bench.horizon, bench.designs_train):
        monkeypatch.setattr(module, "run_missing", run_missing)
    for name in ("keep", "write_page", "draw"):
        monkeypatch.delattr(bench.horizon, name)
    bench.horizon.main(["--quick", "--folder", str(tmp_path)])
    said = capsys.readouterr().out
    assert "### `two-12`" in said and "| arm | B | F |" in said and "| lambda_to_go | 0.25 | 0.25 |" in said
    assert len(list(tmp_path.glob("*.json"))) == 2 * 4 + 2 * 3


def test_the_goal_is_reached_by_the_mean_of_three_steps(bench):
    assert bench.horizon_report.steps_to_goal([0.2, 0.9, 0.9, 0.8, 0.9]) == 4
    assert bench.horizon_report.steps_to_goal([0.84] * 50) is None


def row(setting, arm, seed, right):
    return {"setting": setting, "arm": arm, "seed": seed, "right": [right + seed / 100] * 3}


def test_a_candidate_below_the_best_is_shown_behind(bench):
    behind, decision = bench.horizon_report.behind, bench.horizon_report.decision
    shares = {"mt_grpo": 0.5, "reward_to_go": 0.4, "turn_gae": 0.5, "gtpo": 0.6}
    settings = ("one-12", "two-12", "one-12-noisy", "two-12-noisy")
    rows = [
        row(setting, arm, seed, share) for setting in settings for arm, share in shares.items() for seed in range(4)
    ]
    assert behind(rows, "one-12", "gtpo", None) is None
    assert behind(rows, "one-12", "reward_to_go", None).mean == pytest.approx(-0.2)
    later = [row(setting, "answer_baseline", seed, 0.9) for setting in settings for seed in range(2)]
    verdicts = [line.split("|")[-2].strip() for line in decision(rows + later)[2:]]
    assert verdicts == ["yes"] * 4 + ["yes", "yes", "no", "no"] + ["no"] * 4


def test_advice_is_held_against_how_the_arms_ended(bench):
    steps = {"grpo_or": None, "mt_grpo": 0.2, "reward_to_go": 0.7, "gtpo": 0.9}
    arms = {arm: step and {"step": {"value": step, "low": 0.1, "high": 1.0}} for arm, step in steps.items()}
    advice = [{"setting": setting, "named": "gtpo", "arms": arms} for setting in ("one-12", "two-12")]
    shares = {"grpo_or": 0.3, "mt_grpo": 0.4, "reward_to_go": 0.7, "gtpo": 0.65}
    runs = [row("one-12", arm, seed, share) for arm, share in shares.items() for seed in range(3)]
    *_, line = bench.horizon_advice.table(advice, [*runs, row("one-12", "answer_baseline", 0, 0.9)])
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[:4] == ["`one-12`", "`gtpo`", "0.90 [0.10, 1.00]", "2 of 4, 3 seeds"]
    assert cells[4:] == ["**-0.050 ± 0.000**", "+0.80"]
