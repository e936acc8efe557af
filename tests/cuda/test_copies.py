"""Pieces copied by the copy engine: what is refused before CUDA sees it, and how calls are cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvd.device import copies
from kvd.device.copies import CopyStream, KnownMemory, OutOfReach, Pieces, Stretch, merged
from kvd.device.cuda import CudaError
from kvd.device.cuda_library import load
from tests.cuda.double import compiled
from tests.gpu.face import LEGACY, NOT_READY, Face, address_of, shared

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE = 512
PAGES = 8192
SIZE = PAGES * PIECE


class Rig:
    """A device's memory and the host's, and a stream between them."""

    def __init__(self, runtime) -> None:
        self.runtime = runtime
        self.known = KnownMemory(runtime)
        self.device = runtime.allocate(0, SIZE)
        self.known.add(Stretch(self.device, SIZE, "cuda:0"))
        self.host = shared(SIZE)
        self.low = address_of(self.host)
        # In two registrations that touch: that is how a pool is registered bit by bit.
        for at in (0, SIZE // 2):
            self.known.register(self.low + at, SIZE // 2)
        self.stream = CopyStream(runtime, 0, self.known)

    def pieces(self, to: list[int] | np.ndarray, of: list[int] | np.ndarray) -> Pieces:
        """From pages of the host to pages of the device."""
        return Pieces(
            np.array(to, np.uint64) * np.uint64(PIECE) + np.uint64(self.device),
            np.array(of, np.uint64) * np.uint64(PIECE) + np.uint64(self.low),
            np.full(len(to), PIECE, np.uint64),
        )

    def there(self) -> np.ndarray:
        """The device's memory, page by page."""
        found = np.empty(SIZE, np.uint8)
        self.runtime.copy(address_of(found), self.device, SIZE)
        return found.reshape(PAGES, PIECE)

    def close(self) -> None:
        self.stream.close()
        for address in (self.low, self.low + SIZE // 2, self.device):
            self.known.forget(address)
        self.runtime.free(self.device)


@pytest.fixture(params=["12", "13", "before 12.8"])
def rig(request, double, tmp_path, monkeypatch) -> Iterator[Rig]:
    runtime = double.runtime
    if request.param == "13":
        monkeypatch.setenv("DOUBLE_VERSION", "13000")
        runtime = load(double.environment)
    elif request.param != "12":
        runtime = load(compiled(tmp_path, "WITHOUT_BATCH").environment)
    found = Rig(runtime)
    found.host[:] = np.random.default_rng(1).integers(1, 256, SIZE, np.uint8)
    yield found
    found.close()


def test_scattered_pieces_arrive_both_ways_and_nothing_else_changes(rig):
    to, of = np.random.default_rng(2).permutation(PAGES)[:5000].reshape(2, -1)
    before = rig.host.reshape(PAGES, PIECE).copy()

    calls = rig.stream.begin(rig.pieces(to, of))
    rig.stream.wait()

    assert rig.stream.is_over()
    found = rig.there()
    assert np.array_equal(found[to], before[of])
    assert not np.delete(found, to, 0).any()
    assert calls == (2 if rig.runtime.has_batches else 2500)
    rig.host[:] = 0
    onto, source, sizes = rig.pieces(to, of)
    rig.stream.begin(Pieces(source, onto, sizes))
    rig.stream.wait()
    back = rig.host.reshape(PAGES, PIECE)
    assert np.array_equal(back[of], before[of])
    assert not np.delete(back, of, 0).any()


@pytest.mark.parametrize("dtype", [np.uint64, np.int64])
def test_rows_of_a_table_are_copied_as_they_are(rig, dtype):
    """Columns that are views, with strides that CUDA does not know."""
    table = np.stack(rig.pieces([1, 9, 4], [7, 2, 5]), axis=1).astype(dtype)

    rig.stream.begin(Pieces(*table.T))
    rig.stream.wait()

    assert np.array_equal(rig.there()[[1, 9, 4]], rig.host.reshape(PAGES, PIECE)[[7, 2, 5]])


def test_what_goes_on_where_the_one_before_ends_is_one_piece(rig):
    to, source, sizes = rig.pieces([4, 5, 6, 9, 10, 1], [4, 5, 6, 9, 12, 1])

    found = merged(Pieces(to, source, sizes), rig.known)

    assert ((found.to - np.uint64(rig.device)) // np.uint64(PIECE)).tolist() == [4, 9, 10, 1]
    assert (found.sizes // np.uint64(PIECE)).tolist() == [3, 1, 1, 1]


def test_pieces_are_not_merged_over_two_registrations(rig):
    half = PAGES // 2
    pages = [half - 1, half]

    found = merged(rig.pieces(pages, pages), rig.known)
    rig.stream.begin(rig.pieces(pages, pages))
    rig.stream.wait()

    assert found.sizes.tolist() == [PIECE, PIECE]
    assert np.array_equal(rig.there()[pages], rig.host.reshape(PAGES, PIECE)[pages])


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda rig: (rig.device, rig.low, 0), "0 bytes to .*: an empty piece"),
        (lambda rig: (rig.device + SIZE - 8, rig.low, 16), "16 bytes to .* leave cuda:0 from"),
        (
            lambda rig: (rig.device, rig.low + SIZE // 2 - 8, 16),
            "from .* leave registered host mem",
        ),
        (lambda rig: (rig.device, rig.low - 8, 16), "from .* leave registered host memory"),
        (lambda rig: (rig.device, 4096, 16), "16 bytes from 0x1000 lie in no memory"),
        (lambda rig: (2**64 - 16, rig.low, 16), "to 0xfffffffffffffff0 lie in no memory"),
    ],
    ids=["empty", "beyond", "over two", "before", "unknown", "the last"],
)
def test_a_piece_that_cuda_may_not_have_is_refused_before_any_is_begun(rig, spoil, why):
    good = rig.pieces([0, 1], [3, 5])
    bad = [np.append(one, np.uint64(word)) for one, word in zip(good, spoil(rig), strict=True)]

    with pytest.raises(OutOfReach, match=f"piece 2: .*{why}|piece 2: {why}"):
        rig.stream.begin(Pieces(*bad))

    rig.stream.wait()
    assert not rig.there().any()


def test_nothing_to_copy_is_no_call(rig):
    assert rig.stream.begin(rig.pieces([], [])) == 0


def test_columns_of_different_lengths_are_no_pieces(rig):
    to, source, sizes = rig.pieces([0, 1], [0, 1])
    with pytest.raises(ValueError, match="columns of 2, 2, 1 rows"):
        rig.stream.begin(Pieces(to, source, sizes[:1]))


def test_known_memory_is_known_once(rig):
    with pytest.raises(ValueError, match="which is known already"):
        rig.known.add(Stretch(rig.device + SIZE - 1, 2, "more"))
    with pytest.raises(CudaError, match="cudaErrorHostMemoryAlreadyRegistered"):
        rig.known.register(rig.low, PIECE)
    rig.stream.begin(rig.pieces([0], [0]))
    rig.stream.wait()


def test_no_call_has_more_pieces_than_it_may(double, monkeypatch):
    rig = Rig(double.runtime)
    asked = []
    begin = rig.runtime.begin_copies
    monkeypatch.setattr(rig.runtime, "begin_copies", lambda *words: asked.append(begin(*words)))
    every_other = np.arange(0, PAGES, 2)

    calls = rig.stream.begin(rig.pieces(every_other, every_other[::-1]))
    rig.stream.wait()

    assert calls == len(asked) == -(-PAGES // 2 // copies.PIECES_PER_CALL)
    rig.close()


def test_a_refusal_names_the_piece_where_cuda_does(double):
    """What is known here and not there: memory that was unregistered behind our back."""
    rig = Rig(double.runtime)
    rig.runtime.unregister(rig.low + SIZE // 2)

    with pytest.raises(CudaError, match=r"2 pieces, of which number 1, 512 bytes from 0x"):
        rig.stream.begin(rig.pieces([0, 5], [0, PAGES - 1]))

    rig.runtime.register(rig.low + SIZE // 2, SIZE // 2)
    rig.close()


def test_a_device_that_breaks_is_told_when_it_is_asked(double):
    rig = Rig(double.runtime)
    double.break_next(100)
    try:
        rig.stream.begin(rig.pieces([0], [0]))
        with pytest.raises(CudaError, match="cudaErrorLaunchFailure"):
            rig.stream.wait()
        with pytest.raises(CudaError, match="cudaErrorLaunchFailure"):
            rig.stream.is_over()
    finally:
        double.poison(0)
    rig.close()


def test_a_source_is_read_when_its_stream_comes_to_it(double):
    """Not when the call was made: what was to write it may still be under way."""
    rig = Rig(double.runtime)
    held = rig.stream._stream
    double.hold(held)
    rig.host[:] = 1
    rig.stream.begin(rig.pieces([0], [0]))
    assert not rig.stream.is_over()
    rig.host[:] = 2
    double.release(held)
    rig.stream.wait()

    assert set(rig.there()[0].tolist()) == {2}
    rig.close()


def test_copies_do_not_wait_for_the_default_stream(double):
    """Which is everybody's: what an engine has given to it may take long."""
    rig = Rig(double.runtime)
    runtime = Face(str(double.path))
    with runtime.held(LEGACY):
        rig.stream.begin(rig.pieces([0], [0]))
        rig.stream.wait()
        assert runtime.call("cudaStreamQuery", LEGACY) == NOT_READY
    rig.close()
