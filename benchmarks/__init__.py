"""What proves the claims of the documentation: ``python -m benchmarks NAME [--json FILE]``.

What lives here: measurements of kvd beside a reference taken in the same run. What must not:
what an operator runs on hosts of their own (``kvd bench``), and anything that tests borrow
(``tests/support``). Read ``kvd.bench.report`` first, which runs and shows all of them, then
``harness``, which adds to their files where and when they were measured.
"""
