"""What each pool family should hold, send and admit, by arithmetic alone.

What lives here: one workload, the families on it, and the closed forms. What must not: anything of
``kvd.core`` or ``kvd.config`` that computes the same, because then nothing would be compared.

With a prompt of ``P`` tokens, an answer of ``A`` for which pages are reserved, pages of ``p``, a
window of ``W`` and ``s`` tokens between two slides::

    pages of every token    held ceil((P + A) / p)         sent ceil(P / p)
    window pages            held ceil((W + s) / p) + 1     sent ceil(P / p) - floor((P - 1 - W) / p)
    device buffer of B      held ceil(B / p)               sent 0
    state                   held 1                         sent 1
    requests in memory M    floor((M - null pages) / bytes held by one)
"""

from __future__ import annotations

from typing import Final

import msgspec

MIB: Final = 2**20
BF16, FP8, FP32 = 2, 1, 4
DEVICE, HOST = "device", "host"
BUFFER: Final = "buffer"

MHA: Final = "mha"
QUANTISED: Final = "mha fp8+scale"
SWA: Final = "swa"
MLA: Final = "mla"
INDEXED: Final = "mla+index"
HISPARSE: Final = "hisparse"
HYBRID: Final = "recurrent hybrid"
RECURRENT: Final = "recurrent"
PREFILL_ONLY: Final = "prefill-only"

GROUPS: Final = (
    (MHA, QUANTISED, SWA),
    (MLA, INDEXED, HISPARSE),
    (HYBRID, RECURRENT),
    (PREFILL_ONLY,),
)
"""Which families take turns with each other, so that what else the machine does falls on all."""

FULL_LAYERS, SLIDING_LAYERS = 1, 5
"""Gemma-3's pattern, once: five layers with a window for each that looks at everything."""
HEAD_DIM: Final = 16
LATENT_DIM, ROPE_DIM, INDEX_DIM = 512, 64, 128
"""One layer of DeepSeek-V3, and the index keys of its sparse successor."""
STATE_LAYERS: Final = 4
SSM: Final = (64, 64, 128)
CONV: Final = (4352, 3)
"""A Mamba-2 layer of 64 heads: what it remembers, and the last inputs of its convolution."""


class FamilyWorkload(msgspec.Struct, frozen=True):
    """One workload for all families. ``step_tokens`` and ``chunk_tokens``: between two slides."""

    prompt_tokens: int = 32_768
    answer_tokens: int = 256
    page_tokens: int = 16
    window_tokens: int = 1024
    step_tokens: int = 16
    chunk_tokens: int = 2048
    buffer_tokens: int = 2048
    device_mib: int = 160
    host_mib: int = 512
    repeats: int = 40

    @property
    def room_tokens(self) -> int:
        """Tokens of a request at its end."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def device_bytes(self) -> int:
        """The memory that every family has on the device."""
        return self.device_mib * MIB

    @property
    def host_bytes(self) -> int:
        """The host memory of a pool that keeps its KV there."""
        return self.host_mib * MIB


class ComponentForm(msgspec.Struct, frozen=True):
    """One component of one request: pages held at once on the decode side, and pages sent.

    ``page_bytes`` are of one page of all its layers.
    """

    name: str
    page_bytes: int
    held_pages: int
    sent_pages: int
    tier: str = DEVICE

    @property
    def held_bytes(self) -> int:
        """Of one request."""
        return self.held_pages * self.page_bytes

    @property
    def sent_bytes(self) -> int:
        """Of one handoff in which nothing was cached."""
        return self.sent_pages * self.page_bytes


class FamilyForm(msgspec.Struct, frozen=True):
    """One row: its settings on the decode side (and those that the prefill side has instead)."""

    name: str
    parts: tuple[ComponentForm, ...]
    settings: dict[str, str]
    prefill: dict[str, str] | None = None
    counted_page_bytes: int = 0
    """What a page would take, where pages are only counted."""
    beside: str = ""
    """The family that it is compared with."""

    def held_bytes(self, tier: str) -> int:
        """Bytes of one request in that memory."""
        return sum(one.held_bytes for one in self.parts if one.tier == tier)

    @property
    def sent_bytes(self) -> int:
        """Bytes of one handoff."""
        return sum(one.sent_bytes for one in self.parts)

    def admitted(self, workload: FamilyWorkload) -> int:
        """Requests that fit: into the device's memory, and into the host's where any lies there."""
        if self.counted_page_bytes:
            held = self.counted_page_bytes * self.parts[0].held_pages
            return (workload.device_bytes - self.counted_page_bytes) // held
        sizes = {DEVICE: workload.device_bytes, HOST: workload.host_bytes}
        fits = []
        for tier, size in sizes.items():
            parts = [one for one in self.parts if one.tier == tier and one.page_bytes]
            if parts:
                null_bytes = sum(one.page_bytes for one in parts)
                fits.append((size - null_bytes) // sum(one.held_bytes for one in parts))
        return min(fits)


def pages_of(tokens: int, page: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // page)


def window_pages(window: int, step: int, page: int) -> int:
    """Window pages held at once by who computes ``step`` tokens between two slides."""
    return pages_of(pages_of(max(window, page), page) * page + step, page) + 1


def tail_pages(prompt: int, window: int, page: int) -> int:
    """Window pages that a handoff sends, where the prompt will be cached."""
    return pages_of(prompt, page) - max(0, prompt - 1 - max(window, page)) // page


def families_of(work: FamilyWorkload) -> dict[str, FamilyForm]:
    """Every family on that workload, by name."""
    made = (
        *_heads(work),
        *_latents(work),
        *_states(work),
        FamilyForm(
            PREFILL_ONLY,
            (
                ComponentForm(
                    name="kv",
                    page_bytes=0,
                    held_pages=pages_of(work.room_tokens, work.page_tokens),
                    sent_pages=0,
                ),
            ),
            {
                **_heads_settings(work),
                "cache.mode": PREFILL_ONLY,
                "engine.workload": "embedding",
                "engine.attention": "varlen",
            },
            counted_page_bytes=_head_page(work, FULL_LAYERS + SLIDING_LAYERS, BF16),
            beside=MHA,
        ),
    )
    return {one.name: one for one in made}


def _whole(
    work: FamilyWorkload, page_bytes: int, *, name: str = "kv", tier: str = DEVICE, page: int = 0
) -> ComponentForm:
    """A component with a slot for every token."""
    size = page or work.page_tokens
    held, sent = pages_of(work.room_tokens, size), pages_of(work.prompt_tokens, size)
    return ComponentForm(
        name=name, page_bytes=page_bytes, held_pages=held, sent_pages=sent, tier=tier
    )


def _base(work: FamilyWorkload) -> dict[str, str]:
    return {
        "pool.page_size": str(work.page_tokens),
        "pool.size": f"{work.device_mib}MiB",
        "pool.typical_tokens": str(work.room_tokens),
        "pool.huge_pages": "off",  # collapsing would go on while the handoffs are timed
    }


def _unsaved(work: FamilyWorkload) -> dict[str, str]:
    return {**_base(work), "pool.saved_size": "0KiB"}


def _heads_settings(work: FamilyWorkload) -> dict[str, str]:
    layers = FULL_LAYERS + SLIDING_LAYERS
    heads = {"pool.heads": "1", "pool.head_dim": str(HEAD_DIM)}
    return {**_base(work), **heads, "pool.layers": str(layers)}


def _head_page(work: FamilyWorkload, layers: int, element_bytes: int) -> int:
    """A page of K and V of one head."""
    return layers * work.page_tokens * 2 * HEAD_DIM * element_bytes


def _heads(work: FamilyWorkload) -> tuple[FamilyForm, ...]:
    layers = FULL_LAYERS + SLIDING_LAYERS
    settings = {**_heads_settings(work), "pool.saved_size": "0KiB"}
    scale = layers * work.page_tokens * 2 * FP32
    window, page = work.window_tokens, work.page_tokens
    windows = ComponentForm(
        name="swa",
        page_bytes=_head_page(work, SLIDING_LAYERS, BF16),
        held_pages=window_pages(window, work.step_tokens, page),
        sent_pages=tail_pages(work.prompt_tokens, window, page),
    )
    return (
        FamilyForm(MHA, (_whole(work, _head_page(work, layers, BF16)),), settings),
        FamilyForm(
            QUANTISED,
            (_whole(work, _head_page(work, layers, FP8)), _whole(work, scale, name="scale")),
            {**settings, "pool.dtype": "float8_e4m3fn", "pool.scale_dtype": "float32"},
            beside=MHA,
        ),
        FamilyForm(
            SWA,
            (_whole(work, _head_page(work, FULL_LAYERS, BF16)), windows),
            {
                **settings,
                "pool.family": "swa",
                "pool.layers": str(FULL_LAYERS),
                "pool.window_layers": str(SLIDING_LAYERS),
                "pool.window_tokens": str(window),
            },
            beside=MHA,
        ),
    )


def _latents(work: FamilyWorkload) -> tuple[FamilyForm, ...]:
    page = work.page_tokens
    latent = page * (LATENT_DIM + ROPE_DIM) * BF16
    index = _whole(work, page * INDEX_DIM * FP8, name="index")
    settings = {
        **_unsaved(work),
        "pool.family": "mla",
        "pool.layers": "1",
        "pool.latent_dim": str(LATENT_DIM),
        "pool.rope_dim": str(ROPE_DIM),
    }
    indexed = {
        **settings,
        "pool.index_dim": str(INDEX_DIM),
        "pool.index_dtype": "float8_e4m3fn",
    }
    buffer = ComponentForm(
        name=BUFFER, page_bytes=latent, held_pages=pages_of(work.buffer_tokens, page), sent_pages=0
    )
    return (
        FamilyForm(MLA, (_whole(work, latent),), settings),
        FamilyForm(INDEXED, (_whole(work, latent), index), indexed),
        FamilyForm(
            HISPARSE,
            (_whole(work, latent, tier=HOST), index, buffer),
            {
                **indexed,
                "pool.family": "hisparse",
                "pool.size": f"{work.host_mib}MiB",
                "pool.buffer_tokens": str(work.buffer_tokens),
            },
            prefill=indexed,
            beside=INDEXED,
        ),
    )


def _states(work: FamilyWorkload) -> tuple[FamilyForm, ...]:
    ssm, conv = SSM[0] * SSM[1] * SSM[2] * FP32, CONV[0] * CONV[1] * BF16
    state = ComponentForm(
        name="state", page_bytes=STATE_LAYERS * (ssm + conv), held_pages=1, sent_pages=1
    )
    settings = {
        **_unsaved(work),
        "pool.family": "recurrent",
        "pool.state_layers": str(STATE_LAYERS),
        "pool.state.ssm": f"float32[{','.join(map(str, SSM))}]",
        "pool.state.conv": f"bfloat16[{','.join(map(str, CONV))}]",
    }
    alone = {name: value for name, value in settings.items() if name != "pool.page_size"}
    attention = _whole(work, _head_page(work, FULL_LAYERS, BF16))
    hybrid = FamilyForm(HYBRID, (attention, state), settings)
    heads = {"pool.heads": "1", "pool.head_dim": str(HEAD_DIM), "pool.layers": str(FULL_LAYERS)}
    return (
        FamilyForm(
            HYBRID,
            hybrid.parts,
            {**settings, **heads, "pool.states": str(hybrid.admitted(work) + 1)},
        ),
        FamilyForm(
            RECURRENT,
            (
                ComponentForm(name="kv", page_bytes=0, held_pages=work.room_tokens, sent_pages=0),
                state,
            ),
            {**alone, "pool.layers": "0"},
        ),
    )
