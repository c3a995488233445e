"""What is learnt with `max_staleness`: the objectives that are compared, and the page with the committed figures."""

import json

import pytest
import torch
from support.benchmarks import REPORTS, between
from support.models import CPU_RUN, build_model
from support.trainers import Letters, Spelling

from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer

COLUMNS = ("old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio")


@pytest.mark.parametrize("objective", ["decoupled", "sampled", "none"])
def test_an_objective_trains_on_its_own_log_probs(bench, objective, tmp_path, tokenizer, questions, monkeypatch):
    """At the last of three steps, by what the trainer gives and what is trained on."""
    given, trained = [], []

    def keep(of, into):
        method = of._generate_and_score_completions

        def kept(self, inputs):
            output = method(self, inputs)
            into.append({name: each.clone() for name, each in output.items() if name in COLUMNS})
            return output

        monkeypatch.setattr(of, "_generate_and_score_completions", kept)

    Objective = bench.staleness.Objective
    keep(Objective, trained)
    keep(MTGRPOEnvTrainer, given)
    args = MTGRPOConfig(str(tmp_path), **CPU_RUN, max_completion_length=200, max_steps=3, max_staleness=1)
    args.learning_rate = 0.1
    env, data = Spelling(protocol="learnt_tags", max_steps=2), {"train_dataset": questions}
    trainer = Objective(build_model(tokenizer), env, (), (Letters(),), args, **data, processing_class=tokenizer)
    trainer.objective = objective
    trainer.train()
    assert len(given) == len(trained) == 3
    old, sampled, ratio = (given[-1][name] for name in COLUMNS)
    assert (ratio != 1.0).any()
    known = ~sampled.isnan()  # what the environment has written was not sampled
    assert known.any()
    expected = {name: given[-1][name] for name in COLUMNS}
    if objective != "decoupled":
        expected["importance_sampling_ratio"] = torch.ones_like(ratio)
    if objective == "sampled":
        expected["old_per_token_logps"] = torch.where(known, sampled, old)
    for name in COLUMNS if objective == "decoupled" else COLUMNS[::2]:
        torch.testing.assert_close(trained[-1][name], expected[name], rtol=0, atol=0, equal_nan=True)


def test_the_page_has_the_committed_figures_and_seeds_overlap(bench):
    report, results = bench.staleness_report, json.loads(bench.staleness.RESULT.read_text())
    assert between(REPORTS / "staleness.md", report.BEGIN, report.END) == report.text(
        results["rows"], results["parts"]
    )
    seeds, control = (report.arms(results["rows"], name) for name in ("seeds", "control"))
    without = report.exact_match(seeds["decoupled", 0])
    assert all(report.exact_match(seeds["decoupled", staleness]).overlaps(without) for staleness in (1, 2))
    # those without correction do not
    assert not report.exact_match(control["none", 2]).overlaps(report.exact_match(control["none", 0]))


def test_an_interval_is_of_the_mean_over_seeds(bench):
    interval = bench.staleness_report.interval
    found = interval([0.8, 0.9])
    assert (found.mean, found.low, found.high) == pytest.approx((0.85, 0.85 - 12.706 * 0.05, 1.0), abs=1e-3)
    assert str(interval([0.25])) == "0.25"
    assert found.overlaps(interval([0.5])) and not found.overlaps(interval([0.1]))
