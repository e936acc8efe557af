"""Where the daemons of benchmarks and tests listen."""

from __future__ import annotations

from tests.support.daemons import free_port


def test_no_port_is_given_twice_although_the_kernel_names_it_again():
    """Of 2,000 ports that are let go at once, the kernel names some twice: birthdays of 28,232."""
    ports = [free_port() for _ in range(2000)]

    assert len(set(ports)) == 2000
