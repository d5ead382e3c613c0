import socket

import pytest

from nemo_rl.utils.ports import ReservedPort

HOST = "127.0.0.1"


def _listen(port: int, *, reuse: bool) -> socket.socket:
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
    server.bind((HOST, port))
    server.listen(1)
    return server


def test_a_server_can_listen_on_a_port_that_is_still_reserved():
    with ReservedPort(HOST) as port, _listen(port.number, reuse=True) as server:
        assert server.getsockname() == (HOST, port.number)


def test_a_reserved_port_is_not_given_to_others():
    with ReservedPort(HOST) as first, ReservedPort(HOST) as second:
        assert first.number != second.number
        with pytest.raises(OSError, match="in use"):
            _listen(first.number, reuse=False)


def test_release_is_idempotent_and_frees_the_port():
    port = ReservedPort(HOST)
    port.release()
    port.release()
    _listen(port.number, reuse=False).close()


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(OSError, match="assign"):
        ReservedPort("192.0.2.1")
