import socket

import psutil
import pytest

from nemo_rl.utils.network import check_interfaces, http_url, interface_of, interfaces, resolve_host


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:80"), ("::1", "http://[::1]:80"), ("node-3", "http://node-3:80")],
)
def test_urls(host, url):
    assert http_url(host, 80) == url


def test_hosts_become_numbers():
    assert resolve_host("127.0.0.1") == "127.0.0.1"
    assert resolve_host("::1") == "::1"
    assert resolve_host("localhost") == "127.0.0.1"
    with pytest.raises(ValueError, match=r"host: got 'no.such.invalid'; expected an address or a name"):
        resolve_host("no.such.invalid")


def test_interfaces_are_those_with_an_address():
    assert "127.0.0.1" in interfaces()["lo"]
    families = {socket.AF_INET, socket.AF_INET6}
    without = [n for n, found in psutil.net_if_addrs().items() if not families & {entry.family for entry in found}]
    assert not set(without) & set(interfaces())


def test_interface_of_an_address():
    assert interface_of("127.0.0.1") == interface_of("::1") == "lo"
    assert interface_of("192.0.2.77") is None


@pytest.mark.parametrize("value", ["", "lo", "lo,lo"])
def test_gloo_takes_names(value):
    check_interfaces({"GLOO_SOCKET_IFNAME": value})


@pytest.mark.parametrize("value", ["nosuch0", "lo,nosuch0", "=lo", "^lo", "lo0", " lo"])
def test_a_gloo_value_that_fits_no_interface_is_refused_with_those_there_are(value):
    with pytest.raises(
        ValueError, match=r"interface with an address of this machine, which has .*lo \(127.0.0.1"
    ) as caught:
        check_interfaces({"GLOO_SOCKET_IFNAME": value})
    assert str(caught.value).startswith(f"GLOO_SOCKET_IFNAME: got {value!r}; ")


@pytest.mark.parametrize("value", ["", "lo", "l", "nosuch,lo", "=lo", "=nosuch,lo", "^nosuch", "^=l", "lo:3"])
def test_nccl_takes_prefixes_whole_names_and_exclusions(value):
    check_interfaces({"NCCL_SOCKET_IFNAME": value})


EVERY = ",".join(interfaces())


@pytest.mark.parametrize("value", ["nosuch", "=l", "=nosuch,l", f"^{EVERY}", f"^={EVERY}", "lo0"])
def test_an_nccl_value_that_fits_no_interface_is_refused_with_those_there_are(value):
    with pytest.raises(ValueError, match=r"fits no interface with an address of this machine, which has") as caught:
        check_interfaces({"NCCL_SOCKET_IFNAME": value, "GLOO_SOCKET_IFNAME": "lo"})
    assert str(caught.value).startswith(f"NCCL_SOCKET_IFNAME: got {value!r}; ")
