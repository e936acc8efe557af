"""The command palette: keys that mean something now, pages and themes, found by their words."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from textual.command import DiscoveryHit, Hit, Provider
from typing_extensions import override

from tui import keys
from tui.themes import THEMES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from textual.command import Hits


class Found(Provider):
    """Everything that can be done here and now, each under the words of the help."""

    def _all(self) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        # The palette is only ever opened by the console, whose module imports this one.
        from tui.app import KvdTui  # noqa: PLC0415

        app = self.app
        assert isinstance(app, KvdTui)
        for key in keys.here(app.page.NAME, app.has()):
            yield f"{key.help}  ({key.label})", partial(app.do, key.action)
        for theme in THEMES:
            yield f"theme {theme}", partial(app.do, f"theme {theme}")

    @override
    async def discover(self) -> Hits:
        for text, act in self._all():
            yield DiscoveryHit(text, act)

    @override
    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for text, act in self._all():
            score = matcher.match(text)
            if score > 0:
                yield Hit(score, matcher.highlight(text), act)
