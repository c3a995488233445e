"""Intervals and chances of evaluations, against scipy and against every subset of attempts."""

from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from mt_grpo.runlog.findings import CONFIDENCE, RESAMPLES, bootstrap, pass_at


@pytest.mark.parametrize("rows", (2, 7, 500))
def test_intervals_are_those_of_scipy(rows):
    values = np.random.default_rng(rows).random(rows)
    rng = np.random.default_rng(0)
    options = {"n_resamples": RESAMPLES, "confidence_level": CONFIDENCE, "method": "percentile", "rng": rng}
    theirs = stats.bootstrap((values,), np.mean, **options).confidence_interval
    ours = bootstrap(np.append(values, np.nan))  # a row without a value does not count
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    assert (ours.mean, ours.rows) == (pytest.approx(values.mean()), rows)


def test_too_few_rows_have_no_interval():
    assert bootstrap(np.array([np.nan])).mean is None
    one = bootstrap(np.array([0.5]))
    assert (one.mean, one.low, one.rows) == (0.5, None, 1)


def test_chances_are_shares_of_all_subsets():
    attempts = [[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0]]
    right, number = (np.array([size(each) for each in attempts]) for size in (sum, len))
    for k in (1, 2, 3, 4):
        subsets = [list(combinations(each, k)) for each in attempts]
        wanted = [
            [np.mean([judge(one) for one in each]) if each else np.nan for each in subsets] for judge in (any, all)
        ]
        np.testing.assert_allclose(pass_at(right, number, k), wanted, atol=1e-12)
