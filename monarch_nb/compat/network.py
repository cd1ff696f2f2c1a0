"""Addresses of a host by its name: `monarch.tools.network`."""

import contextlib
import enum
import ipaddress
import socket


class AddrType(enum.Enum):
    """The wanted kind of IP address."""

    Default = enum.auto()  # IPv6, else IPv4
    IPv4 = enum.auto()
    IPv6 = enum.auto()


_FAMILIES = {
    AddrType.Default: (socket.AF_INET6, socket.AF_INET),
    AddrType.IPv4: (socket.AF_INET,),
    AddrType.IPv6: (socket.AF_INET6,),
}


def get_ipaddr(hostname: str, port: int, addr_type: AddrType = AddrType.Default) -> str:
    """Returns the first IP address of a host that others could reach by TCP. Asks the resolver, so it may block.

    Raises RuntimeError when the name has none; addresses of a single network segment do not count.
    """
    for family in _FAMILIES[addr_type]:
        with contextlib.suppress(socket.gaierror):
            for entry in socket.getaddrinfo(hostname, port, family, type=socket.SOCK_STREAM):
                address = str(entry[4][0])
                if not ipaddress.ip_address(address).is_link_local:
                    return address
    kinds = "IPv6 or IPv4" if addr_type is AddrType.Default else addr_type.name
    raise RuntimeError(
        f"Unable to resolve `{hostname}` to an {kinds} address that others could reach by TCP: check its name in the "
        "resolver or /etc/hosts"
    )


def get_sockaddr(hostname: str, port: int) -> str:
    """As `get_ipaddr`, with the port: "192.0.2.7:8080" or "[2001:db8::7]:8080"."""
    address = get_ipaddr(hostname, port)
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


__all__ = ["AddrType", "get_ipaddr", "get_sockaddr"]
