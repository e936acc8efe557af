"""What kvd imports of NIXL."""

import nixl_double as nixlBind  # noqa: N812 - as NIXL names it

__all__ = ["nixlBind"]
