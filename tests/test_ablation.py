"""The comparison of credit rules: what its arms do to rewards, its intervals, its runs, and the page about it."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from support.registered import keep_estimators
from support.servers import ROOT

from mt_grpo.concurrency import run
from mt_grpo.credit import RewardBatch
from mt_grpo.rewards import score_cut, score_trajectories
from mt_grpo.trajectory import StopReason, ToolCall, Trajectory, Turn

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Benchmarks can be imported, and the credit rules that they register are forgotten."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    keep_estimators(monkeypatch)
    monkeypatch.delitem(sys.modules, "ablation_arms", raising=False)


def make_batch(rows: int) -> RewardBatch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 5, (rows, 1), generator=generator)
    exists = torch.arange(4) < lengths
    rewards = torch.rand(rows, 4, generator=generator)
    rewards[torch.rand(rows, 4, generator=generator) < 0.3] = torch.nan
    outcomes = torch.rand(rows, generator=generator)
    return RewardBatch(rewards.masked_fill(~exists, torch.nan), outcomes, exists, exists, 4)


def test_shuffling_keeps_each_sum_and_repeats_itself():
    from ablation_arms import shuffled

    batch = make_batch(400)
    first = shuffled(batch, 0).turn_rewards
    torch.testing.assert_close(first.nansum(1), batch.turn_rewards.nansum(1))
    assert first[~batch.turn_mask].isnan().all()
    assert torch.equal(first.nan_to_num(-1), shuffled(batch, 0).turn_rewards.nan_to_num(-1))
    assert not torch.equal(first.nan_to_num(-1), shuffled(batch, 1).turn_rewards.nan_to_num(-1))


def test_shuffling_takes_every_turn_as_often():
    from ablation_arms import shuffled

    exists = torch.tensor([[True, True, True, False]]).repeat(3000, 1)
    rewards = torch.tensor([[1.0, torch.nan, 0.0, torch.nan]]).repeat(3000, 1)
    batch = RewardBatch(rewards, torch.zeros(3000), exists, exists, 4)
    share = (shuffled(batch, 0).turn_rewards == 1).float().mean(0)
    assert share.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0], abs=0.04)


def test_rewards_at_the_end_are_the_sums_at_the_last_turn():
    from ablation_arms import at_the_end

    batch = make_batch(400)
    placed = at_the_end(batch).turn_rewards
    last = batch.turn_mask.sum(1, keepdim=True) - 1
    torch.testing.assert_close(placed.gather(1, last)[:, 0], batch.turn_rewards.nansum(1))
    assert (placed.scatter(1, last, 0.0).nan_to_num(0.0) == 0).all()
    assert torch.equal(placed.isnan(), ~batch.turn_mask)


def searched(index: int, *results: str, ran: bool = True) -> Turn:
    return Turn(index, {"role": "assistant"}, [ToolCall("search", {}, text, executed=ran) for text in results])


def test_a_hop_is_rewarded_where_it_is_found_first():
    from ablation_arms import HopReward

    turns = [
        searched(0, "other"),
        searched(1, "one"),
        searched(2, "nothing", ran=False),
        searched(3, "one"),
        searched(4, "two", "one"),
        searched(5),
    ]
    trajectory = Trajectory([], turns, stop_reason=StopReason.ANSWERED, row={"passages": ["one", "two"]})
    reward = HopReward()
    run(score_trajectories([reward], [], [trajectory]))
    assert trajectory.rewards["turn"]["hop_reward"] == [0.0, 0.5, None, 0.0, 0.5, None]
    assert run(score_cut([reward], [(trajectory, index) for index in range(6)])) == {}


def test_every_question_of_two_hops_has_its_two_passages():
    from ablation_arms import VARIANTS

    rows = VARIANTS["two_hops"].rows("validation")
    assert len(rows) > 240
    assert {len(passages) for passages in rows["passages"]} == {2}
    assert len(VARIANTS["quickstart"].rows("validation")) > len(rows)


@pytest.mark.parametrize(
    ("probability", "freedom", "tabled"),
    [(0.975, 1, 12.7062), (0.975, 11, 2.2010), (0.95, 30, 1.6973), (0.995, 5, 4.0321)],
)
def test_quantiles_of_t_are_those_of_the_tables(probability, freedom, tabled):
    from ablation_report import quantile

    assert quantile(probability, freedom) == pytest.approx(tabled, abs=5e-5)


def test_a_difference_is_paired_and_says_what_it_counts_as():
    from ablation_report import difference

    noise = [0.9, 0.2, 0.5, 0.7, 0.1, 0.4]
    near = difference([value + 0.1 + 0.01 * (-1) ** index for index, value in enumerate(noise)], noise)
    assert near.mean == pytest.approx(0.1) and near.verdict == "shown"
    assert near.half == pytest.approx(2.5706 * 0.01 * math.sqrt(6 / 5) / math.sqrt(6), rel=1e-4)
    assert str(near) == "**+0.100 ± 0.011**"
    verdicts = [difference([value + shift for value in noise], [0.5] * 6).verdict for shift in (0.03, 0.4, 0.9)]
    assert verdicts == ["none", "hint", "shown"]


def test_only_seeds_that_every_arm_has_are_compared():
    from ablation_report import paired

    rows = [
        {"variant": "two_hops", "arm": arm, "seed": seed, "train": {"exact_match": [0.5]}}
        for arm, seed in [("a", 1), ("b", 1), ("a", 3), ("a", 2), ("b", 2)]
    ]
    found = paired(rows, "two_hops")
    assert {arm: [row["seed"] for row in runs] for arm, runs in found.items()} == {"a": [1, 2], "b": [1, 2]}


def test_what_has_run_becomes_a_file_a_page_and_curves(tmp_path):
    import ablation
    from ablation_report import BEGIN, END, draw, text, write_page
    from jobs import finished, write_rows

    result = tmp_path / "ablation.json"
    given = ablation.jobs(["two_hops"], ["mt_grpo", "reward_to_go", "shuffled"], 3)
    for number, job in enumerate(given[:9]):  # the last one has not run
        trained = {"exact_match": [number / 10, 0.5] if job.arm != "start" else []}
        steps = ("1", "2") if job.arm != "start" else ("0",)
        held_out = {step: {"exact_match": 0.25} for step in steps}
        row = {**job._asdict(), "held_out": held_out, "train": trained, "settings": {}}
        job.file(tmp_path).write_text(json.dumps(row))
    write_rows(result, finished(given, tmp_path, settings={}), settings={})
    rows = json.loads(result.read_text())["rows"]
    assert [(row["arm"], row["seed"]) for row in rows] == [(job.arm, job.seed) for job in given[:9]]
    page = tmp_path / "page.md"
    page.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    write_page(rows, page)
    assert page.read_text() == f"above\n{BEGIN}\n\n{text(rows)}\n\n{END}\nbelow\n"
    assert "2 seeds, 0.250 before training." in page.read_text()
    assert "| `shuffled` | +0.050 ± 0.000 |" in page.read_text().replace("**", "")  # to `reward_to_go`
    draw(rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a process of runs
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_runs_are_skipped_where_they_ran_and_leave_no_trace(tmp_path, monkeypatch, capsys, one_thread):
    import ablation
    from jobs import ENVIRONMENT

    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")  # put back afterwards
    settings = ablation.Settings(2, 8, 4)
    first, last = ablation.Job("two_hops", "mt_grpo", 1), ablation.Job("two_hops", "shuffled", 1)
    ablation.work(first, settings, tmp_path)
    written = first.file(tmp_path).stat().st_mtime_ns
    command = ["--folder", str(tmp_path), "--variants", "two_hops", "--arms", "mt_grpo", "shuffled", "--seeds", "1"]
    command += ["--workers", "1", "--steps", "2", "--batch", "8", "--questions"]
    ablation.main([*command, "4"])
    assert first.file(tmp_path).stat().st_mtime_ns == written
    assert "2 of 2" in capsys.readouterr().out  # the other arm, and what is measured without training
    theirs = json.loads(last.file(tmp_path).read_text())
    assert list(theirs["held_out"]) == ["1", "2"] and len(theirs["train"]["exact_match"]) == 2
    ours = json.loads(json.dumps(ablation.run(last, settings)))  # here after another run, there in a fresh process
    assert {**ours, "seconds": None} == {**theirs, "seconds": None}
    with pytest.raises(SystemExit, match="name another --folder"):
        ablation.main([*command, "8"])


def committed() -> list[dict]:
    return json.loads((BENCHMARKS / "results" / "ablation.json").read_text())["rows"]


def test_the_page_has_the_committed_results():
    from ablation_report import text

    assert text(committed()) in (ROOT / "benchmarks" / "reports" / "ablation.md").read_text()


def test_arms_of_a_seed_begin_with_the_same_batch():
    first: dict[tuple[str, int], set[float]] = {}
    for row in committed():
        if row["arm"] != "start":
            first.setdefault((row["variant"], row["seed"]), set()).add(row["train"]["reward"][0])
    assert first and {len(rewards) for rewards in first.values()} == {1}
    assert len({reward for (rewards) in first.values() for reward in rewards}) > len(first) / 2
