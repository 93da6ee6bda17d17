"""Memory and paths on other systems than this one; `make systems` finds what these lack."""

from functools import partial

import psutil
import pytest
import torch
from support.checks import refused

import lipbound as lb
from lipbound import devices


def test_memory_is_known_without_the_limits_of_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "LIMITS", ())
    known = psutil.virtual_memory().available
    assert devices.available(torch.device("cpu")) == pytest.approx(known, rel=0.5)


PATHS = (
    r"C:\models\bert",
    "C:/models/bert",
    r"D:\run.zarr",
    r"models\bert",
    r"\\server\share\bert",
    r"C:\data\my texts\pages",
)


def test_paths_of_windows_are_no_hub_ids_no_datasets_and_no_texts() -> None:
    checkpoint = lb.load_checkpoint("builtin:gpt2")
    for name in PATHS:
        none = "there is no directory ", "there is no file or folder "
        refused(partial(lb.load_checkpoint, name), none[0], error=lb.errors.CheckpointError)
        refused(partial(lb.prepare, checkpoint, name), none[1], name, error=lb.errors.InputsError)
    for text in ("a backslash \\ is no path", "so: is this", r"the sum of \alpha and \beta"):
        assert lb.prepare(checkpoint, text, max_length=64).description == f"the text {text!r}"
