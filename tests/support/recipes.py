"""The recipes of this repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2] / "recipes"
RECIPES = sorted([*ROOT.glob("*.yaml"), *ROOT.glob("Qwen/*.yaml")])
