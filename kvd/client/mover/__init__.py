"""An engine's own KV memory and the pool's pages, and the copies between the two.

An engine that keeps its KV cache in tensors of its own gives them once, and then orders: these
blocks into those pages, or back. It never waits: a thread of this process does the rest.

What lives here: what an engine's blocks are (``EngineBlocks``), the bytes of a block and of a page
(``PieceTable``), one order (``PendingCopy``), the thread that sees it through (``Mover``), what
that sleeps on (``Bell``), what the daemon is told of late marks (``LateMarks``), and who moves the
bytes: processors (``HostLane``), or the copy engine of a device (``DeviceLane``).

What must not: which blocks an engine copies, and when. CUDA is loaded for blocks that lie on a
device, and for nothing else; torch never.

Read in this order: ``blocks``, ``pending_copy``, ``mover``, ``host_lane``, ``pieces``.
"""
