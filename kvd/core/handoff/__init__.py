"""One prompt's KV moves from the node that computed it to the node that decodes it.

A handoff as it goes well, and who acts::

    decode side (receive)                          prefill side (send)

    engine: receive()                              engine: send(), advance(), finish()
    QUEUED     waits for room and sources          AWAIT_OFFER
      | admitted: pages held
    OFFERED    -- Offer(pages, prompt) ----------> STREAMING     posts: each page once it is whole
    RECEIVING  <---------------------- Accept --     | finish
      |        <==== KV, through the agent =====   FLUSHING      the last page, windows, state
      |        <--- Settled(aux, checksums) ------ SETTLED       "I never write for this again"
    VERIFYING  our transfer process compares         |
    READY      -- Closed(outcome) ---------------> CLOSED        finish() is answered
      | released
    CLOSED

and where it is given up: OFFERED or RECEIVING -> DRAINING with ``Abort``, the pages in quarantine;
STREAMING or FLUSHING -> DRAINING until no post is outstanding, then Settled.

Read in this order:

1. ``protocol``    ``DECODE`` and ``PREFILL``: every state, every edge; no row, no transition;
                   ``transitions`` takes a part along one, and tells
2. ``parts``       ``ReceiveAttempt``, ``ReceivePart``, ``SendPart``: what either side remembers;
                   ``open_receives`` by what those of the decode side are found
3. ``receive``     ``Decoder``: an edge of DECODE is a method, as ``_draining_to_closed``
4. ``send``        ``Prefiller``: the same for PREFILL; ``settled`` for what follows SETTLED
5. ``offered``     ``OfferReader``: an Offer's whole way in; ``offer`` has the checks of it
6. ``quarantine``  ``Quarantines``: which pages nobody gets, and what gives them back

Which pages are sent? ``payload`` (``Payload.grants``: which pages an Offer names, component by
component), ``posts`` (``plan_part``: what of them a part sends; ``push_part``: what goes now). With
several sources, ``sources`` says which of them has which share of the prompt.

What happens when a decode engine is killed in the middle? The daemon sees its last process go, and
``leases.sessions.hung_up`` ends what it has: ``receive.cancel_attempt``. The engine's parts drain
(``_drop_parts``), and the pages stay in ``quarantine`` until the last writer is over
(``_writer_over``). Others come to the same two: ``writer_gone`` (a new process over there),
``peer_lost`` (only silence), ``fenced`` (our transfer process). A prefill engine: ``send``,
``abandon_send``; its node's transfer process: ``transfers``.

How does a quarantined page become free? ``receive._writer_over`` once the writer is over, then
``quarantine.end_quarantine``: where bytes may still be under way it orders ``Quiesce`` and waits
for ``quiet``. By no timer: ``fence_if_due`` may replace our transfer process, which is the proof.

Who asks for it? ``receive_requests`` and ``send_requests`` are the verbs of engines, ``kept`` those
of rooms that stay open, ``pull`` and ``pull_source`` the two sides of a receive without a room,
``retries`` calls that come again; what they open is in ``receive`` and ``send``.

The rest: ``offer`` writes and checks Offers, ``verify`` compares sums, ``outcomes`` answers a late
Settled, ``rooms`` says who has a room and ``served`` who has had it, ``transfers`` takes reports of
the transfer process, ``drain`` stops beginning anything new, ``message_sizes`` and ``refusals`` are
numbers and words.

What must not live here: what a page is (``layout``), who has it (``cache``, ``leases``), whether a
peer lives (``peers``); sockets, clocks and NIXL (``kvd.daemon``, ``kvd.transfer``).
"""
