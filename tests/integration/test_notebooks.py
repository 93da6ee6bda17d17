"""The notebooks run from beginning to end, and what they keep is what they print."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
SMALLER = {
    "01_compare_bounds": [
        ("samples=2, max_length=128", "samples=1, max_length=32, layers=[0, 3]"),
        (
            "max_length=64,\n        map=name",
            "max_length=16,\n        layers=[0],\n        map=name",
        ),
    ],
    "02_heatmaps": [("samples=2, max_length=128", "samples=2, max_length=12, layers=[0, 1]")],
    "03_growth_with_length": [
        ("(2, 6, 12, 24, 48, 96)", "(10, 12, 14)"),
        ("sequences=4", "sequences=2"),
        ("layers=(0, 2, 5)", "layers=(0,)"),
    ],
    "04_what_makes_a_head_steep": [("samples=4", "samples=1"), ("capture(2)", "capture(1)")],
    "05_adversarial_inputs": [("(4, 16, 64, 256)", "(4, 16)"), ("range(400)", "range(40)")],
    "06_train_with_jasmin": [
        ("epochs=20", "epochs=1"),
        ("range(3)", "range(2)"),
        ("test = slice(0, 1400), slice(1400, None)", "test = slice(0, 1400), slice(1400, 1440)"),
        ("[test][:200]", "[test][:20]"),
    ],
    "07_modern_decoders": [
        ("layers = [0, 5, 10, 15, 20, 25, 29]", "layers = [0, 10, 20]"),
        ("[5, 15, 20, 25]", "[10, 20]"),
        ("[0.25, 0.5, 1, 2, 4]", "[0.5, 1]"),
        ("max_length=64, layers=layers", "max_length=16, layers=layers"),
        ("captured(64)", "captured(16)"),
        ("[16, 32, 64, 128]", "[4, 8, 16]"),
    ],
    "08_which_tokens": [
        (
            "leaves at seven in the morning and again at four. Between the two crossings the "
            "harbour belongs ",
            "leaves. ",
        ),
        (
            "to the gulls. Anna, who sold the tickets, had worked there for nineteen years.",
            "Anna sold tickets.",
        ),
    ],
}
"""What notebooks compute, and by what it is replaced here: every line runs, in a fraction of the
time. `make notebooks` runs them as they are."""


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")  # as notebooks/execute.py
    notebook = nbformat.read(path, as_version=4)
    for whole, small in SMALLER.get(path.stem, []):
        assert any(whole in cell.source for cell in notebook.cells), whole
        for cell in notebook.cells:
            cell.source = cell.source.replace(whole, small)
    kept = [cell.get("outputs") for cell in notebook.cells if cell.cell_type == "code"]
    place = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=600, resources=place).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [bool(outputs) for outputs in kept] == [bool(cell.outputs) for cell in code]


@pytest.mark.slow
def test_notebooks_need_no_widgets(tmp_path: Path) -> None:
    code = "import lipbound as lb\nds = lb.compare('builtin:gpt2', samples=1, max_length=8)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, resources=place).execute()
    outputs = notebook.cells[0].outputs
    assert [o for o in outputs if o.output_type != "stream" or "Warning" in o.text] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_with_outputs_of_no_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs for cell in code)
    assert notebook.cells[0].source.startswith("# ")
    assert "**Claim" in notebook.cells[0].source
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    assert "/site-packages/" not in path.read_text()
