"""A double of the CUDA runtime, and what is tested with it on hosts without a GPU.

``cudart.c`` is the double, ``double.py`` compiles it and has its hooks; ``nixl`` has a double of
NIXL that moves its memory between processes. ``tests/gpu/test_rules.py`` is what the double and a
real device must do alike: ``test_rules`` runs it here, ``python -m tests.gpu.run`` on a GPU.

What the double does where CUDA's documentation leaves it open, and no device has confirmed it yet.
Each is the stricter of the ways that are possible, so that what passes here is right on a device
that is more lenient; where a test runs on a real one, it is named:

==================================================  ============================================
what the double does                                where it is shown, and what else may be
==================================================  ============================================
a batch with an empty piece is refused (1)          ``test_a_batch_with_an_empty_piece_...``;
                                                    a device may take it
a piece over two registrations that touch is        ``test_a_range_over_two_registrations_...``;
refused (1); documented is half registered          a device may take it
memory that is not registered is refused (1) in     ``test_memory_that_is_not_registered_...``;
stream order, and never written by a batch          a device may stage it
a batch beyond its allocation poisons the process   ``test_a_batch_out_of_the_range_...``;
with 700 when it runs                               a device may refuse it (1)
one copy beyond its allocation is refused (1)       ``test_one_copy_out_of_the_range_...``;
                                                    a device may be poisoned
in any order, the source is read in the call        ``test_the_order_of_the_source_...``;
                                                    a device may read it at any time
a call by the other major's signature is refused    ``test_a_call_by_the_signature_...``;
                                                    a device may end the process
two registrations share no page (712)               ``test_memory_is_registered_once_...``
pieces of one batch that depend on one another are  not on a device: CUDA leaves undefined what
refused (1)                                         it does
freeing memory, unregistering it and closing that   tests of the double alone
of another process wait for the device
in a global capture, all that waits, allocates,     ``test_what_waits_or_allocates_...``, of some
registers or asks is refused (900)                  calls; a device may allow others
memory that one device registered is copied by      ``test_memory_that_one_device_...``, where
every other, if it was asked to be                  there are two devices
registering waits for no copy, and no copy for it   ``test_memory_is_registered_beside_...``;
                                                    a device may wait, either way
a thread that keeps out of captures may ask and     ``test_a_thread_that_keeps_out_of_...``; a
register memory during one                          device may refuse to register
a process that was forked has no CUDA (3)           tests of the double alone
a copy under way lands after its caller was killed  tests of the double alone; nobody has measured
and reaped, those behind it do not                  it
memory of a dead owner stays with its last opener   measured on an H100, driver 580
==================================================  ============================================

Confirmed by others' reports, not by us: a batch in a stream that captures is refused with 900, and
the capture goes on without it; an empty single copy succeeds.

Not doubled: kernels (``Double.kernels`` lets a process stand for them), graphs that are launched,
streams that join a capture by an event, streams per thread, managed memory, memory pools, peer
access that is refused, virtual memory (``cuMem*``), CUDA_VISIBLE_DEVICES, and the time that
anything takes.
"""
