"""Tasks for agents in a terminal: their solutions solve them, and nothing else does."""

import os
import shutil
import subprocess
import tempfile

import pytest

from mt_grpo.data.terminal import KINDS, embedded_tasks, write_tasks
from mt_grpo.errors import ConfigError


@pytest.fixture
def solved(tmp_path):
    """Whether a task is solved after commands, in a folder that takes the place of /app."""

    def run(task, commands):
        app = tmp_path / "app"
        shutil.rmtree(app, ignore_errors=True)
        shutil.copytree(task / "environment" / "app", app)
        for script in app.rglob("*.sh"):
            script.write_text(script.read_text().replace("/app", str(app)))
        text = f"({commands}\n)\n{(task / 'tests' / 'test.sh').read_text()}"
        text = text.replace("/app", str(app)).replace("/logs", str(tmp_path)).replace("/tmp/found", f"{app}.found")
        subprocess.run(["bash", "-c", text], check=True, capture_output=True, timeout=20)
        return (tmp_path / "verifier" / "reward.txt").read_text().strip() == "1"

    return run


@pytest.mark.parametrize("seed", range(4))
def test_a_task_is_solved_by_its_solution_alone(tmp_path, solved, seed):
    for task in write_tasks(tmp_path / "tasks", 2 * len(KINDS), seed=seed):
        assert solved(task, (task / "solution" / "solve.sh").read_text()), task
        assert not solved(task, "true") and not solved(task, "echo 1 > /app/answer.txt; mkdir -p /app/result"), task


def test_tasks_are_their_seeds(tmp_path):
    def texts(folder, seed):
        return {
            path.relative_to(folder): path.read_text()
            for task in write_tasks(folder, 10, seed=seed, image="base:1")
            for path in task.rglob("*")
            if path.is_file()
        }

    first = texts(tmp_path / "a", 1)
    assert first == texts(tmp_path / "b", 1)
    assert set(first.values()) != set(texts(tmp_path / "c", 2).values())
    assert all("FROM base:1\n" in text for path, text in first.items() if path.name == "Dockerfile")


def test_embedded_tasks_are_not_read_from_another_user_s_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert len(list(embedded_tasks("eval").iterdir())) == 48
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match="is another user's"):
        embedded_tasks("eval")
