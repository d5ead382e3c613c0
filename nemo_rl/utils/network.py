"""Addresses and interfaces of this machine."""

import socket
from collections.abc import Mapping, Sequence

import psutil

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"


def http_url(host: str, port: int) -> str:
    """`host`: name, IPv4 or IPv6 address; the latter gets the brackets that a URL wants."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def resolve_host(host: str) -> str:
    """The numeric address of a name or address, IPv4 before IPv6.

    A server told a name may listen on more addresses than one, or on another than its clients take.

    Raises:
        ValueError: nobody knows the name.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ValueError(f"host: got {host!r}; expected an address or a name that this machine knows") from error
    addresses = sorted(found, key=lambda info: info[0] != socket.AF_INET)
    return str(addresses[0][4][0])


def interfaces() -> dict[str, list[str]]:
    """Name of each interface that has an IPv4 or IPv6 address -> its addresses."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = {
        name: [entry.address for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def interface_of(address: str) -> str | None:
    """The interface that has this numeric address, if one has."""
    return next((name for name, addresses in interfaces().items() if address in addresses), None)


def check_interfaces(environment: Mapping[str, str]) -> None:
    """Look at `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` before gloo or NCCL fails on them in its own words.

    Raises:
        ValueError: a value fits no interface of this machine; names variable, value and the interfaces there are.
    """
    present = interfaces()
    checks = {GLOO_VARIABLE: _missing_for_gloo, NCCL_VARIABLE: _missing_for_nccl}
    for variable, missing in checks.items():
        value = environment.get(variable, "")
        if value and (wrong := missing(value, list(present))):
            known = ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in sorted(present.items()))
            raise ValueError(f"{variable}: got {value!r}; {wrong} of this machine, which has {known}")


def _missing_for_gloo(value: str, present: Sequence[str]) -> str:
    """gloo takes a comma-separated list of names and needs every one of them. Empty: nothing is missing."""
    absent = [name for name in value.split(",") if name not in present]
    return f"{', '.join(map(repr, absent))} is no interface with an address" if absent else ""


def _missing_for_nccl(value: str, present: Sequence[str]) -> str:
    """NCCL takes a list of prefixes and uses all that fit: `^` in front leaves those out, `=` asks for whole names."""
    excludes = value.startswith("^")
    exact = value.removeprefix("^").startswith("=")
    # A port may stand behind a name; NCCL ignores it here.
    parts = [part.partition(":")[0] for part in value.removeprefix("^").removeprefix("=").split(",")]
    parts = [part for part in parts if part]
    fits = {name for name in present for part in parts if (name == part if exact else name.startswith(part))}
    usable = set(present) - fits if excludes else fits
    return "" if usable else "fits no interface with an address"
