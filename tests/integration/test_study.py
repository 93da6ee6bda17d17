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

from lipbound.regularizers.penalties import SoundPenalty

STUDY = Path(__file__).parents[2] / "benchmarks" / "jasmin"


@pytest.mark.slow
def test_small_study(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for split, count in (("train", 16), ("test", 12)):
        pictures = [
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(count)
        ]
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        table = datasets.Dataset.from_dict(
            {"image": pictures, "label": [i % 10 for i in range(count)]}, features=features
        )
        table.to_parquet(str(tmp_path / f"{split}.parquet"))
    config = yaml.safe_load((STUDY / "small.yaml").read_text())
    config |= {
        "images": 8,
        "batch": 4,
        "seeds": [0, 1],
        "evaluate": {"clean": 12, "attacks": 4, "autoattack": 2, "norms": 2},
    }
    config["model"] |= {"num_hidden_layers": 2}  # of the builtin's six
    config["methods"] = [
        m
        for m in config["methods"]
        if m["name"]
        in ("baseline", "Specformer 1e-2", "JaSMin k=10, 5e-3, max", "lipbound_block 5e-3")
    ]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = [
        sys.executable,
        str(STUDY / "study.py"),
        str(tmp_path / "config.yaml"),
        "--data",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
        "--keep",
    ]
    subprocess.run(command, check=True, timeout=300)
    rows = [
        json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 8
    assert all(len(row["network_norm"]) == 2 and min(row["network_norm"]) > 0 for row in rows)
    assert (tmp_path / "out" / "table.md").read_text().count("\n") == 6
    kept = sorted((tmp_path / "out" / "networks").iterdir())
    assert len(kept) == 8
    assert all(
        (folder / "model.safetensors").exists()
        and "local Lipschitz constant" in (folder / "README.md").read_text()
        for folder in kept
    )
    assert (tmp_path / "out" / "network_constant.png").stat().st_size > 1000
    assert (tmp_path / "out" / "softmax_norm.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["search", "small", "cifar10", "cifar100"])
def test_configurations_are_complete(name: str) -> None:
    config = yaml.safe_load((STUDY / f"{name}.yaml").read_text())
    methods = config["methods"]
    assert methods[0] == {"name": "baseline"}
    assert len({method["name"] for method in methods}) == len(methods)
    for method in methods[1:]:
        if method["penalty"] == "specformer":
            assert len(method["strengths"]) == 3
            assert all(isinstance(s, int | float) for s in method["strengths"])
        elif method["penalty"] == "sound":
            assert method["bound"] in SoundPenalty.NAMES
            assert isinstance(method["strength"], float)
        elif method["penalty"] == "exact":
            assert isinstance(method["strength"], float)
        else:
            assert method["penalty"] == "jasmin"
            assert isinstance(method["strength"], float)
            assert method["reduce"] in ("max", "mean")
    if name.startswith("cifar"):  # the paper's grid
        assert len(methods) == 1 + 9 + 18
