"""What the campaign and its engines say to each other: one JSON line each, over pipes."""

from __future__ import annotations

import enum

import msgspec

from tests.fault.prompts import Prompt

ENGINE_DIED = "engine-died"
"""Code of a job whose engine was killed: the campaign's own, kvd has nobody left to tell."""


class Unruly(enum.Enum):
    """What an engine does in the middle of a handoff that it should finish."""

    NO = ""
    CANCELS = "cancels"
    ABORTS = "aborts"
    NEVER_FINISHES = "never finishes"
    LEAVES = "leaves"
    """It closes its session and opens another."""
    TEARS = "tears"
    """It changes a page after it said that the page is written."""


class Job(msgspec.Struct, frozen=True, tag_field="kind"):
    """One side of a handoff, or a claim; ``id`` comes back in the report."""

    id: int


class Send(Job, frozen=True, tag="send"):
    """Lease, write, send: in ``steps`` advances, ``pause_s`` apart."""

    room: int
    prompt: Prompt
    deadline_s: float
    steps: int = 2
    pause_s: float = 0.002
    unruly: Unruly = Unruly.NO
    to: str | None = None


class Receive(Job, frozen=True, tag="receive"):
    """Receive, compare every page, add ``grow`` tokens, give everything back."""

    room: int
    prompt: Prompt
    source: str
    deadline_s: float
    grow: int = 0
    unruly: Unruly = Unruly.NO
    is_torn: bool = False
    """Whether the sender changes a page that it has said to be written."""


class Hoard(Job, frozen=True, tag="hoard"):
    """Hold nearly all pages of the pool that can be had for ``hold_s``."""

    hold_s: float


class Listen(Job, frozen=True, tag="listen"):
    """Subscribe to events for ``for_s``; the report counts them, gaps included."""

    for_s: float


class Burst(Job, frozen=True, tag="burst"):
    """Commit one prompt after the other, as fast as can be."""

    prompts: list[Prompt]


class Hold(Job, frozen=True, tag="hold"):
    """Hold a lease, half of it committed, until the daemon was restarted and ``hold_s`` more.

    All of its pages must then be what they were. Without a restart it ends after ``most_s``.
    """

    prompt: Prompt
    hold_s: float
    most_s: float


class Known(msgspec.Struct, frozen=True):
    """What may have been cached: a prompt, and ``grow`` tokens that room ``room`` added."""

    prompt: Prompt
    grow: int = 0
    room: int = 0


class Check(Job, frozen=True, tag="check"):
    """Compare every cached page of these; the report names the pages, and the prompts by place."""

    known: list[Known]


AnyJob = Send | Receive | Hoard | Listen | Burst | Hold | Check


class Report(msgspec.Struct, frozen=True):
    """How a job ended: ``code`` is empty when it did what it should, else kvd's own.

    ``began_s`` and ``ended_s`` are monotonic and the same clock in all processes of this host;
    ``wrong`` counts delivered or cached pages whose digest was not what it must be, among
    ``checked``. ``former``: leases of before a restart whose pages were looked at after it.
    ``pages`` were compared by ``Check``, of the prompts at ``places``. The first report, with id 0,
    says that the engine has a session.
    """

    id: int
    code: str
    message: str = ""
    began_s: float = 0.0
    ended_s: float = 0.0
    checked: int = 0
    wrong: int = 0
    events: int = 0
    lost_events: int = 0
    former: int = 0
    pages: list[int] = []
    places: list[int] = []


JOBS = msgspec.json.Decoder(AnyJob)
REPORTS = msgspec.json.Decoder(Report)
encode = msgspec.json.encode
