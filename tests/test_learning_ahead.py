"""What is learnt with `max_staleness`: the objectives that are compared, and the page with the committed figures."""

from __future__ import annotations

import json

import pytest
import torch
from support.models import CPU_RUN, build_model
from support.servers import ROOT
from support.trainers import Letters, Spelling

from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.fixture
def outputs(tmp_path, tokenizer, questions, monkeypatch):
    """Trains three steps with an objective. Returns of the last one what the trainer gives, and what is trained on."""

    def train(objective):
        from staleness import Objective

        given, trained = [], []
        ours, theirs = MTGRPOEnvTrainer._generate_and_score_completions, Objective._generate_and_score_completions

        def keep(into, method):
            def kept(self, inputs):
                output = method(self, inputs)
                into.append({name: each.clone() for name, each in output.items() if name in COLUMNS})
                return output

            return kept

        monkeypatch.setattr(MTGRPOEnvTrainer, "_generate_and_score_completions", keep(given, ours))
        monkeypatch.setattr(Objective, "_generate_and_score_completions", keep(trained, theirs))
        args = MTGRPOConfig(str(tmp_path), **CPU_RUN, max_completion_length=200, max_steps=3, max_staleness=1)
        args.learning_rate = 0.1
        trainer = Objective(
            build_model(tokenizer),
            Spelling(protocol="learnt_tags", max_steps=2),
            (),
            (Letters(),),
            args,
            train_dataset=questions,
            processing_class=tokenizer,
        )
        trainer.objective = objective
        trainer.train()
        assert len(given) == len(trained) == 3 and (given[-1]["importance_sampling_ratio"] != 1.0).any()
        return given[-1], trained[-1]

    return train


COLUMNS = ("old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio")


def test_the_decoupled_objective_is_the_trainers(outputs):
    given, trained = outputs("decoupled")
    for name in COLUMNS:
        torch.testing.assert_close(trained[name], given[name], rtol=0, atol=0, equal_nan=True)


def test_the_sampled_objective_has_sampled_log_probs_as_old(outputs):
    given, trained = outputs("sampled")
    assert (trained["importance_sampling_ratio"] == 1.0).all()
    sampled, old = given["sampling_per_token_logps"], given["old_per_token_logps"]
    known = ~sampled.isnan()  # what the environment has written was not sampled
    assert known.any() and torch.equal(trained["old_per_token_logps"], torch.where(known, sampled, old))


def test_no_correction_has_a_ratio_of_one(outputs):
    given, trained = outputs("none")
    assert (trained["importance_sampling_ratio"] == 1.0).all()
    assert torch.equal(trained["old_per_token_logps"], given["old_per_token_logps"])


@pytest.fixture
def results():
    from staleness import RESULT

    return json.loads(RESULT.read_text())


def test_the_page_has_the_committed_figures(results):
    from staleness_report import BEGIN, END, REPORTS, text

    page = (REPORTS / "staleness.md").read_text()
    assert page.split(BEGIN)[1].split(END)[0].strip() == text(results["rows"], results["parts"])


def test_seeds_overlap_and_those_without_correction_do_not(results):
    from staleness_report import arms, exact_match

    seeds, control = arms(results["rows"], "seeds"), arms(results["rows"], "control")
    without = exact_match(seeds["decoupled", 0])
    assert all(exact_match(seeds["decoupled", staleness]).overlaps(without) for staleness in (1, 2))
    assert not exact_match(control["none", 2]).overlaps(exact_match(control["none", 0]))


def test_an_interval_is_of_the_mean_over_seeds():
    from staleness_report import interval

    found = interval([0.8, 0.9])
    assert (found.mean, found.low, found.high) == pytest.approx((0.85, 0.85 - 12.706 * 0.05, 1.0), abs=1e-3)
    assert str(interval([0.25])) == "0.25"
    assert found.overlaps(interval([0.5])) and not found.overlaps(interval([0.1]))
