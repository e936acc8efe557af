"""CURVE keys of daemons: the pair of this node, the public keys of its peers, and their files.

A key is 32 bytes, written as 40 characters of Z85. A key file holds one key as text and nothing
else, so that it can be read, compared and copied with ordinary tools; the public key follows from
the secret one. Both are as libzmq's, which is not loaded for it: a daemon needs nothing else of it.
What must not live here: sockets, and who may connect.
"""

from __future__ import annotations

import os
import stat
import struct
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SECRET_FILE: Final = "peer.secret"
PUBLIC_FILE: Final = "peer.public"

KEY_CHARS: Final = 40
MAX_FILE_BYTES: Final = 256
"""Of a key file: a key, white space, and nothing else."""

_DIGITS: Final = (
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
)
_VALUES: Final = {digit: value for value, digit in enumerate(_DIGITS)}
_WORD: Final = struct.Struct(">I")
_WORD_DIGITS: Final = 5


class KeyPair:
    """The two keys of one node. No Struct, because its ``repr`` would show the secret."""

    __slots__ = ("public", "secret")

    def __init__(self, public: str, secret: str) -> None:
        self.public = public
        self.secret = secret


class PeerKeys:
    """This node's own pair, and the public key of every node that it talks to, by node name."""

    __slots__ = ("of", "own")

    def __init__(self, own: KeyPair, of: Mapping[str, str]) -> None:
        self.own = own
        self.of = dict(of)


class KeyFlaw(msgspec.Struct, frozen=True):
    """Why a key or its file cannot be used, as the end of a sentence, and what to do about it."""

    rule: str
    fix: str


class KeyExists(Exception):
    """There is a key file already; the message names it."""


def is_key(text: str) -> bool:
    """Whether ``text`` is a key: 40 characters of Z85 that stand for 32 bytes."""
    try:
        return len(text) == KEY_CHARS and bool(raw(text))
    except (ValueError, KeyError, struct.error):
        return False


def raw(key: str) -> bytes:
    """The 32 bytes of a text that ``is_key``."""
    out = bytearray()
    for at in range(0, len(key), _WORD_DIGITS):
        word = 0
        for digit in key[at : at + _WORD_DIGITS]:
            word = word * len(_DIGITS) + _VALUES[digit]
        out += _WORD.pack(word)
    return bytes(out)


def _text_of(key: bytes) -> str:
    """The opposite of ``raw``."""
    digits = []
    for (word,) in _WORD.iter_unpack(key):
        rest = word
        for power in range(_WORD_DIGITS - 1, -1, -1):
            digit, rest = divmod(rest, len(_DIGITS) ** power)
            digits.append(_DIGITS[digit])
    return "".join(digits)


def pair_of(secret: str) -> KeyPair:
    """The pair of a secret key that ``is_key``."""
    from nacl import bindings  # noqa: PLC0415 - a configuration without keys is read without it

    return KeyPair(_text_of(bindings.crypto_scalarmult_base(raw(secret))), secret)


def new_pair() -> KeyPair:
    """A pair that nobody else has."""
    from nacl import bindings  # noqa: PLC0415 - as above

    public, secret = bindings.crypto_box_keypair()
    return KeyPair(_text_of(public), _text_of(secret))


def read_pair(path: Path | str) -> KeyPair | KeyFlaw:
    """The pair whose secret key is in ``path``, or why it is not taken; never shows the key."""
    try:
        # Without waiting, should it be a pipe; mode and content are of the same open file.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return KeyFlaw("does not exist", f"make it with: kvd keygen --out {os.path.dirname(path)}")
    except OSError as error:
        return KeyFlaw(f"cannot be read: {error.strerror}", "give it to the user that runs kvd")
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return KeyFlaw("is no file", "name the secret file that kvd keygen made")
        if _is_shared(found):
            mode = f"{stat.S_IMODE(found.st_mode):04o}"
            return KeyFlaw(f"has mode {mode}, so others can read the key", f"chmod 0600 {path}")
        text = os.read(descriptor, MAX_FILE_BYTES).decode("ascii", "replace").strip()
    finally:
        os.close(descriptor)
    if not is_key(text):
        return KeyFlaw(
            f"holds no key of {KEY_CHARS} characters of Z85 and nothing else",
            "name the secret file that kvd keygen made",
        )
    return pair_of(text)


def _is_shared(found: os.stat_result) -> bool:
    """Whether anyone but the owner and root can get at the key.

    Credentials that systemd passes to a service have mode 0440, group root, and an access list.
    """
    others = stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP
    if found.st_gid != 0:
        others |= stat.S_IRGRP
    return bool(found.st_mode & others)


def create_files(directory: Path, pair: KeyPair) -> None:
    """Write both files; what is there already stays.

    Raises:
        KeyExists: one of them is there.
        OSError: they cannot be written.
    """
    for name in (SECRET_FILE, PUBLIC_FILE):
        if os.path.lexists(directory / name):
            raise KeyExists(str(directory / name))
    _create(directory / SECRET_FILE, pair.secret, 0o600)
    _create(directory / PUBLIC_FILE, pair.public, 0o644)


def replace_files(directory: Path, pair: KeyPair) -> None:
    """Write both files in the place of those there are; a reader sees an old key or a new one.

    Raises:
        OSError: they cannot be written.
    """
    both = ((SECRET_FILE, pair.secret, 0o600), (PUBLIC_FILE, pair.public, 0o644))
    for name, key, mode in both:
        fresh = directory / f"{name}.new"
        fresh.unlink(missing_ok=True)
        _create(fresh, key, mode)
        fresh.replace(directory / name)


def _create(path: Path, key: str, mode: int) -> None:
    """A file that did not exist, with ``mode`` from its first moment, on disk when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        os.fchmod(descriptor, mode)
        file.write(f"{key}\n")
        file.flush()
        os.fsync(descriptor)
