"""What a run of the demo is told."""

from __future__ import annotations

import msgspec

from kvd.demo.conversation import Script, write_script
from kvd.demo.division import ALONE, Division
from kvd.demo.layout import PageCounts, PoolLayout, PoolPart
from kvd.demo.messages import CHUNK_TOKENS, StartEngine
from kvd.demo.models import ARCHITECTURES, ENCODERS, Architecture

MOST_TURNS = 100
"""More would outgrow the positions of the models."""

SPARE_PAGES = 64
"""Pages beyond what the script needs, the null page among them."""


class DemoSettings(msgspec.Struct, frozen=True):
    """The command line, typed."""

    model: str
    turns: int
    seed: int
    page_size: int | None
    order: str
    dtype: str
    prefill: Division = ALONE
    decode: Division = ALONE

    @property
    def architecture(self) -> Architecture:
        """The row of the registry."""
        return ENCODERS[self.model] if self.is_encoder else ARCHITECTURES[self.model]

    @property
    def is_encoder(self) -> bool:
        """Whether the model embeds texts and decodes nothing."""
        return self.model in ENCODERS

    def start(self, division: Division = ALONE) -> StartEngine:
        """What every engine is told first."""
        return StartEngine(model=self.model, seed=self.seed, dtype=self.dtype, division=division)

    @property
    def prefill_nodes(self) -> tuple[str, ...]:
        """The names of the prefill daemons."""
        return tuple(f"prefill-{number}" for number in range(self.prefill.daemons))

    @property
    def tolerance(self) -> float:
        """The largest difference of a logit that rounding explains."""
        return self.architecture.tolerance.of(self.dtype)

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
            page_size=self.pool.page_size,
            seed=self.seed,
            controls=len(self.pool.parts),
        )

    def pages(self, script: Script) -> PageCounts:
        """Pages that hold everything at once: what is cached and one prompt being worked on."""
        tokens = script.cached_tokens_at_most() + script.longest_prompt_tokens()
        ends = 2 * len(script.turns)
        rooms = len(script.turns) + len(script.controls)
        parts = self.pool.parts
        window = self.pool.most_window_pages(CHUNK_TOKENS) if PoolPart.WINDOW in parts else 0
        return PageCounts(
            kv=-(-tokens // self.pool.page_size) + ends + SPARE_PAGES,
            # What each room leaves in the cache, and what one prompt has mapped.
            window=(rooms + 1) * window + 1 if window else 0,
            state=rooms + 3 if PoolPart.STATE in parts else 0,
        )
