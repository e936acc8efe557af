"""What came out of ``kvd demo --model embedding``, and whether it is what must come out.

The JSON form is the ``EmbeddingReport`` as it is.
"""

from __future__ import annotations

import statistics

import msgspec
from rich.table import Table

REFUSED = "not-supported"

LEGEND = (
    "without: leases count tokens, no KV; written: K and V of every layer also go to the pool's "
    "pages; ratio: texts per second without KV over those with it, and nothing else differs"
)


class Batch(msgspec.Struct, frozen=True):
    """One batch, both ways: leases, the model, releases; the faster of two times each."""

    texts: int
    tokens: int
    counted_ms: float
    written_ms: float
    max_difference: float

    @property
    def ratio(self) -> float:
        """How many times the throughput is that of the written pool."""
        return self.written_ms / self.counted_ms


class Memory(msgspec.Struct, frozen=True):
    """What the pools take, as the daemons say; ``pool_bytes_expected`` is worked out."""

    pages: int
    counted_pages: int
    pool_bytes: int
    pool_bytes_expected: int
    counted_pool_bytes: int
    placeholder_bytes: int
    pages_still_held: int


class EmbeddingReport(msgspec.Struct, frozen=True):
    """Everything; ``problems`` is empty when the demo shows what it must.

    The differences are between the first batch without KV and the same texts one by one with the
    attention of transformers; read back from the pool; and read back with a page zeroed, which must
    be noticed. ``refused``: the code with which a node without KV answers what needs some.
    ``throughput_ratio``: the median of the batches.
    """

    ok: bool
    problems: tuple[str, ...]
    weights: str
    torch: str
    transformers: str
    seed: int
    dtype: str
    tolerance: float
    batches: tuple[Batch, ...]
    alone_difference: float
    read_back_difference: float
    damaged_difference: float
    memory: Memory
    refused: dict[str, str]
    throughput_ratio: float
    seconds: float

    @property
    def max_difference(self) -> float:
        """Between the two ways, over all batches."""
        return max(batch.max_difference for batch in self.batches)

    def judged(self, found: tuple[str, ...]) -> EmbeddingReport:
        """The same with its problems."""
        return msgspec.structs.replace(self, ok=not found, problems=found)


def problems(report: EmbeddingReport) -> tuple[str, ...]:
    """Every way in which the demo failed to show what it must, in sentences."""
    tolerance = report.tolerance
    compared = {
        f"batch {number}, with KV written": batch.max_difference
        for number, batch in enumerate(report.batches, start=1)
    }
    compared["batch 1, text by text"] = report.alone_difference
    compared["batch 1, read back from the pool"] = report.read_back_difference
    found = [
        f"{what}: the embeddings differ by {difference:.3g}, more than {tolerance:.0e}"
        for what, difference in compared.items()
        if not difference <= tolerance
    ]
    if not report.damaged_difference > tolerance:
        found.append(
            "negative control: a page was zeroed, yet no embedding differs by more than "
            f"{report.damaged_difference:.1e}: equal embeddings would prove nothing"
        )
    found += [
        f"{verb} on a node without KV: {code}, it must be {REFUSED}"
        for verb, code in report.refused.items()
        if code != REFUSED
    ]
    return (*found, *_memory_problems(report.memory))


def _memory_problems(memory: Memory) -> list[str]:
    found: list[str] = []
    if memory.pool_bytes != memory.pool_bytes_expected:
        found.append(f"pool: {memory.pool_bytes} bytes, not {memory.pool_bytes_expected}")
    if memory.counted_pool_bytes:
        found.append(f"the pool without KV takes {memory.counted_pool_bytes} bytes, not 0")
    if memory.counted_pages != memory.pages:
        found.append(f"{memory.counted_pages} pages counted, {memory.pages} written")
    if not 0 < memory.placeholder_bytes * memory.pages == memory.pool_bytes:
        found.append(f"placeholder: {memory.placeholder_bytes} bytes are not one page of the pool")
    if memory.pages_still_held:
        found.append(f"{memory.pages_still_held} pages held although every lease was released")
    return found


def table_of(report: EmbeddingReport) -> Table:
    """The batches as a table for people."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("batch", "texts", "tokens", "without", "written", "ratio", "difference"):
        table.add_column(heading, justify="right")
    for number, batch in enumerate(report.batches, start=1):
        table.add_row(
            str(number),
            str(batch.texts),
            str(batch.tokens),
            f"{batch.counted_ms:.1f} ms",
            f"{batch.written_ms:.1f} ms",
            f"{batch.ratio:.2f}",
            f"{batch.max_difference:.0e}",
        )
    return table


def told(report: EmbeddingReport) -> list[str]:
    """What else was seen, a line each."""
    memory = report.memory
    low, _, high = statistics.quantiles([batch.ratio for batch in report.batches], n=4)
    return [
        f"throughput without KV: {report.throughput_ratio:.2f} times that with KV written, the "
        f"median of {len(report.batches)} batches; half of them from {low:.2f} to {high:.2f}",
        f"memory: a pool of {memory.pages} pages takes {_size(memory.pool_bytes)}; without KV "
        f"{memory.counted_pages} pages are counted in {memory.counted_pool_bytes} bytes; an "
        f"engine that must have tensors needs one page of them, {_size(memory.placeholder_bytes)}",
        f"embeddings of batch 1: text by text they differ by {report.alone_difference:.1e}, read "
        f"back from the pool by {report.read_back_difference:.1e}",
        f"refused without KV: {', '.join(report.refused)}",
        "negative control, a page zeroed before it is read back: the embeddings differ by "
        f"{report.damaged_difference:.2g}",
    ]


def verdict(report: EmbeddingReport) -> str:
    """One line: what was shown, or what was not."""
    if report.problems:
        more = len(report.problems) - 1
        rest = f" (and {more} more)" if more else ""
        return f"FAILED: {report.problems[0]}{rest}"
    memory = report.memory
    texts = sum(batch.texts for batch in report.batches)
    rate = statistics.median(batch.texts / batch.counted_ms * 1e3 for batch in report.batches)
    return (
        f"OK: embeddings of {texts} texts are the same with KV and without (largest difference "
        f"{report.max_difference:.0e}, {report.tolerance:.0e} allowed); "
        f"{_size(memory.pool_bytes - memory.placeholder_bytes)} saved of "
        f"{_size(memory.pool_bytes)}; {rate:.0f} texts/s, {report.throughput_ratio:.2f} times "
        f"those with KV written; {report.seconds:.0f} s"
    )


def _size(n_bytes: int) -> str:
    if n_bytes < 2**20:
        return f"{n_bytes / 2**10:.0f} KiB"
    return f"{n_bytes / 2**20:.1f} MiB"
