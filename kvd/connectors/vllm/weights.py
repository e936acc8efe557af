"""What the weights of an engine are, by the files that they come from: of a model, of an adapter.

Equal digests must mean equal weights, on another host and after a restart too. What a file holds
is known by its content where that is cheap: small files are read, and blobs of the Hugging Face
cache have the hash of theirs for a name. Of larger ones pieces are read, and the time of their last
change counts too: a change of one number between two pieces would not be seen otherwise.

An engine has read its weights before anybody asks here. So nothing is known of files that have
changed since its process began: they may hold other weights than the engine has. Nothing here
knows vLLM.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec

from kvd.connectors.identity import DIGEST_CHARS, UnknownWeights, digest_of
from kvd.connectors.vllm.orders import AdapterWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

T = TypeVar("T")

FULL_BYTES: Final = 256 << 20
"""Files of so many bytes together are read in full: a fifth of a second."""

PIECES: Final = 16
"""Of a larger file so many pieces of ``PIECE_BYTES`` are read, at even distances, both ends too."""

PIECE_BYTES: Final = 64 << 10

MAX_FILES: Final = 4096
"""A directory of more is not that of one model."""

READ_BYTES: Final = 1 << 20

HUB_NAME: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""Blobs are named as git does, or where they are large by the SHA-256 of their content."""

IRRELEVANT: Final = re.compile(
    r"\..*|__pycache__|.*\.(md|lock|png|jpe?g|gif|svg|pdf)|(LICEN[CS]E|NOTICE)(\.txt)?"
    r"|(tokenizer|vocab)[\w-]*\.(json|txt|model)|special_tokens_map\.json|added_tokens\.json"
    r"|merges\.txt|chat_template\.(json|jinja)|generation_config\.json",
    re.IGNORECASE,
)
"""Files that are in such directories, and change no KV of given tokens. Others count."""

MAX_QUESTIONS: Final = 64
"""So many adapters are asked for at a time: behind a file system that hangs they only grow more."""

MAX_ADAPTER_NAME: Final = 16
"""Characters of an adapter's name in that of its namespace; its digest tells it from others."""

MAX_ADAPTERS: Final = 4096
"""Those of an engine that are remembered; further ones are not cached."""

NO_NUMBER: Final = 0
"""vLLM gives none below 1."""

NO_ROOM: Final = -1

UNLIKE: Final = ""
"""The stamp of files that changed while they were read, or between two times."""

MIXED: Final = "vLLM's own cache has KV of other weights by its name and path, of another number"

OTHERS_TOO: Final = (
    "adapter {} had another name or path too, or was loaded in place: which weights it has now "
    "cannot be known"
)

UNHEARD: Final = "this engine does not say when an adapter is loaded anew"


class WeightFiles(msgspec.Struct, frozen=True):
    """What is known of the files at one path, and by what: by their content, or by pieces of it."""

    digest: str
    by: str
    n_files: int
    n_bytes: int

    def in_words(self) -> str:
        """The digest, and what it is of."""
        return f"{self.digest} (by {self.by}, {self.n_files} files, {self.n_bytes / 1e6:.1f} MB)"


class _File(msgspec.Struct, frozen=True):
    name: str
    """Below the directory."""
    path: str
    n_bytes: int
    changed_ns: int
    inode_ns: int
    inode: tuple[int, int]
    """Its number, and that of its file system."""
    blob: str
    """Its name in the cache of the hub; empty: it is not from there."""

    @property
    def sha256(self) -> str:
        """Of its content, if its name says it."""
        return self.blob if len(self.blob) == 64 else ""


def weight_files(path: Path, *, since_ns: int, full_bytes: int = FULL_BYTES) -> WeightFiles:
    """What is known of the model or adapter at ``path``, a directory or one file.

    Args:
        path: of it.
        since_ns: when the engine that has read it began, as ``time.time_ns``.
        full_bytes: so many are read in full.

    Raises:
        UnknownWeights: they cannot be read, or have changed since.
    """
    try:
        files = _listed(path)
        _settled(path, files, since_ns)
        found = _digest(files, full_bytes)
        if _listed(path) != files:
            raise UnknownWeights(f"{path} changes while it is read")
    except OSError as error:
        raise UnknownWeights(f"{path} cannot be read: {error}") from None
    return found


def _digest(files: Sequence[_File], full_bytes: int) -> WeightFiles:
    n_read = sum(file.n_bytes for file in files if not file.sha256)
    is_full = n_read <= full_bytes
    total = hashlib.sha256()
    for file in files:
        if file.sha256 or is_full:
            known = file.sha256 or _sha256(file)
        else:
            known = f"{_pieces(file)} {file.changed_ns}"
        total.update(f"{file.name}\0{file.n_bytes}\0{known}\n".encode())
    n_bytes = sum(file.n_bytes for file in files)
    return WeightFiles(
        digest=total.hexdigest()[:DIGEST_CHARS],
        by="content" if is_full else "pieces and times",
        n_files=len(files),
        n_bytes=n_bytes,
    )


def _sha256(file: _File) -> str:
    found = hashlib.sha256()
    with open(file.path, "rb", buffering=0) as source:
        while data := source.read(READ_BYTES):
            found.update(data)
    return found.hexdigest()


def _pieces(file: _File) -> str:
    found = hashlib.sha256()
    last = max(0, file.n_bytes - PIECE_BYTES)
    with open(file.path, "rb", buffering=0) as source:
        # The first of a safetensors file is its header: names, types and shapes.
        found.update(source.read(READ_BYTES))
        for k in range(1, PIECES):
            source.seek(last * k // (PIECES - 1))
            found.update(source.read(PIECE_BYTES))
    return found.hexdigest()


# ---- which files -------------------------------------------------------------------------------


def _listed(path: Path) -> list[_File]:
    """Those that count, in the order of their names.

    Raises:
        UnknownWeights: there are none, or too many.
        OSError: as ``os.stat``.
    """
    found: list[_File] = []
    for file in _walk(str(path), ""):
        found.append(file)
        if len(found) > MAX_FILES:
            raise UnknownWeights(f"{path} has more than {MAX_FILES} files")
    if not found:
        raise UnknownWeights(f"{path} has no files")
    return sorted(found, key=lambda file: file.name)


def _walk(path: str, name: str) -> Iterator[_File]:
    here = os.stat(path)
    if not stat.S_ISDIR(here.st_mode):
        yield _File(
            name=name,
            path=path,
            n_bytes=here.st_size,
            changed_ns=here.st_mtime_ns,
            inode_ns=here.st_ctime_ns,
            inode=(here.st_dev, here.st_ino),
            blob=_blob(path),
        )
        return
    if name.count("/") > 8:  # a link that leads back
        raise UnknownWeights(f"{path} is too deep")
    for entry in os.listdir(path):
        if not IRRELEVANT.fullmatch(entry):
            yield from _walk(f"{path}/{entry}", f"{name}/{entry}" if name else entry)


def _blob(path: str) -> str:
    """The name that the hub's cache has given the content of this file; empty: it has not."""
    directory, name = os.path.split(os.path.realpath(path))
    is_blob = os.path.basename(directory) == "blobs" and HUB_NAME.fullmatch(name)
    return name if is_blob else ""


def _settled(path: Path, files: Sequence[_File], since_ns: int) -> None:
    """Nothing of it has changed since; names by content need not be looked at.

    Raises:
        UnknownWeights: something has.
    """
    plain = [file for file in files if not file.blob]
    if not plain:
        return
    newest = max(plain, key=lambda file: file.inode_ns)
    if newest.inode_ns > since_ns:
        raise UnknownWeights(
            f"{newest.path} has changed since this engine began, which may have read it before"
        )
    _in_place(path, since_ns)


def _in_place(path: Path, since_ns: int) -> None:
    """The way to it leads where it led: what was moved there since has older files.

    Raises:
        UnknownWeights: it does not.
    """
    for place in (path, *path.parents):
        here = os.lstat(place)
        if here.st_ctime_ns > since_ns and (place == path or stat.S_ISLNK(here.st_mode)):
            raise UnknownWeights(f"{place} has changed since this engine began")


def _as_read(path: Path, files: Sequence[_File], since_ns: int) -> None:
    """What was read is still there, and the same; for each request, so no more is looked at.

    Raises:
        UnknownWeights: it is not.
    """
    for file in files:
        here = os.stat(file.path)
        if (here.st_dev, here.st_ino, here.st_ctime_ns) != (*file.inode, file.inode_ns):
            raise UnknownWeights(f"{file.path} has changed since this engine began")
    if not all(file.blob for file in files):
        _in_place(path, since_ns)


def stamp_of(path: str) -> str:
    """Of the files at that path as they lie there: another one, where any was written or moved.

    Raises:
        UnknownWeights: there are none, or too many.
        OSError: they cannot be looked at.
    """
    return _stamp(_listed(Path(path)))


def _stamp(files: Iterable[_File]) -> str:
    told = ((file.name, file.n_bytes, file.inode_ns, *file.inode) for file in files)
    return digest_of(repr(list(told)))


def process_began_ns() -> int:
    """When this process began, as ``time.time_ns``: none of its weights was read before."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as source:
        ticks = int(source.read().rpartition(")")[2].split()[19])
    booted_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return booted_ns + ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


# ---- adapters ----------------------------------------------------------------------------------


class AdapterView(Protocol):
    """What is read of a LoRA request of vLLM's."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool
    is_3d_lora_weight: bool


class _ReadAdapter(msgspec.Struct, frozen=True):
    """What was found at a path, and of which files. ``stamp``: of these; empty: it is not asked."""

    digest: str
    stamp: str = ""
    path: Path = Path()
    files: tuple[_File, ...] = ()


class AdapterQuestion:
    """What an adapter is known by: a name that stands for these weights, and for no others."""

    def __init__(
        self, adapters: Adapters, adapter: AdapterView, reading: Future[_ReadAdapter]
    ) -> None:
        self._adapters = adapters
        self.number = adapter.lora_int_id
        self.weights: AdapterWeights | None = None
        """Once it has a name: what the workers hold against what vLLM reads; None: nothing."""
        self.adapter = adapter
        self._reading = reading

    def poll(self) -> str | None:
        """The name; None while its files are read.

        Raises:
            UnknownWeights: nobody knows these weights; ``flaws`` says why.
        """
        if not self._reading.done():
            return None
        try:
            found = self._reading.result()
            if found.stamp:
                self.weights = AdapterWeights(self.number, found.stamp)
                self._adapters.hold(self, self.weights)
            return self._adapters.name_of(self.adapter, found.digest)
        except UnknownWeights as error:
            self._adapters.tell(self.adapter, str(error))
            raise
        except OSError as error:
            why = f"{self.adapter.lora_path} cannot be read: {error}"
            self._adapters.tell(self.adapter, why)
            raise UnknownWeights(why) from None


def _cache_key(name: str, path: str, *, by_name: bool) -> tuple[str, str]:
    """What vLLM's own cache knows an adapter by."""
    return name, "" if by_name else path


def _not_told_apart(sharing: Mapping[tuple[str, str], set[int]], number: int) -> set[int]:
    """Numbers that share anything with that one, by ``_cache_key``."""
    return set().union(*(numbers for numbers in sharing.values() if number in numbers))


class Adapters:
    """What the adapters of one engine are known by.

    vLLM loads an adapter when it is first used, drops it, and loads it again, by a number and a
    path. So an adapter is known by its files only while these are as they were when the engine
    began; and what vLLM has read is said by the workers (``read_by_workers``), before anything is
    heard of what was computed with it. What its users load and drop by themselves is heard of
    before that (``loads``, ``removes``). Other weights under a number that has requests are theirs
    from then on. In its own cache vLLM finds KV by an adapter's name and path, whatever the number:
    so those that have both in common are known only while each of them has these alone; and what
    the workers read is held against all of them (``ReadAdapters``).

    What is loaded for a request is used in its first step, and vLLM reads an adapter that it has
    not in that step. So it is loaded only while the adapter ``stays``; what ends that is heard of
    before it comes about, and told by ``on_doubt``.

    All that touches files here is done in a thread: they may be large, and their file system may
    hang.

    Args:
        since_ns: when the engine began.
        rules: what the engine makes of every adapter.
        by_path: whoever runs it says that files at one path never change.
        room: so many adapters vLLM has at a time; it drops one for another one more.
    """

    by_name = False
    """VLLM's own cache finds KV by an adapter's name alone."""

    def __init__(self, *, since_ns: int, rules: str, by_path: bool = False, room: int = 0) -> None:
        self.since_ns = since_ns
        self.rules = rules
        self.by_path = by_path
        self._room = room
        self.hears_of_loads = True
        """Whether ``loads`` is said; else nobody knows for how long an adapter is what it was."""
        self.on_other_weights: Callable[[int], None] = lambda _: None
        """Is told the number of an adapter whose weights are other ones from now on."""
        self.on_doubt: Callable[[set[int]], None] = lambda _: None
        """Is told numbers of adapters that vLLM may read anew from now on, or others for them."""
        self.numbers_here: Callable[[], set[int]] = set
        """Those of adapters that have requests."""
        self.flaws: dict[str, str] = {}
        """By name, why it is not known, once each; whoever tells takes them out."""
        self._origins: dict[int, tuple[str, str] | None] = {}
        """By number, its name and path; None: it had others too, or was loaded in place."""
        self._sharing: dict[tuple[str, str], set[int]] = {}
        """By what vLLM's own cache knows them by, numbers that it does not tell apart."""
        self._told: set[str] = set()
        self._named: dict[int, AdapterQuestion] = {}
        """By number, one that has a name."""
        self._loaded: dict[int, str] = {}
        """By number, the stamp of the files that the workers have read; empty: of unlike ones."""
        self._in_use: set[int] = set()
        """Those that vLLM may have, or read without another word."""
        self._removed: set[int] = set()
        """Those that a user has had vLLM drop, which it may read again."""
        self._read: dict[str, _ReadAdapter] = {}
        """By path; of the thread's alone."""
        self._asked: set[Future[_ReadAdapter]] = set()
        self._reader = ThreadPoolExecutor(1, "kvd-adapters")

    def ask(self, adapter: AdapterView) -> AdapterQuestion:
        """Have it found out; waits for nothing."""
        path = os.path.expanduser(adapter.lora_path)
        if not self.hears_of_loads:
            return self._answered(adapter, UnknownWeights(UNHEARD))
        if flaw := self._begins(adapter):
            return self._answered(adapter, UnknownWeights(flaw))
        if self.by_path:
            return self._answered(adapter, _ReadAdapter(f"path {path}"))
        self._asked = {reading for reading in self._asked if not reading.done()}
        if len(self._asked) >= MAX_QUESTIONS:
            why = f"{MAX_QUESTIONS} questions for adapters are not answered"
            return self._answered(adapter, UnknownWeights(why))
        reading = self._reader.submit(self._digest_of, path)
        self._asked.add(reading)
        return AdapterQuestion(self, adapter, reading)

    def loads(self, adapter: AdapterView) -> None:
        """VLLM is about to load it: as it was told to, beside the requests of that number."""
        self._begins(adapter)

    def removes(self, number: int) -> None:
        """VLLM is about to drop that one, as it was told to."""
        self._removed.add(number)
        self.on_doubt(self._sharers(number))
        if number not in self.numbers_here():
            # Else a step that is computed with it reads it again.
            self._in_use.discard(number)

    def all_go(self) -> None:
        """VLLM may be about to drop any, by a call of all its workers."""
        self._room = NO_ROOM
        self.on_doubt(set(self._in_use))

    def hold(self, question: AdapterQuestion, weights: AdapterWeights) -> None:
        """The name that it is about to get is that of these; what vLLM reads is held against it.

        Raises:
            UnknownWeights: vLLM has read other ones.
        """
        if self._loaded.get(weights.number, weights.stamp) != weights.stamp:
            raise UnknownWeights(f"vLLM has read other files at {question.adapter.lora_path}")
        self._named[weights.number] = question

    def read_by_workers(self, stamps: Mapping[int, str]) -> None:
        """By number, what vLLM has read; of what it computes with that is heard behind this."""
        for number, stamp in stamps.items():
            is_alike = self._loaded.setdefault(number, stamp) == stamp
            if not is_alike:
                self._loaded[number] = ""
            named = self._named.get(number)
            if named is not None and named.weights != AdapterWeights(number, self._loaded[number]):
                self._forget(number, named.adapter)

    def _forget(self, number: int, adapter: AdapterView) -> None:
        """What has that number's name may be of other weights from now on."""
        del self._named[number]
        self._origins[number] = None
        self.tell(
            adapter, f"vLLM has read other files at {adapter.lora_path} since it had its name"
        )
        self.on_other_weights(number)

    def stays(self, weights: AdapterWeights) -> bool:
        """Whether vLLM has these, and reads none anew for that number before ``on_doubt`` says so.

        Nor others for a number whose requests find in vLLM's own cache what is loaded for this one.
        """
        number, origin = weights.number, self._origins.get(weights.number)
        if origin is None or len(self._in_use) > self._room or not self._has(weights):
            return False
        sharing = self._sharing[self._key_of(origin)] - {number}
        return not sharing or all(
            self._has(AdapterWeights(other, weights.stamp))
            for other in sharing & self.numbers_here()
        )

    def _has(self, weights: AdapterWeights) -> bool:
        number = weights.number
        return self._loaded.get(number) == weights.stamp and number not in self._removed

    def _key_of(self, origin: tuple[str, str]) -> tuple[str, str]:
        return _cache_key(*origin, by_name=self.by_name)

    def _sharers(self, number: int) -> set[int]:
        """Those that vLLM's own cache does not tell from it, and itself."""
        return {number} | _not_told_apart(self._sharing, number)

    def _begins(self, adapter: AdapterView) -> str:
        """It is used now, or read: why nobody can know its weights; empty: they can.

        Which files it is loaded from, or loaded again from, depends on when, where its number had
        others too; and what that has computed is found by whoever shares its name and path.
        """
        number, origin = adapter.lora_int_id, (adapter.lora_name, adapter.lora_path)
        if number not in self._in_use:
            self._in_use.add(number)
            if len(self._in_use) > self._room:
                self.on_doubt(set(self._in_use))
        key = self._key_of(origin)
        if key not in self._sharing and len(self._sharing) >= MAX_ADAPTERS:
            return MIXED
        sharing = self._sharing.setdefault(key, set())
        if number not in self._origins and len(self._origins) < MAX_ADAPTERS:
            self._origins[number] = origin
        before = self._origins.get(number)
        # One that is of no path here is known by none.
        member = number if number in self._origins else NO_NUMBER
        is_new = member not in sharing
        sharing.add(member)
        if before != origin or adapter.load_inplace:
            if before is not None:
                self._origins[number] = None
            if before is not None or is_new:
                for one in self._sharers(member) - {NO_NUMBER}:
                    self.on_other_weights(one)
            return OTHERS_TOO.format(number)
        others = sharing - {number}
        if others and (number not in self._loaded or number in self._removed):
            self.on_doubt(others)
        return "" if all(map(self._origins.get, sharing)) else MIXED

    def _answered(
        self, adapter: AdapterView, word: _ReadAdapter | UnknownWeights
    ) -> AdapterQuestion:
        found: Future[_ReadAdapter] = Future()
        if isinstance(word, _ReadAdapter):
            found.set_result(word)
        else:
            found.set_exception(word)
        return AdapterQuestion(self, adapter, found)

    def name_of(self, adapter: AdapterView, known: str) -> str:
        """The name of an adapter of whose files that is known."""
        whole = f"{known}\0{adapter.is_3d_lora_weight}\0{self.rules}"
        digest = hashlib.sha256(whole.encode("utf-8", "surrogateescape")).hexdigest()
        return f"{adapter.lora_name[:MAX_ADAPTER_NAME]}-{digest[:DIGEST_CHARS]}"

    def tell(self, adapter: AdapterView, flaw: str) -> None:
        """Why it is not known: said once."""
        if adapter.lora_name not in self._told:
            self._told.add(adapter.lora_name)
            self.flaws[adapter.lora_name] = flaw

    def _digest_of(self, path: str) -> _ReadAdapter:
        """In the thread: of the files there, which are as they were when the engine began.

        Raises:
            UnknownWeights: nobody can say, or they are not.
            OSError: they cannot be read.
        """
        if not os.path.isdir(path):
            raise UnknownWeights(f"{path} is no directory of this host")
        found = self._read.get(path)
        if found is None:
            files = tuple(_listed(Path(path)))
            digest = weight_files(Path(path), since_ns=self.since_ns).digest
            found = _ReadAdapter(digest, stamp=_stamp(files), path=Path(path), files=files)
            self._read[path] = found
        _as_read(found.path, found.files, self.since_ns)
        return found

    def close(self) -> None:
        """Read no more."""
        self._reader.shutdown(wait=False, cancel_futures=True)


# ---- what a worker has read of them -----------------------------------------------------------


class ReadAdapters:
    """What vLLM has read for its adapters, in one rank: the workers' half of what is known of them.

    vLLM reads an adapter's files in the step that uses it first, and again where it had dropped it
    meanwhile. Whose KV a step computes is decided there, so there it is seen which files were read:
    their stamp is taken before and behind it. Where it is another one than that for which a request
    has its namespace, nothing of it is saved, so no other node is sent it either.

    A number for which unlike files were read is known by none from then on, nor is one that vLLM's
    own cache does not tell from it: that may be in the same step, and go on from what the other
    computes. What was not seen to be read is not known: where adapters are read by other means,
    nothing of them is cached.
    """

    by_name = False
    """As of ``Adapters``."""

    def __init__(self) -> None:
        self._stamps: dict[int, str] = {}
        self._sharing: dict[tuple[str, str], set[int]] = {}
        """By what vLLM's own cache knows them by, numbers that it does not tell apart."""
        self.untold: dict[int, str] = {}
        """By number, what was read since somebody took it."""

    def read(self, adapter: AdapterView, load: Callable[[], T]) -> T:
        """Have vLLM read it: what ``load`` returns."""
        before = _stamp_at(adapter)
        found = load()
        number, stamp = adapter.lora_int_id, before if _stamp_at(adapter) == before else UNLIKE
        if number in self._stamps or len(self._stamps) < MAX_ADAPTERS:
            self._stamps.setdefault(number, stamp)
            key = _cache_key(adapter.lora_name, adapter.lora_path, by_name=self.by_name)
            self._sharing.setdefault(key, set()).add(number)
        sharing = _not_told_apart(self._sharing, number)
        if all(self._stamps[one] == stamp for one in sharing):
            sharing &= {number}
        else:
            stamp = UNLIKE
        told = dict.fromkeys(sharing, stamp)
        self._stamps |= told
        self.untold |= told
        return found

    def has(self, adapter: AdapterWeights) -> bool:
        """Whether all that was read for its number is that."""
        return self._stamps.get(adapter.number) == adapter.stamp

    def take(self) -> dict[int, str]:
        """By number, what was read since the last time."""
        untold, self.untold = self.untold, {}
        return untold


def _stamp_at(adapter: AdapterView) -> str:
    try:
        return stamp_of(os.path.expanduser(adapter.lora_path))
    except (UnknownWeights, OSError):
        return UNLIKE
