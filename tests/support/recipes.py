"""The recipes of this repository, and how tests read one."""

from pathlib import Path

from mt_grpo.app.build import Recipe, build_recipe
from mt_grpo.app.request import read_request

ROOT = Path(__file__).parents[2] / "recipes"
RECIPES = sorted([*ROOT.glob("*.yaml"), *ROOT.glob("Qwen/*.yaml"), *ROOT.glob("terminal/*.yaml")])
LISTED = sorted([*RECIPES, *ROOT.glob("accelerate/*.yaml"), *ROOT.glob("sql/*.yaml")])
"""What `mt-grpo recipes ls` lists."""

TRAINING_PROCESSES = {"triviaqa_1.5b_1gpu": 1, "triviaqa_1.5b_2gpu": 1, "triviaqa_3b_4gpu": 3}
TRAINING_PROCESSES |= {f"gsm8k_colocate_{number}gpu": number for number in (1, 2, 4)} | {"long_conversations": 4}
TRAINING_PROCESSES |= {f"{kind}_{gpus}gpu": min(gpus, 4) for kind in ("terminal", "swe") for gpus in (1, 4, 8)}


def processes_of(recipe: Path) -> int:
    """Processes that train by a recipe; those for eight GPUs leave one to a server."""
    return TRAINING_PROCESSES.get(recipe.stem, 7 if recipe.parent.name == "Qwen" else 1)


def parse_recipe(arguments: list[str]) -> Recipe:
    """The options of a command line such as `["R.yaml", "--field", "value"]`."""
    return build_recipe(read_request(arguments))
