import socket

import pytest

from nemo_rl.utils.ports import ReservedPort

HOSTS = ["127.0.0.1", "::1", "localhost"]


def _listen(held: ReservedPort, *, reuse: bool) -> socket.socket:
    server = socket.socket(held.family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
    server.bind((held.address, held.number))
    server.listen(1)
    return server


@pytest.mark.parametrize("host", HOSTS)
def test_a_server_can_listen_on_a_port_that_is_still_reserved(host):
    with ReservedPort(host) as port, _listen(port, reuse=True) as server:
        assert server.getsockname()[:2] == (port.address, port.number)
        socket.create_connection((host, port.number), timeout=5).close()


@pytest.mark.parametrize("host", HOSTS)
def test_a_reserved_port_is_not_given_to_others(host):
    with ReservedPort(host) as first, ReservedPort(host) as second:
        assert first.number != second.number
        with pytest.raises(OSError, match="in use"):
            _listen(first, reuse=False)


def test_release_is_idempotent_and_frees_the_port():
    port = ReservedPort("127.0.0.1")
    port.release()
    port.release()
    _listen(port, reuse=False).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
def test_an_address_of_another_machine_is_refused(host):
    with pytest.raises(OSError, match="assign"):
        ReservedPort(host)
