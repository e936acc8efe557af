"""The bounds of a listener, each reached over a real socket; and that nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os

import msgspec
import pytest

from kvd.types import Sent
from kvd.zmtp import frames
from kvd.zmtp.bounds import BOUNDS, TURN_MESSAGES
from kvd.zmtp.events import ConnectionFault
from kvd.zmtp.frames import COMMAND, LONG, MORE
from tests.zmtp.inn import GREETING, Inn, on_uvloop, ready, until

NEVER_S = 60.0


def bounds(**changes):
    return msgspec.structs.replace(BOUNDS, **changes)


@on_uvloop
async def test_whoever_says_nothing_is_hung_up_on_when_its_time_is_up():
    inn = Inn(bounds(handshake_s=0.2))
    silent, halfway = inn.raw(), await inn.raw().say(GREETING)

    assert await silent.is_hung_up_on()
    assert await halfway.is_hung_up_on()
    await until(lambda: inn.host.turned_away == [ConnectionFault.TOO_SLOW] * 2)
    assert len(inn.listener._connections) == 0


@on_uvloop
async def test_whoever_is_left_waiting_is_hung_up_on_sooner_and_others_keep_their_time():
    """Not at once, because it would come again at once; but it may be welcome when it does."""
    inn = Inn(bounds(handshake_s=NEVER_S, refused_s=0.1))
    slow = inn.raw()
    await until(lambda: inn.listener._coming)

    other = await inn.raw().say(frames.greeting(b"CURVE", as_server=False))

    assert await other.is_hung_up_on()
    assert inn.host.turned_away == [ConnectionFault.MECHANISM]
    await slow.say(ready())
    await until(lambda: inn.host.came == 1)


@on_uvloop
async def test_a_long_frame_before_the_handshake_costs_no_memory():
    """Its length is all that is read of it."""
    inn = Inn()
    raw = await inn.raw().say(GREETING + bytes((COMMAND | LONG,)) + (16 << 20).to_bytes(8, "big"))

    assert await raw.is_hung_up_on()
    await until(lambda: inn.host.turned_away == [ConnectionFault.TOO_LARGE])
    assert inn.listener.kept_bytes == 0


@on_uvloop
async def test_the_oldest_handshake_makes_place_for_the_next():
    inn = Inn(bounds(max_handshakes=10, handshake_s=NEVER_S))
    silent = [inn.raw() for _ in range(30)]
    await until(lambda: inn.host.turned_away == [ConnectionFault.CROWDED] * 20)

    await inn.guest()
    assert await silent[0].is_hung_up_on()
    assert len(inn.listener._connections) <= 11


@on_uvloop
async def test_whoever_is_silent_for_longest_makes_place_and_who_is_kept_stays():
    inn = Inn(bounds(max_connections=4))
    guests = [await inn.guest() for _ in range(4)]
    kept, spoke = inn.host.here[0], inn.host.here[1]
    inn.listener.keep(kept, "kept")
    await guests[1].say(b"\0\1a")
    await until(lambda: inn.host.got == [[b"a"]])

    await inn.guest()

    assert inn.host.went == [ConnectionFault.CROWDED]
    assert {kept, spoke} <= set(inn.host.here)
    assert await guests[2].is_hung_up_on()


@on_uvloop
async def test_nobody_is_let_in_where_all_places_are_kept():
    inn = Inn(bounds(max_connections=2))
    for _ in range(2):
        await inn.guest()
        inn.listener.keep(inn.host.here[-1], "kept")

    assert await inn.raw().is_hung_up_on()
    assert len(inn.host.here) == 2


@on_uvloop
async def test_a_message_that_does_not_end_in_time_ends_its_connection():
    inn = Inn(bounds(message_s=0.2))
    quiet, slow = await inn.guest(), await inn.guest()
    await slow.say(b"\1\1a\0\5b")

    assert await slow.is_hung_up_on()
    assert inn.host.went == [ConnectionFault.TOO_SLOW]
    await quiet.say(b"\0\1a")
    await until(lambda: inn.host.got == [[b"a"]])


@on_uvloop
async def test_the_time_of_a_message_begins_with_it():
    """A connection that is always within a message, but never for long, goes on."""
    inn = Inn(bounds(message_s=0.5))
    guest = await inn.guest()
    await guest.say(b"\0\1")
    for number in range(14):
        await asyncio.sleep(0.05)
        await guest.say(b"a\0\1")
        await until(lambda number=number: len(inn.host.got) == number + 1)
    assert inn.host.went == []


@on_uvloop
async def test_a_message_without_an_end_ends_its_connection():
    inn = Inn()
    guest = await inn.guest()
    await guest.say(b"\1\0" * 100)
    assert await guest.is_hung_up_on()
    assert inn.host.went == [ConnectionFault.TOO_MANY_FRAMES]


@on_uvloop
async def test_what_was_answered_before_a_fault_is_heard_before_the_hang_up():
    """However both came in one read."""
    inn = Inn()
    inn.host.answer = lambda connection, _: connection.send([b"answer"])
    guest = await inn.guest()

    await guest.say(b"\0\1a" * 3 + b"\1\0" * 5)

    heard = b""
    while chunk := await guest.hears():
        heard += chunk
    assert heard.endswith(b"\0\6answer" * 3)
    assert inn.host.went == [ConnectionFault.TOO_MANY_FRAMES]


@on_uvloop
async def test_whoever_makes_us_keep_most_goes_when_it_is_too_much_for_all():
    inn = Inn(bounds(max_message_bytes=100_000, key_bytes=300_000))
    guests = [await inn.guest() for _ in range(8)]
    for number, guest in enumerate(guests):
        size = 99_000 - 1000 * ((number * 3) % 8)
        await guest.say(frames.header(99_999, 0) + bytes(size))
    await until(lambda: inn.host.went)

    assert set(inn.host.went) == {ConnectionFault.TOO_HEAVY}
    assert inn.listener.kept_bytes <= 400_000
    assert inn.listener.kept_bytes == sum(one.weight for one in inn.host.here)
    await inn.listener.close()
    assert inn.listener.kept_bytes == 0


@on_uvloop
async def test_what_is_kept_is_given_back_when_it_is_whole_or_over():
    inn = Inn()
    guests = [await inn.guest() for _ in range(5)]
    for guest in guests:
        await guest.say(frames.header(5_000, MORE) + bytes(4_000))
    await until(lambda: inn.listener.kept_bytes == 5 * 4_009)
    for guest in guests[:3]:
        await guest.say(bytes(1_000) + b"\0\0")
    for guest in guests[3:]:
        guest.close()

    await until(lambda: inn.listener.kept_bytes == 0)
    assert [len(b"".join(one)) for one in inn.host.got] == [5_000] * 3


PING = frames.command(b"PING", b"\0\0" + bytes(16))


@on_uvloop
@pytest.mark.parametrize("begun", [b"\1\0", b"\1\1a", frames.header(9_000, MORE) + bytes(9_000)])
async def test_heartbeats_between_its_frames_give_a_message_no_more_time(begun):
    inn = Inn(bounds(message_s=0.5))
    guest = await inn.guest()
    await guest.say(begun)
    began_s = asyncio.get_running_loop().time()
    with contextlib.suppress(OSError):
        while not inn.host.went:
            await guest.say(PING)
            await asyncio.sleep(0.03)
            assert asyncio.get_running_loop().time() - began_s < 5
    assert inn.host.went == [ConnectionFault.TOO_SLOW]


@on_uvloop
async def test_heartbeats_between_messages_keep_nobody_within_one():
    inn = Inn(bounds(message_s=0.3))
    guest = await inn.guest()
    for _ in range(30):
        await guest.say(PING[:7])
        await asyncio.sleep(0.02)
        await guest.say(PING[7:])
    assert inn.host.went == []


@on_uvloop
async def test_no_step_of_a_handshake_gives_it_more_time():
    inn = Inn(bounds(handshake_s=0.5))
    slow = inn.raw()
    began_s = asyncio.get_running_loop().time()
    with contextlib.suppress(OSError):
        for byte in itertools.chain(GREETING, itertools.repeat(COMMAND)):
            if inn.host.turned_away:
                break
            await slow.say(bytes((byte,)))
            await asyncio.sleep(0.02)
    assert inn.host.turned_away == [ConnectionFault.TOO_SLOW]
    assert asyncio.get_running_loop().time() - began_s < 3


# ---- shares --------------------------------------------------------------------------------------

LONGEST = 100_000


def unfinished(size):
    """A message of the longest that lacks something, and ``size`` bytes of it."""
    return frames.header(LONGEST, 0) + bytes(size)


def shares(**changes):
    return bounds(
        **{"max_message_bytes": LONGEST, "key_bytes": 300_000, "total_bytes": 1_200_000} | changes
    )


@on_uvloop
async def test_strangers_cannot_end_the_message_of_one_who_is_known():
    """However many there are: they have one share for all of them together."""
    inn = Inn(shares())
    inn.host.knows = lambda connection: False
    honest = await inn.guest(b"session")
    inn.listener.keep(inn.host.here[0], "session 1")
    await honest.say(unfinished(99_000))
    for _ in range(30):
        await (await inn.guest()).say(unfinished(50_000))
    await until(lambda: len(inn.host.went) >= 24)
    assert inn.listener.kept_bytes < 300_000 + LONGEST

    await honest.say(bytes(1_000))

    await until(lambda: [len(one[0]) for one in inn.host.got] == [LONGEST])
    assert set(inn.host.went) == {ConnectionFault.TOO_HEAVY}
    assert inn.host.here[0].routing_id == b"session"


@on_uvloop
async def test_a_key_cannot_end_the_message_of_another():
    """One on a hundred connections, however light each is, and others with few."""
    inn = Inn(shares())
    honest = await inn.guest(b"honest")
    hostile = [await inn.guest() for _ in range(100)]
    for number, connection in enumerate(inn.host.here):
        inn.listener.keep(connection, "hostile" if number else "honest")
    await honest.say(unfinished(99_000))
    for guest in hostile:
        await guest.say(unfinished(9_000))
    await until(lambda: len(inn.host.went) >= 60)

    await honest.say(bytes(1_000))

    await until(lambda: [len(one[0]) for one in inn.host.got] == [LONGEST])
    assert inn.listener.kept_bytes <= 300_000


@on_uvloop
async def test_whose_session_is_over_is_a_stranger_again_and_makes_place():
    inn = Inn(shares(max_connections=3))
    inn.host.knows = lambda connection: False
    for _ in range(3):
        await inn.guest()
        inn.listener.keep(inn.host.here[-1], "session")
    inn.listener.let_go(inn.host.here[1])
    gone = inn.host.here[1]

    await inn.guest()

    assert inn.host.went == [ConnectionFault.CROWDED]
    assert gone.is_over


@on_uvloop
async def test_processes_of_one_host_are_told_apart(tmp_path):
    inn = Inn(shares(), path=str(tmp_path / "inn"))
    await inn.guest()
    assert inn.host.here[0].origin == f"pid {os.getpid()} of uid {os.getuid()}"


# ---- out -----------------------------------------------------------------------------------------


@on_uvloop
async def test_whoever_reads_nothing_is_full_and_is_not_hung_up_on():
    inn = Inn(bounds(backlog_messages=50))
    guest = await inn.guest()
    (connection,) = inn.host.here
    taken = 0
    while (sent := connection.send([b"x" * 100_000])) is Sent.TAKEN:
        taken += 1
        if taken % 10 == 0:
            await asyncio.sleep(0)
    assert sent is Sent.FULL
    assert taken >= 50
    assert inn.listener.kept_bytes >= 1_000_000, "what the kernel has not taken"

    heard = 0
    while heard < taken * 100_009:
        heard += len(await guest.hears())
    await until(lambda: inn.listener.kept_bytes == 0)
    assert connection.send([b"again"]) is Sent.TAKEN


@on_uvloop
async def test_the_backlog_has_a_limit_in_bytes_too():
    inn = Inn(bounds(backlog_bytes=2_000_000))
    await inn.guest()
    (connection,) = inn.host.here
    while connection.send([bytes(900_000)]) is Sent.TAKEN:
        pass
    assert connection.unsent_bytes <= 2_900_100


@on_uvloop
async def test_a_flood_of_heartbeats_whose_answers_nobody_reads_keeps_little():
    inn = Inn(bounds(backlog_messages=100, backlog_bytes=100_000))
    guest = await inn.guest()
    ping = frames.command(b"PING", b"\0\0" + bytes(16))
    (connection,) = inn.host.here
    flood = asyncio.create_task(guest.say(ping * 200_000))
    await until(lambda: connection.unsent_bytes > 2_000 or flood.done())
    await asyncio.wait_for(flood, 30)

    assert connection.unsent_bytes < 101_000


class Counted:
    """A socket, and how often it was written to."""

    def __init__(self, sock):
        self.sock = sock
        self.sends = 0

    def __getattr__(self, name):
        return getattr(self.sock, name)

    def send(self, data):
        self.sends += 1
        return self.sock.send(data)


@on_uvloop
async def test_what_many_cause_to_be_said_to_one_in_a_round_is_written_at_once():
    inn = Inn()
    guests = [await inn.guest() for _ in range(6)]
    one = inn.host.here[0]
    one._sock = counted = Counted(one._sock)
    inn.host.answer = lambda connection, message: one.send(message)
    await guests[0].hears()

    for guest in guests:
        guest.sock.send(b"\0\1a\0\1b")  # they are all readable when the loop comes round

    await until(lambda: len(inn.host.got) == 12)
    await until(lambda: one.unsent_bytes == 0)
    assert await guests[0].hears() == b"\0\1a\0\1b" * 6
    assert counted.sends == 1


@on_uvloop
async def test_what_is_sent_goes_to_the_connection_it_is_for_or_to_nobody():
    """The same routing id comes again; what was for the first is not for the second."""
    inn = Inn()
    first = await inn.guest(b"same")
    (gone,) = inn.host.here
    first.close()
    await until(lambda: inn.host.went == [ConnectionFault.HUNG_UP])
    second = await inn.guest(b"same")

    assert gone.send([b"secret"]) is Sent.GONE
    (here,) = inn.host.here
    here.send([b"yours"])
    heard = b""
    while b"yours" not in heard:
        heard += await second.hears()
    assert b"secret" not in heard


@on_uvloop
async def test_last_words_are_heard_before_the_hang_up():
    inn = Inn()
    guest = await inn.guest()
    (connection,) = inn.host.here
    connection.send([bytes(500_000)])
    await guest.say(b"\0\1a" * 1000)  # unread: would turn the end into a reset
    closing = asyncio.create_task(inn.listener.close(linger_s=5.0))
    heard = b""
    while chunk := await guest.hears():
        heard += chunk
    assert len(heard) > 500_000
    guest.close()
    await closing


@on_uvloop
async def test_closing_does_not_wait_longer_than_it_may():
    inn = Inn()
    await inn.guest()
    (connection,) = inn.host.here
    connection.send([bytes(20 << 20)])
    await asyncio.wait_for(inn.listener.close(linger_s=0.1), 5)
    assert connection.is_over


# ---- turns ---------------------------------------------------------------------------------------


@on_uvloop
async def test_others_have_their_turn_between_the_messages_of_one():
    inn = Inn()
    guest = await inn.guest()
    turns, loop = [], asyncio.get_running_loop()

    def look():
        turns.append(len(inn.host.got))
        if len(inn.host.got) < 2_000:
            loop.call_soon(look)

    loop.call_soon(look)
    await guest.say(b"\0\1a" * 2_000)
    await until(lambda: len(inn.host.got) == 2_000)

    steps = [after - before for before, after in itertools.pairwise(turns)]
    assert max(steps) <= 2 * TURN_MESSAGES


@on_uvloop
async def test_one_message_does_not_wait_for_the_floods_of_others():
    """Fifty connections that never stop: the one that asks once waits for a round, not for them."""
    inn = Inn()
    floods = [await inn.guest() for _ in range(50)]
    asker = await inn.guest()
    n_before = []

    def take(_, message):
        if message == [b"?"]:
            n_before.append(len(inn.host.got))

    inn.host.answer = take
    pouring = [asyncio.create_task(one.say(b"\0\1a" * 20_000)) for one in floods]
    await until(lambda: len(inn.host.got) > 5_000)
    asked_at = len(inn.host.got)
    await asker.say(b"\0\1?")
    await until(lambda: bool(n_before))

    assert n_before[0] - asked_at < 100_000, "the floods are a million"
    await inn.listener.close()
    await asyncio.gather(*pouring, return_exceptions=True)


@on_uvloop
async def test_reading_goes_on_when_whoever_takes_a_message_raises():
    inn, told = Inn(), []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: told.append(repr(context["exception"]))
    )
    guest = await inn.guest()

    def explode(connection, message):
        if len(inn.host.got) in {1, 40}:
            raise ValueError(len(inn.host.got))

    inn.host.answer = explode
    await guest.say(b"\0\1a" * 60)
    await until(lambda: len(inn.host.got) == 60)

    assert told == ["ValueError(1)", "ValueError(40)"]


@on_uvloop
async def test_who_is_not_welcome_hears_nothing():
    inn = Inn()
    inn.host.lets_in = False
    guest = await inn.raw().say(ready(b"taken"))
    heard = b""
    while chunk := await guest.hears():
        heard += chunk
    assert b"READY" not in heard
    assert inn.host.turned_away == [ConnectionFault.REFUSED]


@pytest.mark.parametrize("routing_id", [b"\0", bytes(5), b"\0\xf4\xb0\xdc\x51", bytes(255)])
def test_routing_ids_that_begin_with_zero_are_ids_like_any_other(routing_id):
    @on_uvloop
    async def run():
        inn = Inn()
        await inn.guest(routing_id)
        nameless = await inn.guest()
        assert [one.routing_id for one in inn.host.here] == [routing_id, b""]
        await nameless.say(b"\0\1a")
        await until(lambda: inn.host.got == [[b"a"]])

    run()
