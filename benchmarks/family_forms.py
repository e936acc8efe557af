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
LAYERS: Final = FULL_LAYERS + SLIDING_LAYERS
HEAD_DIM: Final = 16
HEADS: Final = {
    "pool.heads": "1",
    "pool.head_dim": str(HEAD_DIM),
    "pool.layers": str(LAYERS),
}
INDEX_DIM: Final = 128
LATENTS: Final = {
    "pool.family": "mla",
    "pool.layers": "1",
    "pool.latent_dim": "512",
    "pool.rope_dim": "64",
}
"""One layer of DeepSeek-V3; its sparse successor has index keys beside it."""
LATENT: Final = (512 + 64) * BF16
STATES: Final = {
    "pool.family": "recurrent",
    "pool.state_layers": "4",
    "pool.state.ssm": "float32[64,64,128]",
    "pool.state.conv": "bfloat16[4352,3]",
}
"""Mamba-2 layers of 64 heads: what each remembers, and the last inputs of its convolution."""
STATE_BYTES: Final = 4 * (64 * 64 * 128 * FP32 + 4352 * 3 * BF16)


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
        return sum(part.held_bytes for part in self.parts if part.tier == tier)

    @property
    def sent_bytes(self) -> int:
        """Bytes of one handoff."""
        return sum(part.sent_bytes for part in self.parts)

    def admitted(self, work: FamilyWorkload) -> int:
        """Requests that fit: into the device's memory, and into the host's where any lies there."""
        sizes = {DEVICE: work.device_mib * MIB, HOST: work.host_mib * MIB}
        if self.counted_page_bytes:
            held = self.counted_page_bytes * self.parts[0].held_pages
            return (sizes[DEVICE] - self.counted_page_bytes) // held
        fits = []
        for tier, size in sizes.items():
            parts = [part for part in self.parts if part.tier == tier and part.page_bytes]
            if parts:
                null_bytes = sum(part.page_bytes for part in parts)
                fits.append((size - null_bytes) // sum(part.held_bytes for part in parts))
        return min(fits)

    def figures(self, work: FamilyWorkload) -> dict[str, float]:
        """Everything that arithmetic can tell beforehand; bytes sent are of one handoff."""
        admitted = self.admitted(work)
        told: dict[str, float] = {
            "components": len(self.parts),
            "requests admitted": admitted,
            "bytes sent": self.sent_bytes,
            "bytes received": self.sent_bytes,
            "bytes of a placeholder": self.counted_page_bytes,
            "pages still held at the end": 0,
            "broken invariants": 0,
        }
        for part in self.parts:
            told[f"pages of {part.name} held"] = part.held_pages
            told[f"bytes of {part.name} held"] = part.held_bytes
            told[f"pages of {part.name} by the daemon's count"] = admitted * part.held_pages
            if part.name == BUFFER:
                told["pages copied by a first fetch"] = part.held_pages
                told["hits of a second"] = part.held_pages
                told["bytes copied by both"] = part.held_bytes
        if self.name == SWA:
            page, window, chunk = work.page_tokens, work.window_tokens, work.chunk_tokens
            told["window pages of a prefill"] = window_pages(window, chunk, page)
            told["the same, computed at once"] = pages_of(work.prompt_tokens, page)
        return told


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
    return {form.name: form for form in (*_heads(work), *_latents(work), *_states(work))}


def _settings(work: FamilyWorkload) -> dict[str, str]:
    return {
        "pool.page_size": str(work.page_tokens),
        "pool.size": f"{work.device_mib}MiB",
        "pool.saved_size": "0KiB",
        "pool.typical_tokens": str(work.room_tokens),
        "pool.huge_pages": "off",  # collapsing would go on while the handoffs are timed
    }


def _head(layers: int, element_bytes: int) -> int:
    """K and V of a token, of one head."""
    return layers * 2 * HEAD_DIM * element_bytes


def _whole(work: FamilyWorkload, name: str, token_bytes: int, tier: str = DEVICE) -> ComponentForm:
    """A component with a slot for every token."""
    page = work.page_tokens
    return ComponentForm(
        name=name,
        page_bytes=page * token_bytes,
        held_pages=pages_of(work.room_tokens, page),
        sent_pages=pages_of(work.prompt_tokens, page),
        tier=tier,
    )


def _heads(work: FamilyWorkload) -> tuple[FamilyForm, ...]:
    settings, page = {**_settings(work), **HEADS}, work.page_tokens
    windows = ComponentForm(
        name="swa",
        page_bytes=page * _head(SLIDING_LAYERS, BF16),
        held_pages=window_pages(work.window_tokens, work.step_tokens, page),
        sent_pages=tail_pages(work.prompt_tokens, work.window_tokens, page),
    )
    sliding = {
        "pool.family": "swa",
        "pool.layers": str(FULL_LAYERS),
        "pool.window_layers": str(SLIDING_LAYERS),
        "pool.window_tokens": str(work.window_tokens),
    }
    scaled = {"pool.dtype": "float8_e4m3fn", "pool.scale_dtype": "float32"}
    counted = {
        "cache.mode": PREFILL_ONLY,
        "engine.workload": "embedding",
        "engine.attention": "varlen",
    }
    kv = _whole(work, "kv", _head(LAYERS, BF16))
    of_fp8 = _whole(work, "kv", _head(LAYERS, FP8))
    scales = _whole(work, "scale", LAYERS * 2 * FP32)
    of_one = _whole(work, "kv", _head(FULL_LAYERS, BF16))
    unwritten = msgspec.structs.replace(kv, page_bytes=0, sent_pages=0)
    return (
        FamilyForm(MHA, (kv,), settings),
        FamilyForm(QUANTISED, (of_fp8, scales), {**settings, **scaled}, beside=MHA),
        FamilyForm(SWA, (of_one, windows), {**settings, **sliding}, beside=MHA),
        FamilyForm(
            PREFILL_ONLY,
            (unwritten,),
            {name: value for name, value in settings.items() if name != "pool.saved_size"}
            | counted,
            counted_page_bytes=kv.page_bytes,
            beside=MHA,
        ),
    )


def _latents(work: FamilyWorkload) -> tuple[FamilyForm, ...]:
    settings = {**_settings(work), **LATENTS}
    indexed = {**settings, "pool.index_dim": f"{INDEX_DIM}", "pool.index_dtype": "float8_e4m3fn"}
    index = _whole(work, "index", INDEX_DIM * FP8)
    buffer = ComponentForm(
        name=BUFFER,
        page_bytes=work.page_tokens * LATENT,
        held_pages=pages_of(work.buffer_tokens, work.page_tokens),
        sent_pages=0,
    )
    on_host = {
        "pool.family": "hisparse",
        "pool.size": f"{work.host_mib}MiB",
        "pool.buffer_tokens": str(work.buffer_tokens),
    }
    return (
        FamilyForm(MLA, (_whole(work, "kv", LATENT),), settings),
        FamilyForm(INDEXED, (_whole(work, "kv", LATENT), index), indexed),
        FamilyForm(
            HISPARSE,
            (_whole(work, "kv", LATENT, HOST), index, buffer),
            {**indexed, **on_host},
            prefill=indexed,
            beside=INDEXED,
        ),
    )


def _states(work: FamilyWorkload) -> tuple[FamilyForm, ...]:
    settings = {**_settings(work), **STATES}
    state = ComponentForm(name="state", page_bytes=STATE_BYTES, held_pages=1, sent_pages=1)
    tokens = ComponentForm(name="kv", page_bytes=0, held_pages=work.room_tokens, sent_pages=0)
    attention = _whole(work, "kv", _head(FULL_LAYERS, BF16))
    hybrid = FamilyForm(HYBRID, (attention, state), {**settings, **HEADS})
    hybrid.settings["pool.layers"] = str(FULL_LAYERS)
    hybrid.settings["pool.states"] = str(hybrid.admitted(work) + 1)
    alone = {**settings, "pool.layers": "0", "pool.page_size": "1"}
    return hybrid, FamilyForm(RECURRENT, (tokens, state), alone)
