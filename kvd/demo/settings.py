"""What a run of the demo is told."""

from __future__ import annotations

import msgspec

from kvd.demo.conversation import Script, write_script
from kvd.demo.models import ARCHITECTURES, Architecture, PoolLayout

MOST_TURNS = 100
"""More would outgrow the positions of the models."""

SPARE_PAGES = 64
"""Pages beyond what the script needs, the null page among them."""


class Settings(msgspec.Struct, frozen=True):
    """The command line, typed."""

    model: str
    turns: int
    seed: int
    page_size: int
    order: str
    dtype: str

    @property
    def architecture(self) -> Architecture:
        """The row of the registry."""
        return ARCHITECTURES[self.model]

    @property
    def pool(self) -> PoolLayout:
        """What both daemons' pools hold."""
        return self.architecture.pool_layout(
            dtype=self.dtype, page_size=self.page_size, order=self.order
        )

    def script(self) -> Script:
        """What will be said."""
        return write_script(
            turns=self.turns,
            vocabulary=self.architecture.shape.vocabulary,
            page_size=self.page_size,
            seed=self.seed,
        )

    def pages(self, script: Script) -> int:
        """Pages that hold everything at once: what is cached and one prompt being worked on."""
        tokens = script.cached_tokens_at_most() + script.longest_prompt_tokens()
        ends = 2 * len(script.turns)
        return -(-tokens // self.page_size) + ends + SPARE_PAGES
