"""Registries as they were, after a test that registers things of its own."""

import pytest

from mt_grpo.credit import ADVANTAGE_ESTIMATORS, rule
from mt_grpo.imports import Registry


def keep(monkeypatch: pytest.MonkeyPatch, registry: Registry) -> None:
    """Makes a test forget what it registers."""
    monkeypatch.setattr(registry, "_entries", dict(registry))
    monkeypatch.setattr(registry, "_files", dict(registry._files))


def keep_estimators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for credit rules, and what is known of them."""
    keep(monkeypatch, ADVANTAGE_ESTIMATORS)
    monkeypatch.setattr(rule, "_WHOLE", set(rule._WHOLE))
    monkeypatch.setattr(rule, "_SUMMING", set(rule._SUMMING))
