"""What a page is: sizes, shapes and orders of bytes, without any page of any pool.

All of it is arithmetic on a specification: no state, no page id of a running node, no message.

Read first, in this order:

- ``spec.PoolSpec``: the components of a pool, what their pages hold, and how many there are;
- ``page_sizes``: which sizes of pages are right, and why; configuration, peers and kernels ask it;
- ``geometry``: where in memory the bytes of a page are;
- ``shards``: which part of a page each rank has, and how unequal ranks copy;
- ``seal``: which pages are summed, and how a sum is made.
"""
