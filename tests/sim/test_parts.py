"""The parts of the simulator: time, contents of pages, the network."""

from __future__ import annotations

import random

from kvd.sim.agenda import START_S, Agenda
from kvd.sim.contents import Contents, Prompt
from kvd.sim.network import Network
from kvd.sim.profile import Profile
from kvd.types import Tokens, pack_ids


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
    one = Prompt(contents, Tokens(pack_ids(ids)), "")
    other = Prompt(contents, Tokens(pack_ids([99, *ids[1:]])), "")
    elsewhere = Prompt(contents, Tokens(pack_ids(ids)), "lora")

    assert len(one.pages) == 3
    assert not {*one.pages} & {*other.pages}
    assert not {*one.pages} & {*elsewhere.pages}
    assert one.upto(32) == one.pages[:2]
    assert one.upto(20)[0] == one.pages[0]
    assert one.upto(20)[1] not in one.pages
    assert one.followed_by(Tokens(pack_ids([7]))).pages[:2] == one.pages[:2]


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
