"""A built wheel holds all that the package needs: the quickstart runs from an empty folder, without the repository."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest

from mt_grpo import __version__

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
SMALL = "--max_steps 1 --per_device_train_batch_size 8 --max_turn_length 16"
SMALL += " --dataset_train_split train[:8] --dataset_test_split validation[:4]"


def run(*command: object, **options: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, in which nothing of an earlier build is left."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("mt_grpo", "recipes"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, folder / "source" / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder / "source")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, folder / "source")
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory):
    """The programs of an environment with the wheel in it, and the packages of this one but for the project itself."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    (site,) = folder.glob("lib/python*/site-packages")
    # as a line of a `.pth` file a folder is searched, and its own `.pth` files, of editable installs, are not read
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


def test_the_wheel_has_what_the_package_reads(wheel):
    names = ZipFile(wheel).namelist()
    data = {name for name in names if not name.endswith(".py") and ".dist-info/" not in name}
    assert {"mt_grpo/data/embedded/facts.json", "mt_grpo/data/embedded/model/model.safetensors"} <= data
    recipes = {f"mt_grpo/{path.relative_to(REPOSITORY)}" for path in (REPOSITORY / "recipes").rglob("*.*")}
    recipes = {name for name in recipes if not name.endswith((".py", ".pyc"))}
    assert "mt_grpo/recipes/sql/sql_agent.py" in names
    assert {name for name in data if name.startswith("mt_grpo/recipes/")} == recipes
    assert {name.split("/")[0] for name in names} == {"mt_grpo", f"mt_grpo-{__version__}.dist-info"}
    here = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "mt_grpo").rglob("*.*") if path.is_file()}
    assert not [name for name in here - set(names) if "__pycache__" not in name]


def test_the_quickstart_runs_from_an_empty_folder(clean, tmp_path):
    """With nothing else on Python's path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def outside(program: str, *arguments: str) -> str:
        return run(clean / program, *arguments, cwd=tmp_path, env=environment)

    assert Path(outside("python", "-c", "import mt_grpo; print(mt_grpo.__file__)")).is_relative_to(clean.parent)
    assert outside("mt-grpo", "--version") == f"mt-grpo {__version__}\n"
    outside("mt-grpo", "recipes", "cp", "quickstart.yaml", ".")
    assert [path.name for path in tmp_path.iterdir()] == ["quickstart.yaml"]
    printed = outside("mt-grpo", "train", "--config", "quickstart.yaml", *SMALL.split())
    left = {path.name for path in (tmp_path / "runs" / "quickstart").iterdir()}
    assert {"config.yaml", "metrics.jsonl", "summary.json", "model.safetensors", "learning_curve.png"} <= left
    assert "4 held-out questions" in printed
