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

        Args:
            host: IPv4 or IPv6 address, or a name.

        Raises:
            OSError: `host` is not an address of this machine.
        """
        self.family: socket.AddressFamily
        self.family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(self.family, kind, protocol)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(address)
        except OSError:
            self._socket.close()
            raise
        self.address: str
        self.number: int
        self.address, self.number = self._socket.getsockname()[:2]

    def release(self) -> None:
        """Idempotent."""
        self._socket.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
