"""Penalties in two processes, in half precision and in compiled models: the loss of one plain
step."""

import functools
import multiprocessing
import os
import socket
from pathlib import Path

import pytest
import torch
from support import trainers
from support.checks import close
from support.trainers import NO_DROPOUT, decoder, texts, trainer_of
from support.versions import newer_torch

PENALTIES = {**trainers.PENALTIES, "none": lambda: None}
STRENGTH = 0.5


def trained(name, folder, size=4, **options):
    """One step of gradient descent, with so many texts at a time: logs, weights, attention."""
    model = decoder(**NO_DROPOUT)
    own = model.config._attn_implementation
    trainer = trainer_of(model, folder, texts(), per_device_train_batch_size=size, **options)
    trainer.penalty, trainer.strength = PENALTIES[name](), 0.0 if name == "none" else STRENGTH
    trainer.train()
    assert model.config._attn_implementation == own
    (logged,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {name: logged.get(name) for name in ("loss", "task_loss", "penalty")} | {"w": weights}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The plain step with a penalty, which is trained once."""
    return functools.cache(lambda name: trained(name, str(tmp_path_factory.mktemp("plain"))))


def ranked(rank, port, folder):
    """What one of two processes does for every penalty; both keep what they found."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    found = {}
    for name in PENALTIES:
        for steps in (1, 2):
            options = {"ddp_backend": "gloo", "gradient_accumulation_steps": steps}
            found[name, steps] = trained(name, folder, 2 // steps, **options)
    torch.save(found, Path(folder) / f"rank-{rank}.pt")
    torch.distributed.destroy_process_group()


def compared(found, expected, rel):
    """Terms and weights of a step, against those of another."""
    for name in ("loss", "task_loss", "penalty"):
        if expected[name] is not None:
            assert found[name] == pytest.approx(expected[name], rel=rel), name
    close(found["w"], expected["w"], rel, rel)


@pytest.mark.slow
def test_two_processes(tmp_path, plain):
    """Two ranks of two texts each, together or one after the other: the step of one process on
    four."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=ranked, args=(rank, port, str(tmp_path))) for rank in (0, 1)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(300)
    assert [one.exitcode for one in ranks] == [0, 0]
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1))
    for (name, steps), mine in first.items():
        compared(second[name, steps], mine, 1e-9)
        compared(mine, plain(name), 1e-4)


COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
NEWER = newer_torch("2.6", "running a compiled model as it is written")


@pytest.mark.parametrize(
    ("options", "rel"),
    [pytest.param({"bf16": True}, 2e-2, id="half"), pytest.param(COMPILED, 1e-4, marks=NEWER)],
)
@pytest.mark.parametrize("name", PENALTIES)
def test_half_precision_and_compiled(name, options, rel, tmp_path, plain):
    """bfloat16 rounds what the model computes by 2^-8, and no penalty further."""
    compared(trained(name, str(tmp_path), **options), plain(name), rel)
