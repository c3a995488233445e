"""The curve of a run, whatever its steps have."""

from __future__ import annotations

import warnings

from mt_grpo.app.report import plot


def test_a_curve_without_a_number_is_drawn_without_a_warning(tmp_path):
    history = [
        {"step": 1, "reward": None, "rewards/a/mean": None},
        {"step": 2, "reward": None, "rewards/a/mean": None},
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot(history, tmp_path / "curve.png", "t")
        plot([], tmp_path / "empty.png", "t")
    assert (tmp_path / "curve.png").stat().st_size
