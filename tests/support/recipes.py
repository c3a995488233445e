"""The recipes of this repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2] / "recipes"
RECIPES = sorted([*ROOT.glob("*.yaml"), *ROOT.glob("Qwen/*.yaml")])

TRAINING_PROCESSES = {"triviaqa_1.5b_1gpu": 1, "triviaqa_1.5b_2gpu": 1, "triviaqa_3b_4gpu": 3}


def processes_of(recipe: Path) -> int:
    """Processes that train by a recipe; those for eight GPUs leave one to a server."""
    return TRAINING_PROCESSES.get(recipe.stem, 7 if recipe.parent.name == "Qwen" else 1)
