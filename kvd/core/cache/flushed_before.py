"""What had gone before its namespace was flushed: who misses it has lost nothing by its going.

Whatever goes is counted, in the pool as in a tier; a flush is known by the last number before it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from mypy_extensions import mypyc_attr

from kvd.core.cache.namespaces import names_of

MOST_NAMES: Final = 64
"""The last ones that were flushed."""


@mypyc_attr(allow_interpreted_subclasses=True)
class FlushedBefore:
    """The last number before each flush."""

    __slots__ = ("_of_all", "_upto", "last")

    def __init__(self) -> None:
        self._upto: OrderedDict[str, int] = OrderedDict()
        """By what was flushed; the last flush at the end."""
        self._of_all = 0
        self.last = 0
        """The last number before any flush."""

    def note(self, namespace: str | None, upto: int) -> None:
        """This one was flushed, or all.

        The name of a base means its members too. Whether anything of it was left makes no
        difference.
        """
        self.last = upto
        if namespace is None:
            self._of_all = upto
            return
        self._upto.pop(namespace, None)
        self._upto[namespace] = upto
        if len(self._upto) > MOST_NAMES:
            self._upto.popitem(last=False)

    def has(self, namespace: str, number: int) -> bool:
        """Whether what went with that number, of a namespace as the tree has it, would have gone.

        Its flush came since.
        """
        upto = max([self._upto.get(name, 0) for name in names_of(namespace)])
        return number <= max(self._of_all, upto)
