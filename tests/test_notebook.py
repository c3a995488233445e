"""The notebook trains in a real Jupyter kernel, whose event loop is already running."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "quickstart.ipynb"

SMALL = {"max_steps=20": "max_steps=1", "=48": "=8", "[:48]": "[:8]", "(48)": "(8)", '"train")': '"train[:8]")'}
LOOP = "import asyncio\n\nprint(asyncio.get_running_loop().is_running(), trainer.state.global_step)"


@pytest.fixture
def notebook() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output["text"] for output in cell.get("outputs", []) if output.get("name") == "stdout")


@pytest.mark.slow
def test_the_notebook_trains_in_a_running_event_loop(notebook, tmp_path):
    for cell in notebook.cells:
        for option, smaller in SMALL.items():
            cell.source = cell.source.replace(option, smaller)
    assert all(any(smaller in cell.source for cell in notebook.cells) for smaller in SMALL.values())
    notebook.cells.append(nbformat.v4.new_code_cell(LOOP))
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert printed(notebook.cells[-1]).strip() == "True 1"
    counts = [text for text in map(printed, notebook.cells) if re.search(r"\d+ of 8 questions are answered", text)]
    assert len(counts) == 2  # before and after
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))


def test_the_notebook_is_committed_without_outputs(notebook):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
