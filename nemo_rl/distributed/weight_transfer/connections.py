"""The TCP connections of a weight-update group in this process, and how to end them.

gloo cannot be told to give up: with a broadcast under way its abort and its destructor wait, with the GIL held, until
that broadcast times out, and so does the other side. A connection that is shut down fails what is under way at both ends
at once, but for a payload that has arrived in part: gloo forgets to fail that, so it has to arrive first. gloo shows none of its sockets; but each rank publishes, in the group's store, the address at which it listens,
as the kernel's `sockaddr`, and one end of each connection has such an address.
"""

import logging
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

_BYTES_ACKED = struct.Struct("=120xQ")
"""`tcpi_bytes_acked` of the kernel's `tcp_info`."""


def num_accepted(port: int) -> int:
    """Connections of this process whose own end is `port`."""
    count = 0
    for connection in _connections():
        with connection:
            count += connection.getsockname()[1] == port and bool(_ends(connection))
    return count


def end_connections(published: Sequence[bytes]) -> int:
    """Shut down this process's connections of a group; returns how many.

    Listening sockets are left alone: gloo ends the process when one of its own fails.

    Args:
        published: the values of the group's store.
    """
    count = 0
    for connection in _connections():
        with connection:
            if not _is_published(connection, published):
                continue
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                logger.debug("a connection of the group had ended: %s", error)
                continue
            count += 1
    return count


def num_bytes_acknowledged(published: Sequence[bytes]) -> int:
    """What the other ends of a group's connections have received from this one."""
    total = 0
    for connection in _connections():
        with connection:
            if _is_published(connection, published):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
                total += _BYTES_ACKED.unpack(info.ljust(_BYTES_ACKED.size, b"\0"))[0]
    return total


def _connections() -> Iterator[socket.socket]:
    """A copy of the descriptor of each TCP socket of this process."""
    for descriptor in _socket_descriptors(Path("/proc/self/fd").iterdir()):
        try:
            copy = socket.socket(fileno=os.dup(descriptor))
        except OSError as error:  # another thread has just closed it
            logger.debug("socket %d has ended: %s", descriptor, error)
            continue
        if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
            yield copy
        else:
            copy.close()


def _socket_descriptors(links: Iterable[Path]) -> list[int]:
    found = []
    for link in links:
        try:
            target = os.readlink(link)
        except FileNotFoundError:  # closed since it was listed
            continue
        if target.startswith("socket:"):
            found.append(int(link.name))
    return found


def _ends(connection: socket.socket) -> list[tuple[str, int, *tuple[int, ...]]]:
    """Addresses of both ends; none when it listens, or has ended."""
    try:
        return [connection.getpeername(), connection.getsockname()]
    except OSError:
        return []


def _is_published(connection: socket.socket, published: Sequence[bytes]) -> bool:
    """Whether the address of either end stands in one of the values."""
    return any(_kernel_form(connection.family, end) in value for end in _ends(connection) for value in published)


def _kernel_form(family: int, address: tuple[str, int, *tuple[int, ...]]) -> bytes:
    """`sockaddr_in`: family, port, address; `sockaddr_in6` has the flow label between port and address."""
    host, port, *more = address
    flow_label = struct.pack("!I", more[0]) if family == socket.AF_INET6 else b""
    return (
        struct.pack("=H", family) + struct.pack("!H", port) + flow_label + socket.inet_pton(family, host.split("%")[0])
    )
