"""One line of a story for everything that happens: messages, transitions, pages, answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core import effects, inputs
from kvd.types import count
from kvd.wire import client, events
from kvd.wire.peer import (
    Abort,
    Accept,
    Closed,
    Hello,
    Message,
    Offer,
    Ping,
    Progress,
    Reject,
    Settled,
)

if TYPE_CHECKING:
    from kvd.errors import Refusal


def message_line(message: Message) -> str | None:
    """What a message says; None for those that say nothing new."""
    match message:
        case Hello():
            return f"Hello: {message.node}, generation {message.generation}"
        case Offer():
            pages = count(message.grants[0].pages)
            return (
                f"Offer {message.handoff}: room {message.room}, tokens "
                f"[{message.decode_prefix_len}, {message.prompt_tokens}), {pages} pages"
            )
        case Abort():
            return f"Abort {message.handoff}: {message.reason}"
        case Accept():
            return f"Accept {message.handoff}"
        case Settled():
            aux = f", aux {message.aux.decode()!r}" if message.aux else ""
            doubt = ", bytes in doubt" if message.in_doubt else ""
            said = f"{message.outcome.value}{aux}{doubt}{_why(message.reason)}"
            return f"Settled {message.handoff}: {said}"
        case Closed():
            return f"Closed {message.handoff}: {message.outcome.value}{_why(message.reason)}"
        case Reject():
            return f"Reject: {message.refusal.message}"
        case Ping() | Progress():
            return None


def event_line(event: events.Event) -> str | None:
    """What a node did; None for what its messages and answers tell as well."""
    return _pages_line(event) or _peer_line(event)


def _pages_line(event: events.Event) -> str | None:
    match event:
        case events.LeaseOpened():
            return (
                f"lease {event.lease} opened for {event.reason}: {event.prefix_tokens} tokens "
                f"cached, {event.held_pages} pages held"
            )
        case events.LeaseCommitted():
            swapped = f", {event.duplicate_pages} swapped" if event.duplicate_pages else ""
            return f"lease {event.lease} cached to token {event.cached_tokens}{swapped}"
        case events.LeaseReleased():
            return f"lease {event.lease} over, {event.freed_pages} pages freed ({event.cause})"
        case events.Quarantined():
            pages = f"{event.pages} pages in quarantine"
            return f"lease {event.lease}: {pages}, {event.peer} may still write"
        case events.QuarantineEnded():
            return f"lease {event.lease}: quarantine of {event.pages} pages ends ({event.proof})"
        case events.Evicted():
            return f"{event.pages} cached pages evicted"
        case events.Waiting():
            return f"waits for {event.needed_pages} pages, {event.headroom_pages} obtainable"
        case _:
            return None


def _peer_line(event: events.Event) -> str | None:
    match event:
        case events.Moved():
            return f"room {event.room}: {event.before} -> {event.after} ({event.trigger})"
        case events.PeerSuspect():
            return f"{event.peer} is suspect: silent for {event.silent_s:.1f} s"
        case events.PeerLost():
            return f"{event.peer} is lost: silent for {event.silent_s:.1f} s"
        case events.PeerReplaced():
            return f"{event.peer} is a new process: the old one writes no more"
        case events.PeerUp():
            return f"{event.peer} is up"
        case events.AgentChanged():
            return f"agent towards {event.peer}: {event.state}"
        case events.SlowPath():
            return f"slow path to {event.peer}: {event.what}"
        case events.TransferStarted():
            return f"transfer process, generation {event.generation}"
        case _:
            return None


def answer_line(answer: client.Reply) -> str | None:
    """What an engine hears."""
    match answer:
        case client.Failed():
            return f"refused: {answer.refusal.code.value}: {answer.refusal.message}"
        case client.ReceiveFailed() | client.SendFailed():
            return f"failed: {answer.refusal.code.value}: {answer.refusal.message}"
        case client.Received():
            row = f"lease {answer.lease}, {count(answer.pages)} pages"
            return f"received: {row}, aux {answer.aux.decode()!r}"
        case client.Finished():
            end = "committed" if answer.failure is None else answer.failure.code.value
            return f"finished: {end}, {answer.sent_pages} pages, {answer.sent_bytes} bytes sent"
        case client.Accepted():
            return f"accepted: decode_prefix_len {answer.decode_prefix_len}"
        case _:
            return None


def input_line(happened: inputs.Input, name: str) -> str | None:
    """What came in, if it is worth a line."""
    match happened:
        case inputs.FromPeer(link=link, message=message):
            line = message_line(message)
            return line and f"{link.partition(':')[2]} -> {name}  {line}"
        case inputs.PostDone():
            return f"{name}  a post is done, {happened.moved_bytes} bytes"
        case inputs.PostFailed():
            return f"{name}  a post failed: {happened.why}"
        case inputs.Unposted():
            return f"{name}  a post never began: {happened.why}"
        case inputs.TransferGone():
            return f"{name}  transfer process reaped: {happened.why}"
        case inputs.Awaiting():
            return f"{name}  not quiet before {', '.join(happened.streams)} has ended or is claimed"
        case inputs.Quiet():
            return f"{name}  quiet: nothing can land late"
        case _:
            return None


def effect_line(effect: effects.Effect) -> str | None:
    """What is carried out; messages are told when they arrive."""
    match effect:
        case effects.AnswerEngine(message=message):
            line = answer_line(message)
            return line and f"engine hears: {line}"
        case effects.Post():
            return f"posts {count(effect.source)} pages"
        case _:
            return None


def _why(refusal: Refusal | None) -> str:
    return f" ({refusal.message})" if refusal else ""
