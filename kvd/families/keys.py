"""[pool]: the keys that several families share, and how any key is declared.

A key is a field: its type with its bounds, its default, and below it, as a string, what it means. A
key that may be left out without a value of its own is ``| None``. Keys of one family alone are
fields of a subclass of ``PoolSection`` in that family's file; ``kvd.config.keys`` reads all of them
into one table. ``{index}`` and ``{shards}`` in a text stand for the families that may have those.

What must not be here: what a family makes of its keys.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvd.core.layout.page_sizes import LEAST_PAGE_TOKENS, MOST_PAGE_TOKENS
from kvd.core.layout.spec import MAX_TAG_CHARS

MAX_PAGES = 2**31 - 1
"""Page ids travel as int32."""

DType = Literal[
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "uint8",
]
Layers = Annotated[int, Meta(ge=1, le=1024)]
Heads = Annotated[int, Meta(ge=1, le=4096)]
Elements = Annotated[int, Meta(ge=1, le=65536)]
Tokens = Annotated[int, Meta(ge=1, le=2**28)]
PageTokens = Annotated[int, Meta(ge=LEAST_PAGE_TOKENS, le=MOST_PAGE_TOKENS)]
PageCount = Annotated[int, Meta(ge=2, le=MAX_PAGES)]

TAG_RULE = f"at most {MAX_TAG_CHARS} printable characters"
NAME_RULE = "1 to 64 letters, digits, '.', '_' or '-', beginning with no sign"
SIZE_RULE = "a whole number and a unit: KiB, MiB, GiB or TiB"


def rule(text: str) -> Meta:
    """What values of a key must be, where type and bounds do not say it."""
    return Meta(extra={"rule": text})


def example(value: object) -> Meta:
    """What to show of a key that has no default."""
    return Meta(examples=[value])


class PoolSection(msgspec.Struct, frozen=True):
    """The KV pool: what a page holds, and how many there are."""

    name: Annotated[str, rule(NAME_RULE)] = "main"
    """Name of the pool: what node.pool() takes."""
    family: str = "mha"
    """What a sequence owns: {families}."""
    device: Annotated[str, rule("cpu, or cuda:N with the number of a GPU")] = "cpu"
    """Whose memory the pool lies in. On a GPU it is allocated by the transfer process and ends with
    it, and the daemon then ends too. Of several shards the first lies there, each other one on the
    next device. hisparse: its index and buffer; the rest is host memory."""
    order: Literal["page_first", "layer_first"] = "page_first"
    """What varies slowest in memory: page_first keeps all layers of a page together (fewest
    descriptors per transfer), layer_first all pages of a layer."""
    layers: Annotated[int, Meta(ge=0, le=1024)] = 4
    """Layers of the model with KV of every token: those with a window or a state are counted apart.
    0 is for recurrent alone: then pages are single tokens."""
    heads: Heads = 2
    """KV heads per layer of the model."""
    head_dim: Elements = 64
    """Elements of one K head (and of V, unless v_dim)."""
    v_dim: Annotated[Annotated[int, Meta(ge=0, le=65536)] | None, example(128)] = None
    """Elements of one V head. Left out: head_dim. 0 is for engines that keep K and V of a head
    together: head_dim then counts both, and each layer is one tensor."""
    latent_dim: Annotated[Elements | None, example(512)] = None
    """Elements of one latent, without its rotary part: mla, and hisparse of such a model."""
    rope_dim: Annotated[Annotated[int, Meta(ge=0, le=65536)] | None, example(64)] = None
    """Elements of the rotary part beside each latent. Left out: 0."""
    dtype: DType = "bfloat16"
    """Element type, by its torch name."""
    interior: Literal["nhd", "hnd", "opaque"] = "nhd"
    """How a page lies in each layer: nhd is (pages, page_size, heads, head_dim), hnd is (pages,
    heads, page_size, head_dim), opaque is whatever the engine writes, seen as bytes. Where shards
    differ, nhd and hnd are cut by heads and layers, opaque pages are refused. Equal on both sides
    of a handoff. Latents have no heads: nhd, or opaque."""
    tag: Annotated[str, rule(TAG_RULE), example("engine 1.2 bfloat16 avx512")] = ""
    """Who packs the pages, in words of your own: engine and version, packing of elements, build of
    the kernels. Pools of unlike tags exchange nothing, and an engine may ask for the one that it
    expects. Empty: none."""
    scale_dtype: Annotated[DType | None, example("float32")] = None
    """Element type of the scales of quantised KV: one of each head for K and for V (mla: one) of
    every token and layer, in a component of its own. Left out: none."""
    page_size: PageTokens = 16
    """Tokens per page: the unit of allocation, matching and transfer. The same on both sides of a
    handoff."""
    tp_size: Heads = 1
    """Tensor-parallel ranks among which the heads of the model are divided, on all nodes together.
    Each rank has a shard of the pool in memory of its own; where there are more ranks than heads,
    neighbours have the same head. Families {shards} only, as tp_ranks, stage and replicas."""
    tp_ranks: Annotated[
        str | None, rule("the first and the last rank like 0-3, or one rank"), example("0-3")
    ] = None
    """Which of the pool.tp_size ranks are on this node. Left out: all."""
    stage: Annotated[
        str | None, rule("the first layer and the one after the last, like 0:16"), example("0:16")
    ] = None
    """Which of pool.layers are on this node, where a pipeline has the others elsewhere. Left out:
    all."""
    replicas: Annotated[int, Meta(ge=1, le=128)] = 1
    """Equal copies of each shard on this node, where ranks share a prompt (context parallel) and
    each has gathered all of its KV. Each copy sends a part of the pages."""
    pages: Annotated[PageCount | None, example(2048)] = None
    """Number of pages, the null page included. Excludes pool.size."""
    size: Annotated[str | None, rule(SIZE_RULE)] = "64MiB"
    """Memory of the pool, from which the numbers of pages follow: a page is paid in every shard of
    this node; an index and scales are paid with their page; swa and recurrent divide it so that
    requests of pool.typical_tokens use up both their parts together; hisparse means the host
    memory, its index and buffer come on top. Excludes pool.pages."""
    typical_tokens: Tokens = 8192
    """Tokens of a usual request, prompt and answer: what window_pages, states and buffer_pages
    follow from where they are left out."""
    saved_size: Annotated[str | None, rule(SIZE_RULE), example("512MiB")] = None
    """Host memory for the KV of retracted leases; 0KiB for none. Left out: an eighth of the pool,
    at most 1GiB."""
    backing: Literal["anon", "shm", "fdstore", "hugetlbfs"] = "anon"
    """Where the memory comes from, and whether it outlives the daemon, so that the next one finds
    the cache: anon is a sealed memfd that ends with it; shm files on a tmpfs, which stay until kvd
    drop; fdstore sealed memfds that systemd holds over a restart, and frees at a stop; hugetlbfs
    files of huge pages set apart, which stay. Files cannot be sealed: whoever may attach is trusted
    not to truncate them."""
    directory: Annotated[str | None, rule("an absolute path"), example("/dev/shm/kvd")] = None
    """Where the files of shm and hugetlbfs lie: a directory of this daemon alone, made if it is not
    there. Left out: below /dev/shm, or the first hugetlbfs mounted, one named after the user and
    the directory of sockets.client."""
    verify: Literal["sampled", "all", "none"] = "sampled"
    """Which pages of a pool that was found are compared with their checksums before they are used:
    all; the first and last of each branch and one in 16, and all from where one is wrong (sampled);
    or none."""
    huge_pages: Literal["collapse", "off"] = "collapse"
    """collapse asks the kernel for 2 MiB pages: about twice the bandwidth. Memory of pool.backing =
    hugetlbfs has them anyway."""
    index_dim: Annotated[Elements | None, example(128)] = None
    """{index}: elements of one key of the sparse attention's index. Left out: there is no index."""
    index_heads: Annotated[Heads | None, example(1)] = None
    """Keys of the index per token and layer. Left out: 1."""
    index_dtype: Annotated[DType | None, example("float8_e4m3fn")] = None
    """Element type of the index. Left out: pool.dtype."""
    index_page_size: Annotated[
        PageTokens | None, rule("a divisor of pool.page_size"), example(16)
    ] = None
    """Tokens per page of the index. Left out: pool.page_size."""

    @property
    def keeps_latents(self) -> bool:
        """Whether its pages hold one latent per token rather than K and V per head."""
        return self.latent_dim is not None

    @property
    def model_heads(self) -> int:
        """What ranks divide among them of each layer: heads; a latent is one, which all have."""
        return 1 if self.keeps_latents else self.heads

    @property
    def counts_tokens(self) -> bool:
        """Whether no layer has KV, so that a page is one token that takes no byte."""
        return False

    @property
    def is_kept(self) -> bool:
        """Whether its memory outlives the daemon."""
        return self.backing != "anon"

    @property
    def is_in_files(self) -> bool:
        """Whether its memory lies in files that have names."""
        return self.backing in {"shm", "hugetlbfs"}
