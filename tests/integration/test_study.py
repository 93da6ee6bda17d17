"""The study of penalties runs from its configuration to its table, on a handful of images."""

import json
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import yaml
from PIL import Image

STUDY = Path(__file__).parents[2] / "benchmarks" / "jasmin"


@pytest.mark.slow
def test_small_study(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for split, count in (("train", 16), ("test", 12)):
        pixels = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        rows = {"image": list(map(Image.fromarray, pixels)), "label": np.arange(count) % 10}
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / f"{split}.parquet")
    config = yaml.safe_load((STUDY / "small.yaml").read_text())
    config |= {
        "images": 8,
        "batch": 4,
        "seeds": [0, 1],
        "evaluate": {"clean": 12, "attacks": 4, "autoattack": 2, "norms": 2},
    }
    config["model"] |= {"num_hidden_layers": 2}  # of the builtin's six
    names = ("baseline", "Specformer 1e-2", "JaSMin k=10, 5e-3, max", "lipbound_block 5e-3")
    config["methods"] = [method for method in config["methods"] if method["name"] in names]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    out, options = tmp_path / "out", ["--data", tmp_path, "--out", tmp_path / "out", "--keep"]
    command = [sys.executable, STUDY / "study.py", tmp_path / "config.yaml", *options]
    subprocess.run(list(map(str, command)), check=True, timeout=300)
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    assert all(len(row["network_norm"]) == 2 and min(row["network_norm"]) > 0 for row in rows)
    table, caption = ((out / name).read_text() for name in ("table.md", "yudin-4.txt"))
    assert table.count("\n") == 6
    medians = [np.median(row["network_norm"]) for row in rows if row["method"] == "baseline"]
    assert f"| {np.mean(medians):.3g} ± {np.std(medians, ddof=1):.2g} |" in table
    assert f"is {np.mean(medians):.2f} for baseline;" in " ".join(caption.split())
    kept = sorted((out / "networks").iterdir())
    assert len(kept) == 8
    for folder in kept:
        assert (folder / "model.safetensors").exists()
        assert "local Lipschitz constant" in (folder / "README.md").read_text()
