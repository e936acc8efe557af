"""The CUDA devices of the transfer process. Nothing of CUDA is loaded before it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.device.cuda import CudaError, Runtime
from kvd.device.cuda_library import load

if TYPE_CHECKING:
    from collections.abc import Mapping


class DeviceUnusable(Exception):
    """There is no CUDA here, or it refuses; the message is a sentence."""


class Devices:
    """The runtime of this process, and the devices that its regions lie on."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """``environ`` says where a runtime is looked for; None: that of the process."""
        self._environ = environ
        self._runtime: Runtime | None = None

    @property
    def runtime(self) -> Runtime:
        """The CUDA runtime.

        Raises:
            DeviceUnusable: there is none.
        """
        if self._runtime is None:
            found = load(self._environ)
            if not isinstance(found, Runtime):
                raise DeviceUnusable(found.why)
            self._runtime = found
        return self._runtime

    def open_event(self, handle: bytes) -> int:
        """An engine's event, on whichever device it was made: its handle does not say.

        Raises:
            DeviceUnusable: there is no CUDA, or the handle is no event of a living process.
        """
        runtime, why = self.runtime, ""
        for device in range(runtime.device_count()):
            try:
                return runtime.open_event(device, handle)
            except CudaError as exc:
                why = str(exc)
        raise DeviceUnusable(why)
