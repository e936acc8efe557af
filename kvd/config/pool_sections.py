"""What a node holds: [pool]. Which keys belong to which family is ``families``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvd.config.shard_keys import Replicas, Stage, TpRanks, TpSize

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


class PoolSection(msgspec.Struct, frozen=True):
    """The KV pool: what a page holds, and how many there are."""

    name: Annotated[
        str,
        Meta(
            description="Name of the pool: what node.pool() takes.",
            extra={"rule": "1 to 64 letters, digits, '.', '_' or '-', beginning with no sign"},
        ),
    ] = "main"
    family: Annotated[
        Literal["mha", "mla", "swa", "hisparse", "recurrent"],
        Meta(
            description="What a sequence owns: mha K and V per layer; mla one latent per layer; "
            "swa K and V, in the sliding layers of the last window only; hisparse KV in host "
            "memory and a buffer of it on the device; recurrent a state, beside KV or without."
        ),
    ] = "mha"
    device: Annotated[
        str,
        Meta(
            description="Whose memory the pool lies in. On a GPU it is allocated by the transfer "
            "process and ends with it, and the daemon then ends too. Of several shards the first "
            "lies there, each other one on the next device. hisparse: its index and buffer; the "
            "rest is host memory.",
            extra={"rule": "cpu, or cuda:N with the number of a GPU"},
        ),
    ] = "cpu"
    order: Annotated[
        Literal["page_first", "layer_first"],
        Meta(
            description="What varies slowest in memory: page_first keeps all layers of a page "
            "together (fewest descriptors per transfer), layer_first all pages of a layer.",
        ),
    ] = "page_first"
    layers: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="Layers of the model with KV of every token: those with a window or a "
            "state are counted apart. 0 is for recurrent alone: then pages are single tokens.",
        ),
    ] = 4
    heads: Annotated[int, Meta(ge=1, le=4096, description="KV heads per layer of the model.")] = 2
    head_dim: Annotated[
        int, Meta(ge=1, le=65536, description="Elements of one K head (and of V, unless v_dim).")
    ] = 64
    v_dim: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=65536,
                description="Elements of one V head. Left out: head_dim.",
                examples=[128],
            ),
        ]
        | None
    ) = None
    latent_dim: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=65536,
                description="Elements of one latent, without its rotary part: mla, and hisparse "
                "of such a model.",
                examples=[512],
            ),
        ]
        | None
    ) = None
    rope_dim: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=65536,
                description="Elements of the rotary part beside each latent. Left out: 0.",
                examples=[64],
            ),
        ]
        | None
    ) = None
    dtype: Annotated[
        DType,
        Meta(description="Element type, by its torch name."),
    ] = "bfloat16"
    scale_dtype: (
        Annotated[
            DType,
            Meta(
                description="Element type of the scales of quantised KV: one of each head for K "
                "and for V (mla: one) of every token and layer, in a component of its own. Left "
                "out: none.",
                examples=["float32"],
            ),
        ]
        | None
    ) = None
    page_size: Annotated[
        int,
        Meta(
            ge=1,
            le=65536,
            description="Tokens per page: the unit of allocation, matching and transfer. The "
            "same on both sides of a handoff.",
        ),
    ] = 16
    tp_size: TpSize = 1
    tp_ranks: TpRanks | None = None
    stage: Stage | None = None
    replicas: Replicas = 1
    pages: (
        Annotated[
            int,
            Meta(
                ge=2,
                le=2**31 - 1,
                description="Number of pages, the null page included. Excludes pool.size.",
                examples=[2048],
            ),
        ]
        | None
    ) = None
    size: (
        Annotated[
            str,
            Meta(
                description="Memory of the pool, from which the numbers of pages follow: a page is "
                "paid in every shard of this node; an index and scales are paid with their page; "
                "swa and recurrent divide it so that requests of pool.typical_tokens use up both "
                "their parts together; hisparse means the host memory, its index and buffer come "
                "on top. Excludes pool.pages.",
                extra={"rule": "a whole number and a unit: KiB, MiB, GiB or TiB"},
            ),
        ]
        | None
    ) = "64MiB"
    typical_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=2**28,
            description="Tokens of a usual request, prompt and answer: what window_pages, states "
            "and buffer_pages follow from where they are left out.",
        ),
    ] = 8192
    saved_size: (
        Annotated[
            str,
            Meta(
                description="Host memory for the KV of retracted leases; 0KiB for none. Left out: "
                "an eighth of the pool, at most 1GiB.",
                extra={"rule": "a whole number and a unit: KiB, MiB, GiB or TiB"},
                examples=["512MiB"],
            ),
        ]
        | None
    ) = None
    backing: Annotated[
        Literal["anon", "shm", "fdstore", "hugetlbfs"],
        Meta(
            description="Where the memory comes from, and whether it outlives the daemon, so that "
            "the next one finds the cache: anon is a sealed memfd that ends with it; shm files on "
            "a tmpfs, which stay until kvd drop; fdstore sealed memfds that systemd holds over a "
            "restart, and frees at a stop; hugetlbfs files of huge pages set apart, which stay. "
            "Files cannot be sealed: whoever may attach is trusted not to truncate them."
        ),
    ] = "anon"
    directory: (
        Annotated[
            str,
            Meta(
                description="Where the files of shm and hugetlbfs lie: a directory of this daemon "
                "alone, made if it is not there. Left out: below /dev/shm, or the first hugetlbfs "
                "mounted, one named after the user and the directory of sockets.client.",
                extra={"rule": "an absolute path"},
                examples=["/dev/shm/kvd"],
            ),
        ]
        | None
    ) = None
    verify: Annotated[
        Literal["sampled", "all", "none"],
        Meta(
            description="Which pages of a pool that was found are compared with their checksums "
            "before they are used: all; the first and last of each branch and one in 16, and all "
            "from where one is wrong (sampled); or none."
        ),
    ] = "sampled"
    huge_pages: Annotated[
        Literal["collapse", "off"],
        Meta(
            description="collapse asks the kernel for 2 MiB pages: about twice the bandwidth. "
            "Memory of pool.backing = hugetlbfs has them anyway."
        ),
    ] = "collapse"
    window_tokens: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=2**28,
                description="swa: how many tokens a sliding layer looks back.",
                examples=[1024],
            ),
        ]
        | None
    ) = None
    window_layers: (
        Annotated[
            int,
            Meta(ge=1, le=1024, description="swa: number of sliding layers.", examples=[52]),
        ]
        | None
    ) = None
    window_heads: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=4096,
                description="swa: KV heads of a sliding layer. Left out: pool.heads.",
                examples=[8],
            ),
        ]
        | None
    ) = None
    window_head_dim: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=65536,
                description="swa: elements of one K head of a sliding layer. Left out: "
                "pool.head_dim.",
                examples=[192],
            ),
        ]
        | None
    ) = None
    window_v_dim: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=65536,
                description="swa: elements of one V head of a sliding layer. Left out: "
                "window_head_dim if that is given, else as in the other layers.",
                examples=[128],
            ),
        ]
        | None
    ) = None
    window_pages: (
        Annotated[
            int,
            Meta(
                ge=2,
                le=2**31 - 1,
                description="swa: pages of the sliding layers, the null page included. Left out: "
                "what usual requests need, each its window and two pages. Only engines that lease "
                "with step_tokens do with that; otherwise each page of a prompt takes one.",
                examples=[4096],
            ),
        ]
        | None
    ) = None
    index_dim: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=65536,
                description="mha, mla, hisparse: elements of one key of the sparse attention's "
                "index. Left out: there is no index.",
                examples=[128],
            ),
        ]
        | None
    ) = None
    index_heads: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=4096,
                description="Keys of the index per token and layer. Left out: 1.",
                examples=[1],
            ),
        ]
        | None
    ) = None
    index_dtype: (
        Annotated[
            DType,
            Meta(
                description="Element type of the index. Left out: pool.dtype.",
                examples=["float8_e4m3fn"],
            ),
        ]
        | None
    ) = None
    index_page_size: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=65536,
                description="Tokens per page of the index. Left out: pool.page_size.",
                extra={"rule": "a divisor of pool.page_size"},
                examples=[16],
            ),
        ]
        | None
    ) = None
    buffer_tokens: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=2**28,
                description="hisparse: tokens of one request that the device holds at a time.",
                extra={"rule": "a multiple of pool.page_size"},
                examples=[4096],
            ),
        ]
        | None
    ) = None
    buffer_pages: (
        Annotated[
            int,
            Meta(
                ge=2,
                le=2**31 - 1,
                description="hisparse: pages of the device buffer, the null page included. Left "
                "out: as many buffers as usual requests fit into the host memory.",
                examples=[2048],
            ),
        ]
        | None
    ) = None
    state_layers: (
        Annotated[
            int,
            Meta(ge=1, le=1024, description="recurrent: layers with a state.", examples=[24]),
        ]
        | None
    ) = None
    states: (
        Annotated[
            int,
            Meta(
                ge=2,
                le=2**31 - 1,
                description="recurrent: number of states, the null state included. Left out: two "
                "for each usual request, one of them for the cache.",
                examples=[129],
            ),
        ]
        | None
    ) = None
    state: Annotated[
        dict[str, str],
        Meta(
            description="recurrent: the tensors of one layer's state of one request.",
            extra={"rule": 'a table of NAME = "DTYPE[N,N,...]"'},
            examples=[{"conv": "bfloat16[4352,3]", "ssm": "float32[64,64,128]"}],
        ),
    ] = {}
