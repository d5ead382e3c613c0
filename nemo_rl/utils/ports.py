"""Free TCP ports, reserved by binding them."""

import socket
from contextlib import AbstractContextManager
from types import TracebackType


class ReservedPort(AbstractContextManager["ReservedPort"]):
    """Holds a port of `host` for a server that will bind it later.

    The socket is bound and never listens. With `SO_REUSEADDR` on both sides Linux lets one more socket bind the port
    and listen on it, so the reservation stays until the server listens and nobody gets the port in between.
    """

    def __init__(self, host: str) -> None:
        """Bind a free port.

        Raises:
            OSError: `host` is not an address of this machine.
        """
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, 0))
        except OSError:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Idempotent."""
        self._socket.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
