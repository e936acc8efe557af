"""The leaves of a pool's layout by dotted path, for a difference to be said in words."""

from __future__ import annotations

_MAX_DEPTH = 8
"""Our own layouts nest four deep; below this a stranger's is shown as one value."""


def owner(key: str) -> str:
    """``components.1`` of ``components.1.layers``, or of itself."""
    return ".".join(key.split(".", 2)[:2])


def named(leaves: dict[str, str]) -> set[str]:
    """The components that have a name: where only one side has one, that name says enough."""
    return {owner(key) for key in leaves if key.endswith(".name") and key.count(".") == 2}


MAX_LEAVES = 2048
"""Of a stranger's: our own have some ten for each component."""


_TOP = {"0": "order", "1": "components"}


def leaves_of(value: object) -> dict[str, str]:
    """Leaves of nested lists and maps by dotted path, each name and value cut to a line's part.

    A list or a map that would make it more than ``MAX_LEAVES`` is shown as one value.
    """
    leaves: dict[str, str] = {}
    stack: list[tuple[str, int, object]] = [("", 0, value)]
    while stack:
        path, depth, found = stack.pop()
        items: list[tuple[str, object]]
        room = MAX_LEAVES - len(leaves) - len(stack)
        if isinstance(found, dict) and depth < _MAX_DEPTH and len(found) <= room:
            items = list(found.items())
        elif isinstance(found, list) and depth < _MAX_DEPTH and len(found) <= room:
            items = [(str(index), item) for index, item in enumerate(found)]
        else:
            leaves[path] = _shown(found)
            continue
        for key, item in items:
            name = f"{path}.{key[:40]}" if depth else _TOP.get(key, key[:40])
            stack.append((name, depth + 1, item))
    return leaves


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return f"{type(value).__name__} of {len(value)}"
    return str(value)[:80]
