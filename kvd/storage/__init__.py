"""The storage process: writes pages of the pool to the tiers below it, and reads them back.

Ending a process is the only abort of storage that holds: a read that was begun writes into the pool
until it ends by itself or its process is reaped. So it is a process of its own, beside the transfer
process and over the same memory: handoffs go on when it is killed.

The map of this room. In the daemon::

    orders   what is ordered and what is reported; nearly all of it is declared in the core
    process  the daemon's handle, over ``kvd.transfer.process``
    sizes    how large an object is

In the storage process::

    worker   the loop: orders in, reports out; it never waits for a disk
    lane     writes in the order in which they came, and beside them reads and questions, on threads
    probing  how many of a prompt's objects a tier has, in few looks
    objects  what one object is: a head that says what it should be, and a page; what is wrong with
             one that is not as it says
    pages    where the bytes of a page lie in the pool
    backend  the seam: what a tier must be able to do, and nothing about how
    posix    a directory behind that seam; nixl_files moves its bytes, by NIXL's POSIX over libaio
    store    a store that speaks S3 behind it; nixl_objects moves its bytes, by NIXL's OBJ

What must not live here: which page is written, read or dropped, and when. The core decides.
"""
