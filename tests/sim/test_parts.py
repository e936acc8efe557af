"""The parts of the simulator: time, contents of pages, the network."""

from __future__ import annotations

import random

import pytest

from kvd.core.layout.spec import fingerprint
from kvd.core.peers.compatibility import layout_match
from kvd.sim.agenda import START_S, Agenda
from kvd.sim.contents import Contents, WrittenPrompt
from kvd.sim.engine import EngineRows
from kvd.sim.host import SimHost
from kvd.sim.network import Network
from kvd.sim.pool import SimMemory, pool_of
from kvd.sim.profile import Profile
from kvd.sim.violation import Violated
from kvd.types import Tokens, pack_ids
from kvd.wire import client


def test_the_agenda_keeps_the_order_of_time_and_then_of_asking():
    agenda, called = Agenda(), []
    agenda.after(2.0, called.append, "late")
    agenda.after(1.0, called.append, "first")
    agenda.at(START_S + 1.0, called.append, "second")

    for _ in range(3):
        agenda.step()

    assert called == ["first", "second", "late"]
    assert agenda.now_s == START_S + 2.0


def test_the_content_of_a_page_depends_on_all_tokens_before_it():
    contents = Contents()
    ids = list(range(40))
    one = WrittenPrompt(contents, Tokens(pack_ids(ids)), "")
    other = WrittenPrompt(contents, Tokens(pack_ids([99, *ids[1:]])), "")
    elsewhere = WrittenPrompt(contents, Tokens(pack_ids(ids)), "lora")

    assert len(one.pages) == 3
    assert not {*one.pages} & {*other.pages}
    assert not {*one.pages} & {*elsewhere.pages}
    assert one.upto(32) == one.pages[:2]
    assert one.upto(20)[0] == one.pages[0]
    assert one.upto(20)[1] not in one.pages
    assert one.followed_by(Tokens(pack_ids([7]))).pages[:2] == one.pages[:2]


def host_of(family, name="d0", units=1):
    """As much of a simulated host as rows need."""
    profile = Profile(family=family, beside_pages=(20,))
    specs = (pool_of(profile, name, random.Random(seed)) for seed in range(20))
    spec = next(one for one in specs if one.components[0].page_size == 16 * units)
    contents = Contents()
    host = SimHost.__new__(SimHost)
    host.name, host.memory = name, SimMemory(spec, contents)
    return host, contents


def prompt_of(contents, n_tokens):
    return WrittenPrompt(contents, Tokens(pack_ids(range(n_tokens))), "")


def rows_of(host, pages, *beside):
    rows = EngineRows(host)
    packed = tuple(pack_ids(row) for row in beside)
    rows.take(client.Leased(1, 1, 0, pack_ids(pages), packed))
    return rows


@pytest.mark.parametrize("family", ["mha", "swa", "recurrent", "hisparse"])
def test_every_family_has_a_pool_and_peers_of_it_exchange_pages(family):
    profile = Profile(family=family, beside_pages=(20,))
    splits = set()
    for seed in range(20):
        prefill, decode = (pool_of(profile, name, random.Random(seed)) for name in ("p0", "d0"))
        assert prefill.family == family
        taking = layout_match(decode, fingerprint(prefill), "d0", "p0")
        giving = layout_match(prefill, fingerprint(decode), "p0", "d0")
        assert (taking.receiving, giving.sending) == (None, None), f"seed {seed}"
        splits.add(giving.split)

    assert splits == ({(), (2, 2)} if family == "hisparse" else {()})


def test_what_is_in_lockstep_is_written_and_checked_as_far_as_there_are_tokens():
    host, contents = host_of("hisparse", "p0")
    prompt = prompt_of(contents, 22)
    rows = rows_of(host, [5, 6])

    rows.write(prompt, 0, 22)
    index = host.memory.regions["index"]
    index[27] = 0  # tokens 28 to 32 of the prompt, which it does not have
    rows.check(prompt, 22, "all of it")
    index[25] = 0

    with pytest.raises(Violated, match="page 25 of index holds 0"):
        rows.check(prompt, 22, "all of it")


def test_a_large_page_is_several_units_and_its_companions_are_too():
    host, contents = host_of("hisparse", "p0", units=2)
    prompt = prompt_of(contents, 40)
    rows = rows_of(host, [5, 9])

    rows.write(prompt, 0, 40)
    rows.check(prompt, 40, "all of it")

    assert [host.memory.first[unit] for unit in (10, 11, 18, 19)] == [*prompt.pages, 0]
    assert rows.pages == [10, 11, 18, 19]
    assert sum(one > 0 for one in host.memory.regions["index"]) == 4 * 3


def test_an_engine_computes_as_far_as_windows_are_mapped_and_reads_what_is_behind():
    host, contents = host_of("swa")
    prompt = prompt_of(contents, 80)
    rows = rows_of(host, [1, 2, 3, 4, 5], [1, 2, 3, 4, 0])

    assert rows.reach_tokens == 64
    rows.write(prompt, 0, 64)
    rows.check(prompt, 64, "what is written")
    with pytest.raises(Violated, match="beyond its window pages"):
        rows.write(prompt, 64, 80)
    rows.change(client.PageTable(1, 5, b"", (pack_ids([0, 0, 3, 4, 1]),)))
    rows.write(prompt, 64, 80)
    rows.check(prompt, 80, "the rest")
    rows.change(client.PageTable(1, 5, b"", (pack_ids([0, 0, 0, 4, 1]),)))
    with pytest.raises(Violated, match="null page in the window of swa"):
        rows.check(prompt, 80, "a page of the window is gone")


def test_a_state_is_copied_before_it_is_written():
    host, contents = host_of("recurrent")
    prompt = prompt_of(contents, 48)
    first = rows_of(host, [1, 2], [0, 7])
    first.write(prompt, 0, 32)

    again = rows_of(host, [1, 2, 3], [7, 8])
    again.go_on(prompt, 32, "a cached prefix")
    again.write(prompt, 32, 48)

    state = host.memory.regions["state"]
    assert [state[7], state[8]] == [prompt.pages[1], prompt.pages[2]]
    state[8] = 0
    with pytest.raises(Violated, match="page 8 of state holds 0"):
        again.check(prompt, 48, "its own state")


class Ear:
    """A host, as the network sees it."""

    def __init__(self, name):
        self.name, self.life, self.links, self.heard = name, 1, {}, []

    def hear(self, life, link, message):
        self.heard.append((life, link, message))


def deliveries(profile, messages):
    agenda = Agenda()
    network = Network(agenda, random.Random(1), profile)
    dialer, listener = Ear("d"), Ear("p")
    network.connect(dialer, listener)
    for message in range(messages):
        network.send(dialer, "out:p", message)
    for _ in range(messages * 2):
        try:
            agenda.step()
        except IndexError:
            break
    return network, [message for _, _, message in listener.heard]


def test_messages_arrive_once_and_in_order_when_it_is_calm():
    network, heard = deliveries(Profile(), 100)

    assert heard == list(range(100))
    assert network.lost == 0


def test_messages_are_lost_repeated_and_overtaken_when_it_is_not():
    network, heard = deliveries(Profile(loss=0.2, repeats=0.2, delays=0.2), 1000)

    assert 150 < network.lost < 250
    assert 150 < len(heard) - len(set(heard)) < 250
    assert len(set(heard)) == 1000 - network.lost
    assert heard != sorted(heard)


def test_what_was_sent_to_a_connection_that_is_over_is_lost():
    agenda = Agenda()
    network = Network(agenda, random.Random(1), Profile())
    dialer, listener = Ear("d"), Ear("p")
    network.connect(dialer, listener)
    [old] = listener.links
    network.connect(dialer, listener)

    network.send(listener, old, "to nobody")

    assert network.lost == 1
    assert list(listener.links) != [old]
