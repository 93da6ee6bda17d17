"""Completions of options in the shell (`lipbound --install-completion`).

Names are written out here, so that nothing of size is imported.
"""

from collections.abc import Callable, Sequence

from lipbound.schema import CHOICES, NORMS

BOUNDS = (
    "kim",
    "dasoulas",
    "castin",
    "castin_bias",
    "castin_c3",
    "castin_c3_as_coded",
    "castin_mean_field",
    "specformer",
    "yudin",
    "yudin_g1",
    "yudin_nobias",
    "yudin_sqrt_n",
    "yudin_closed",
    "lipbound",
    "lipbound_block",
    "newhouse",
    "lipbound_every",
    "lipbound_every_block",
    "lipbound_one",
)
MAPS = ("head", "head_out", "heads", "layer", "residual", "pre_norm", "post_norm")
RECIPES = (
    "castin-1",
    "castin-6",
    "castin-2",
    "castin-3",
    "which-map",
    "three-norms",
    "token-profile",
    "mass-splitting",
    "yudin-1",
    "yudin-2",
    "yudin-3",
    "yudin-6",
    "yudin-theorem-4",
    "yudin-multihead",
)
REDUCTIONS = ("mean", "geomean", "max", "median")
DEVICES = ("auto", "cpu", "cuda", "mps")
WEIGHTS = ("auto", "whole", "layers")


def one_of(*values: str) -> Callable[[str], list[str]]:
    """Complete to one of some values."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


def some_of(*values: str, alone: Sequence[str] = ()) -> Callable[[str], list[str]]:
    """Complete the last of several values with commas; those in ``alone`` stand for themselves."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        given = before.split(",")
        offered = [value for value in values if value not in given] if comma else [*alone, *values]
        return [before + comma + value for value in offered if value.startswith(last)]

    return complete


COMPLETERS = {
    "bounds": some_of(*BOUNDS, alone=("default", "all", "none")),
    "map": one_of(*MAPS),
    "norm": one_of(*NORMS),
    "dtype": one_of(*CHOICES["dtype"]),
    "device": one_of(*DEVICES),
    "weights": one_of(*WEIGHTS),
    "reduce": one_of(*REDUCTIONS),
    "scale": one_of("rows", "shared", "panel"),
    "values": one_of("ratio", "value"),
}
"""Completers of the options of all commands, by names of arguments."""


def models(incomplete: str) -> Sequence[tuple[str, str]]:
    """Complete builtin checkpoints, with what they are; the shell itself completes folders."""
    from lipbound.models.sources.catalogue import BUILTINS, PREFIX, describe

    return [
        (PREFIX + name, describe(name).title)
        for name in BUILTINS
        if (PREFIX + name).startswith(incomplete)
    ]
