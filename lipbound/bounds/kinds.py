"""One formula for each kind of head: what replaces the plain one where there is a rotation, a cap, ..."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

T = TypeVar("T")


class ByKind(Generic[T]):
    """What to take for a layer with given `lipbound.attention.variants.VARIANTS`: entries from the narrowest to the widest.

    Args:
        plain: the entry for plain heads.
        covers: variants for which it holds as it is.

    >>> formulas = ByKind("plain")
    >>> formulas.extend("turned", ("rotation",))
    >>> sorted(formulas.covers)
    ['rotation']
    """

    def __init__(self, plain: T, covers: Collection[str] = ()):
        self.plain = plain
        self._entries = [(frozenset(covers), plain)]

    @property
    def covers(self) -> frozenset[str]:
        """The variants that some entry covers, alone or together."""
        return self._entries[-1][0]

    def extend(self, entry: T, covers: Collection[str]) -> None:
        """Take ``entry`` for layers that no earlier one covers.

        Raises:
            ValueError: unless it covers all that earlier ones do, and more.
        """
        if not self.covers < frozenset(covers):
            raise ValueError(f"an extension to {sorted(covers)} must cover more than {sorted(self.covers)}, which is covered already")
        self._entries.append((frozenset(covers), entry))

    def of(self, variants: frozenset[str]) -> T:
        """The first entry that covers these variants; where none does, the widest."""
        return next((entry for covers, entry in self._entries if variants <= covers), self._entries[-1][1])
