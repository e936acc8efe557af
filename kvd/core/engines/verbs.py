"""What the verbs of every room of requests read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.errors import Code, Refusal

if TYPE_CHECKING:
    from kvd.core.node_parts import NodeParts


@mypyc_attr(allow_interpreted_subclasses=True)
class Verbs:
    """Requests of engines: whose a thing is, and where the answer goes."""

    def __init__(self, node: NodeParts) -> None:
        self._leases = node.leases
        self._owners = node.owners
        self._sessions = node.sessions
        self._decoder = node.decoder
        self._prefiller = node.prefiller
        self._sends = node.sends
        self._drainer = node.drainer
        self._out = node.out
        self._name = node.settings.name

    def _wrong(self, what: str) -> Refusal:
        return Refusal(Code.BAD_REQUEST, what, side=self._name)
