"""Which incarnations and generations a state still speaks of, and the same state with fewer names.

Incarnations and generations are only ever compared, so two states that differ by the numbers alone
behave alike. Once nothing speaks of an old one, the newer are renumbered without the gap: a daemon
that restarted with nothing on its hands is again the daemon it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.model.protocol import NOBODY, Kind, Message, Side

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.model.decode_side import DecodeSide
    from tests.model.prefill_side import PrefillSide


class Names(NamedTuple):
    """The numbers in use, ascending."""

    decodes: frozenset[int]
    prefills: frozenset[int]
    generations: frozenset[int]

    def joined(self, other: Names) -> Names:
        return Names(*(mine | theirs for mine, theirs in zip(self, other, strict=True)))

    def has_gaps(self) -> bool:
        return any(max(numbers, default=NOBODY) >= len(numbers) for numbers in self)


def in_sides(decode: DecodeSide, prefill: PrefillSide) -> Names:
    """What the two sides speak of."""
    born = {p.born for p in decode.parts} | {p.born for p in prefill.parts}
    named = {p.generation for p in decode.parts} | {p.generation for p in prefill.parts}
    return Names(
        frozenset({decode.incarnation, prefill.sees} | prefill.superseded | born) - {NOBODY},
        frozenset(
            {prefill.incarnation, decode.sees} | decode.superseded | {p.peer for p in decode.parts}
        )
        - {NOBODY},
        frozenset({decode.generation, prefill.sees_generation, *prefill.left} | named) - {NOBODY},
    )


def in_messages(messages: Iterable[Message]) -> Names:
    """What the messages in flight speak of."""
    decodes, prefills, generations = set(), set(), set()
    for message in messages:
        to_decode = message.to is Side.DECODE
        decodes.add(message.dst if to_decode else message.src)
        prefills.add(message.src if to_decode else message.dst)
        if names_generation(message):
            generations.add(message.word)
    return Names(
        frozenset(decodes) - {NOBODY}, frozenset(prefills) - {NOBODY}, frozenset(generations)
    )


def names_generation(message: Message) -> bool:
    return message.to is Side.PREFILL and message.kind in (Kind.HELLO, Kind.OFFER)


class Renaming:
    """Names to the lowest numbers that keep their order."""

    def __init__(self, names: Names) -> None:
        self.decodes, self.prefills, self.generations = (
            {NOBODY: NOBODY} | {name: rank for rank, name in enumerate(sorted(numbers))}
            for numbers in names
        )

    def decode(self, side: DecodeSide) -> DecodeSide:
        return side._replace(
            incarnation=self.decodes[side.incarnation],
            generation=self.generations[side.generation],
            sees=self.prefills[side.sees],
            superseded=frozenset(self.prefills[name] for name in side.superseded),
            parts=tuple(
                part._replace(
                    born=self.decodes[part.born],
                    peer=self.prefills[part.peer],
                    generation=self.generations[part.generation],
                )
                for part in side.parts
            ),
        )

    def prefill(self, side: PrefillSide) -> PrefillSide:
        return side._replace(
            incarnation=self.prefills[side.incarnation],
            sees=self.decodes[side.sees],
            superseded=frozenset(self.decodes[name] for name in side.superseded),
            sees_generation=self.generations[side.sees_generation],
            left=tuple(self.generations[left] for left in side.left),
            parts=tuple(
                part._replace(
                    born=self.decodes[part.born],
                    generation=self.generations[part.generation],
                )
                for part in side.parts
            ),
        )

    def message(self, message: Message) -> Message:
        to_decode = message.to is Side.DECODE
        src, dst = (self.prefills, self.decodes) if to_decode else (self.decodes, self.prefills)
        word = self.generations[message.word] if names_generation(message) else message.word
        return message._replace(src=src[message.src], dst=dst[message.dst], word=word)
