"""What `import mt_grpo` gives, and what it costs."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

import mt_grpo

HEAVY = """
import sys, mt_grpo
print(sorted({'torch', 'transformers', 'trl', 'numpy'} & sys.modules.keys()))
from mt_grpo import TokenTree, Trajectory
print('torch' in sys.modules)
import mt_grpo.data, mt_grpo.rewards, mt_grpo.tools
print('torch' in sys.modules)
"""


def test_the_package_trajectories_data_and_rewards_load_no_torch():
    run = subprocess.run([sys.executable, "-c", HEAVY], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\nFalse\nFalse\n"


def test_every_export_is_the_object_of_its_room():
    from mt_grpo.forward import token_logps
    from mt_grpo.token_tree import TokenTree
    from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer
    from mt_grpo.trajectory import Trajectory

    assert [getattr(mt_grpo, name) for name in mt_grpo.__all__] == [
        MTGRPOConfig,
        MTGRPOEnvTrainer,
        TokenTree,
        Trajectory,
        token_logps,
    ]
    assert set(mt_grpo.__all__) <= set(dir(mt_grpo))


def test_a_name_that_is_not_exported_is_an_attribute_error():
    with pytest.raises(AttributeError, match="MTGRPOTrainer"):
        mt_grpo.MTGRPOTrainer  # noqa: B018
    with pytest.raises(ImportError, match="MTGRPOTrainer"):
        exec("from mt_grpo import MTGRPOTrainer")


def test_type_checkers_see_every_export():
    tree = ast.parse(Path(mt_grpo.__file__).read_text(encoding="utf-8"))
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    assert ast.unparse(guarded.test) == "TYPE_CHECKING"
    imported = [name.name for node in guarded.body if isinstance(node, ast.ImportFrom) for name in node.names]
    assert sorted(imported) == sorted(mt_grpo.__all__)
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert files("mt_grpo").joinpath("py.typed").is_file()
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["mt_grpo"]


QUICKSTART = """
import sys
from mt_grpo.app.build import build_trainer
from mt_grpo.app.build import build_recipe
from mt_grpo.app.request import read_request

options = ["--dataset_train_split", "train[:8]", "--output_dir", sys.argv[1]]
build_trainer(build_recipe(read_request(["recipes/quickstart.yaml", *options], "train")))
print(*sorted(name for name in sys.modules if name.startswith("mt_grpo.")))
"""
EXTRAS = ("advisor", "doctor", "integrations", "viewer")
MOST_MODULES = 118


def test_the_quickstart_loads_no_extra(tmp_path):
    """Extras import the core, never the other way round: they are found by name where a run asks for them."""
    command = [sys.executable, "-c", QUICKSTART, str(tmp_path / "run")]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    loaded = run.stdout.splitlines()[-1].split()
    extras = tuple(f"mt_grpo.{name}" for name in EXTRAS)
    assert [name for name in loaded if name.startswith(extras)] == []
    assert len(loaded) <= MOST_MODULES
