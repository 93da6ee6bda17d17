"""What the shell offers behind some options; `lipbound --install-completion` sets it up. Nothing of size is imported."""

from collections.abc import Callable, Sequence


def one_of(*values: str) -> Callable[[str], list[str]]:
    """Completes to one of these."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


def models(incomplete: str) -> Sequence[tuple[str, str]]:
    """Builtin checkpoints, with what they are; the shell itself completes folders."""
    from lipbound.models.sources.catalogue import BUILTINS, PREFIX, describe

    return [(PREFIX + name, describe(name).title) for name in BUILTINS if (PREFIX + name).startswith(incomplete)]
