"""Two hosts on one, for tests: network namespaces joined by a cable, where root may make them."""

from __future__ import annotations

from kvd.harness.netns import (
    DEVICE,
    Namespace,
    NoNamespaces,
    ip,
    need_namespaces,
    two_namespaces,
    wait_until_up,
)

__all__ = [
    "DEVICE",
    "Namespace",
    "NoNamespaces",
    "ip",
    "need_namespaces",
    "two_namespaces",
    "wait_until_up",
]
