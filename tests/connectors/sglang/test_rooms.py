"""What a handoff of SGLang's is made of, without SGLang: letters, metadata, keys, guards."""

from __future__ import annotations

import ctypes
import random
import threading
import time

import pytest

from kvd.client.mover.pending_copy import CopyState
from kvd.connectors.sglang.chains import PromptKeys, keys_of_prompt
from kvd.connectors.sglang.copy_guard import CopyGuard, GivenUp
from kvd.connectors.sglang.device_pool import MetadataRows
from kvd.connectors.sglang.options import handoff_options
from kvd.connectors.sglang.room_mail import (
    RoomHeard,
    RoomMail,
    RoomOpen,
    RoomOver,
    RoomWanted,
    frames_of,
    letter_of,
)
from tests.connectors.sglang.world import names_of

# ---- letters -------------------------------------------------------------------------------------


def over(room, why):
    return RoomOver(room, "", "h", 1, why)


def test_a_letter_is_read_as_it_was_written():
    letter = RoomOpen(room=7, life="ab", node="p")
    assert letter_of(frames_of(letter)) == letter


@pytest.mark.parametrize(
    "frames",
    [[], [b"KVD1"], [b"KVD1", b"\xff"], [b"KVD1", b"\x80"], [b"ABORT", b"7"], [b"x", b"", b"y"]],
)
def test_what_is_no_letter_is_none(frames):
    assert letter_of(frames) is None


def test_letters_that_were_spoilt_are_letters_or_none():
    """Bytes changed, cut and added: nothing is raised where letters are read."""
    letters = [
        RoomWanted(7, 7, "ab", "h", 1, "d", "ns", 3, True),
        RoomOpen(7, "ab", "p"),
        over(7, "why"),
        RoomHeard(7, "ab", True, "e"),
    ]
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    for _ in range(4000):
        frames = [bytearray(frame) for frame in frames_of(rng.choice(letters))]
        for _ in range(rng.randint(1, 4)):
            frame = rng.choice(frames)
            at = rng.randrange(len(frame) + 1)
            frame[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
        try:
            read = letter_of([bytes(frame) for frame in frames])
        except Exception as error:
            raise AssertionError(f"seed {seed}: {frames}") from error
        assert read is None or type(read) in {type(letter) for letter in letters}, f"seed {seed}"


def test_a_letter_waits_for_its_request():
    mail, read = RoomMail(60.0), []
    mail.came(over(1, "early"))
    assert mail.open(1, read.append)
    mail.came(over(1, "late"))
    assert [letter.why for letter in read] == ["early", "late"]


def test_a_letter_does_not_wait_for_ever():
    mail, read = RoomMail(0.0), []
    mail.came(over(1, "early"))
    assert mail.open(1, read.append)
    assert not read


def test_an_answer_is_kept_for_nobody():
    mail, read = RoomMail(60.0), []
    mail.came(over(1, "early"))
    mail.came(RoomHeard(1, "", True, "e"))
    mail.open(1, read.append)
    assert read == [over(1, "early")]


def test_a_room_has_one_request():
    mail, read = RoomMail(60.0), []
    assert mail.open(1, read.append)
    assert not mail.open(1, read.append)
    mail.close(1)
    assert mail.open(1, read.append)


def test_a_request_that_has_failed_still_answers():
    mail, read, new = RoomMail(60.0), [], []
    mail.open(1, read.append)
    mail.close(1, is_answered=True)
    mail.came(over(1, "who?"))
    assert len(read) == 1
    mail.open(1, new.append)
    mail.came(over(1, "you"))
    assert (len(read), len(new)) == (1, 1)


def test_letters_of_many_rooms_are_not_kept():
    mail = RoomMail(60.0)
    for room in range(1, 6000):
        mail.came(over(room, "early"))
    read = []
    mail.open(1, read.append)
    mail.open(5999, read.append)
    assert [letter.room for letter in read] == [5999]


# ---- rows ----------------------------------------------------------------------------------------


def rows_over(*buffers, sizes):
    pointers = [ctypes.addressof(buffer) for buffer in buffers]
    return MetadataRows(pointers, sizes)


def buffers_of(*sizes):
    return [ctypes.create_string_buffer(4 * size) for size in sizes]


def test_a_row_is_written_as_it_was_read():
    there, here = buffers_of(8, 3), buffers_of(8, 3)
    there[0][8:16] = b"abcdefgh"
    there[1][3:6] = b"xyz"
    told = rows_over(*there, sizes=[8, 3]).read(1)
    rows_over(*here, sizes=[8, 3]).write(2, told)
    assert here[0].raw == b"\0" * 16 + b"abcdefgh" + b"\0" * 8
    assert here[1].raw == b"\0" * 6 + b"xyz" + b"\0" * 3


@pytest.mark.parametrize("told", [b"", b"\xff", b"\x92\x90\xc4\x00", b"\x92\x91\x08\xc4\x01a"])
def test_other_rows_are_refused(told):
    here = buffers_of(8, 3)
    with pytest.raises(ValueError, match="metadata"):
        rows_over(*here, sizes=[8, 3]).write(0, told)
    assert not any(here[0].raw)


# ---- keys ----------------------------------------------------------------------------------------


def test_a_page_that_is_begun_is_known_by_its_tokens_and_those_before():
    names, more = names_of(3, 1), names_of(3, 2)
    begun = [
        keys_of_prompt(*told)[-1]
        for told in (
            (names, b"ab", b""),
            (names, b"abc", b""),
            (more, b"ab", b""),
            ([], b"ab", b""),
            ([], b"ab", b"salt"),
        )
    ]
    assert len(set(begun)) == 5
    assert keys_of_prompt(names, b"ab", b"")[:3] == keys_of_prompt(names, b"", b"")


def test_keys_of_a_prompt_that_is_not_shared_are_of_one_life():
    keys = keys_of_prompt(names_of(3, 1), b"", b"")
    shared, alone = PromptKeys(keys, True), PromptKeys(keys, False)
    assert shared.of_life("a") == shared.of_life("b") == keys
    assert alone.of_life("a") == alone.of_life("a")
    assert not set(alone.of_life("a")) & {*alone.of_life("b"), *keys}


# ---- copies --------------------------------------------------------------------------------------


class PlayedOrder:
    """A copy that ends when it is told to."""

    def __init__(self) -> None:
        self.state, self.is_cancelled = CopyState.MOVING, False
        self.ended = threading.Event()

    def safe(self) -> bool:
        return self.ended.is_set()

    def cancel(self) -> None:
        self.is_cancelled = True

    def result(self, within_s: float) -> None:
        self.ended.wait(within_s)


def test_pages_are_free_when_no_byte_moves():
    guard, order = CopyGuard(), PlayedOrder()
    guard.order(lambda: order)
    assert not guard.give_up()
    assert order.is_cancelled
    threading.Timer(0.1, order.ended.set).start()
    began_s = time.monotonic()
    guard.wait()
    assert time.monotonic() - began_s > 0.05
    assert guard.give_up()


def test_nothing_is_copied_behind_the_word():
    guard, made = CopyGuard(), []
    assert guard.give_up()
    with pytest.raises(GivenUp):
        guard.order(lambda: made.append("order"))
    with pytest.raises(GivenUp):
        guard.write(lambda: made.append("write"))
    assert not made


def test_a_copy_that_is_in_doubt_ends_the_process():
    guard, order = CopyGuard(), PlayedOrder()
    guard.order(lambda: order)
    order.state = CopyState.DOUBT
    with pytest.raises(RuntimeError, match="end this process"):
        guard.wait()


# ---- what a user says ----------------------------------------------------------------------------


def test_what_a_user_says():
    assert handoff_options({}).pool == "main"
    told = handoff_options({"KVD_SGLANG": '{"kvd.pool": "other", "kvd.weights": "w"}'})
    assert (told.pool, told.weights) == ("other", "w")
    for wrong, why in (("[", "no JSON"), ("[]", "no JSON"), ('{"kvd.pol": 1}', "kvd.pol")):
        with pytest.raises(ValueError, match=why):
            handoff_options({"KVD_SGLANG": wrong})
