"""The comparison of credit rules: what its arms do to rewards, its intervals, its runs, and the page about it."""

import json
import math

import pytest
import torch
from support.benchmarks import BENCHMARKS, REPORTS

from mt_grpo.concurrency import run
from mt_grpo.credit import RewardBatch
from mt_grpo.rewards import score_cut, score_trajectories
from mt_grpo.trajectory import StopReason, ToolCall, Trajectory, Turn


@pytest.fixture
def batch() -> RewardBatch:
    generator = torch.Generator().manual_seed(0)
    exists = torch.arange(4) < torch.randint(1, 5, (400, 1), generator=generator)
    rewards = torch.rand(400, 4, generator=generator)
    rewards[torch.rand(400, 4, generator=generator) < 0.3] = torch.nan
    outcomes = torch.rand(400, generator=generator)
    return RewardBatch(rewards.masked_fill(~exists, torch.nan), outcomes, exists, exists, 4)


def test_shuffling_keeps_each_sum_and_repeats_itself(bench, batch):
    first, again, other = (bench.ablation_arms.shuffled(batch, seed).turn_rewards for seed in (0, 0, 1))
    torch.testing.assert_close(first.nansum(1), batch.turn_rewards.nansum(1))
    assert first[~batch.turn_mask].isnan().all()
    assert torch.equal(first.nan_to_num(-1), again.nan_to_num(-1))
    assert not torch.equal(first.nan_to_num(-1), other.nan_to_num(-1))


def test_shuffling_takes_every_turn_as_often(bench):
    exists = torch.tensor([[True, True, True, False]]).repeat(3000, 1)
    rewards = torch.tensor([[1.0, torch.nan, 0.0, torch.nan]]).repeat(3000, 1)
    batch = RewardBatch(rewards, torch.zeros(3000), exists, exists, 4)
    share = (bench.ablation_arms.shuffled(batch, 0).turn_rewards == 1).float().mean(0)
    assert share.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0], abs=0.04)


def test_rewards_at_the_end_are_the_sums_at_the_last_turn(bench, batch):
    placed = bench.ablation_arms.at_the_end(batch).turn_rewards
    last = batch.turn_mask.sum(1, keepdim=True) - 1
    torch.testing.assert_close(placed.gather(1, last)[:, 0], batch.turn_rewards.nansum(1))
    assert (placed.scatter(1, last, 0.0).nan_to_num(0.0) == 0).all()
    assert torch.equal(placed.isnan(), ~batch.turn_mask)


def test_a_hop_is_rewarded_where_it_is_found_first(bench):
    found = [
        (["other"], True),
        (["one"], True),
        (["nothing"], False),
        (["one"], True),
        (["two", "one"], True),
        ([], True),
    ]
    turns = [
        Turn(index, {"role": "assistant"}, [ToolCall("search", {}, text, executed=ran) for text in results])
        for index, (results, ran) in enumerate(found)
    ]
    trajectory = Trajectory([], turns, stop_reason=StopReason.ANSWERED, row={"passages": ["one", "two"]})
    reward = bench.ablation_arms.HopReward()
    run(score_trajectories([reward], [], [trajectory]))
    assert trajectory.rewards["turn"]["hop_reward"] == [0.0, 0.5, None, 0.0, 0.5, None]
    assert run(score_cut([reward], [(trajectory, index) for index in range(6)])) == {}


def test_every_question_of_two_hops_has_its_two_passages(bench):
    whole, rows = (bench.ablation_arms.VARIANTS[name].rows("validation") for name in ("quickstart", "two_hops"))
    assert len(whole) > len(rows) > 240 and {len(passages) for passages in rows["passages"]} == {2}


@pytest.mark.parametrize(
    ("probability", "freedom", "tabled"),
    [(0.975, 1, 12.7062), (0.975, 11, 2.2010), (0.95, 30, 1.6973), (0.995, 5, 4.0321)],
)
def test_quantiles_of_t_are_those_of_the_tables(bench, probability, freedom, tabled):
    assert bench.ablation_report.quantile(probability, freedom) == pytest.approx(tabled, abs=5e-5)


def test_a_difference_is_paired_and_says_what_it_counts_as(bench):
    difference, noise = bench.ablation_report.difference, [0.9, 0.2, 0.5, 0.7, 0.1, 0.4]
    near = difference([value + 0.1 + 0.01 * (-1) ** index for index, value in enumerate(noise)], noise)
    assert near.mean == pytest.approx(0.1) and near.verdict == "shown"
    assert near.half == pytest.approx(2.5706 * 0.01 * math.sqrt(6 / 5) / math.sqrt(6), rel=1e-4)
    assert str(near) == "**+0.100 ± 0.011**"
    verdicts = [difference([value + shift for value in noise], [0.5] * 6).verdict for shift in (0.03, 0.4, 0.9)]
    assert verdicts == ["none", "hint", "shown"]


def test_only_seeds_that_every_arm_has_are_compared(bench):
    rows = [
        {"variant": "two_hops", "arm": arm, "seed": seed, "train": {"exact_match": [0.5]}}
        for arm, seed in [("a", 1), ("b", 1), ("a", 3), ("a", 2), ("b", 2)]
    ]
    found = bench.ablation_report.paired(rows, "two_hops")
    assert {arm: [row["seed"] for row in runs] for arm, runs in found.items()} == {"a": [1, 2], "b": [1, 2]}


def test_what_has_run_becomes_a_file_a_page_and_curves(bench, tmp_path):
    report, jobs = bench.ablation_report, bench.jobs
    result, page = tmp_path / "ablation.json", tmp_path / "page.md"
    given = bench.ablation.jobs(["two_hops"], ["mt_grpo", "reward_to_go", "shuffled"], 3)
    for number, job in enumerate(given[:9]):  # the last one has not run
        trained = {"exact_match": [number / 10, 0.5] if job.arm != "start" else []}
        held_out = {step: {"exact_match": 0.25} for step in (("1", "2") if job.arm != "start" else ("0",))}
        row = {**job._asdict(), "held_out": held_out, "train": trained, "settings": {}}
        job.file(tmp_path).write_text(json.dumps(row))
    jobs.write_rows(result, jobs.finished(given, tmp_path, settings={}), settings={})
    rows = json.loads(result.read_text())["rows"]
    assert [(row["arm"], row["seed"]) for row in rows] == [(job.arm, job.seed) for job in given[:9]]
    page.write_text(f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n")
    report.write_page(rows, page)
    assert page.read_text() == f"above\n{report.BEGIN}\n\n{report.text(rows)}\n\n{report.END}\nbelow\n"
    assert "2 seeds, 0.250 before training." in page.read_text()
    assert "| `shuffled` | +0.050 ± 0.000 |" in page.read_text().replace("**", "")  # to `reward_to_go`
    report.draw(rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a process of runs
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_runs_are_skipped_where_they_ran_and_leave_no_trace(bench, tmp_path, monkeypatch, capsys, one_thread):
    ablation = bench.ablation
    for name in bench.jobs.ENVIRONMENT:
        monkeypatch.setenv(name, "")  # put back afterwards
    settings = ablation.Settings(1, 8, 4)
    first, last = ablation.Job("two_hops", "mt_grpo", 1), ablation.Job("two_hops", "shuffled", 1)
    ablation.work(first, settings, tmp_path)
    written = first.file(tmp_path).stat().st_mtime_ns
    command = ["--folder", str(tmp_path), "--variants", "two_hops", "--arms", "mt_grpo", "shuffled", "--seeds", "1"]
    command += ["--workers", "1", "--steps", "1", "--batch", "8", "--questions"]
    ablation.main([*command, "4"])
    assert first.file(tmp_path).stat().st_mtime_ns == written
    assert "2 of 2" in capsys.readouterr().out  # the other arm, and what is measured without training
    theirs = json.loads(last.file(tmp_path).read_text())
    assert list(theirs["held_out"]) == ["1"] and len(theirs["train"]["exact_match"]) == 1
    ours = json.loads(json.dumps(ablation.run(last, settings)))  # here after another run, there in a fresh process
    assert {**ours, "seconds": None} == {**theirs, "seconds": None}
    with pytest.raises(SystemExit, match="name another --folder"):
        ablation.main([*command, "8"])


def test_the_page_has_the_results_of_the_same_first_batches(bench):
    committed = json.loads((BENCHMARKS / "results" / "ablation.json").read_text())["rows"]
    assert bench.ablation_report.text(committed) in (REPORTS / "ablation.md").read_text()
    first: dict[tuple[str, int], set[float]] = {}
    for row in committed:
        if row["arm"] != "start":
            first.setdefault((row["variant"], row["seed"]), set()).add(row["train"]["reward"][0])
    assert first and {len(rewards) for rewards in first.values()} == {1}
    assert len({reward for (rewards) in first.values() for reward in rewards}) > len(first) / 2
