"""What a sequence owns beside its first component: window pages, states, device buffers.

A pool's first component has one page for each page of tokens, and the tree is made of those. Each
further one that has page ids of its own is an object here, one class per extent of the
specification, with its page pool, what each lease has of it, and what lies at which node. Those in
lockstep with the first need none: their pages follow from its.

Nothing here decides who is admitted, and no lease is opened or ended here: ``kvd.core.leases``
calls each component at the moments at which it moves its own pages and locks.

Read first, in this order:

- ``component_pages.ComponentPages``: what every component can be asked, in the order of a lease,
  and what most of them answer; ``all_components`` asks each in turn;
- ``state.StatePages``: one page per request, the shortest of the three;
- ``windows.WindowPages``: sliding windows; ``tail`` is their arithmetic;
- ``device_buffer.Buffers``: copies on a device; ``residency`` says which page is in which slot.
"""
