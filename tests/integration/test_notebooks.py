"""The notebooks run from beginning to end, and what they keep is what they print."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")  # as notebooks/execute.py
    notebook = nbformat.read(path, as_version=4)
    kept = [cell.get("outputs") for cell in notebook.cells if cell.cell_type == "code"]
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert [bool(outputs) for outputs in kept] == [bool(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_with_outputs_of_no_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs for cell in code)
    assert notebook.cells[0].source.startswith("# ")
    assert "**Claim" in notebook.cells[0].source
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    assert "/site-packages/" not in path.read_text()
