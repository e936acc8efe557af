"""What an engine hears of the part of a handoff that its send is."""

from __future__ import annotations

import msgspec


class SentShare(msgspec.Struct, frozen=True, array_like=True):
    """What a send has to send: KV of tokens ``[start_tokens, end_tokens)``, all of it or a share.

    Sources with the same shards divide the pages: this is number ``rank`` of ``ranks`` of them. A
    dummy sends nothing, and concludes all the same. The aux of ``finish`` travels from the
    authoritative source alone.
    """

    rank: int
    ranks: int
    start_tokens: int
    end_tokens: int
    is_dummy: bool
    is_authoritative: bool
