"""The key of a job, given by `private_key` and `ca` to workers and to clients that attach to them."""

import ipaddress
import logging
import socket
from pathlib import Path
from typing import Literal

from monarch_nb._package import more
from monarch_nb.routing.routes import AddressError, ChannelEndpoint, WorkerAddress
from monarch_nb.transport import Keys, TrustError, require_keys

logger = logging.getLogger(__name__)

PrivateKey = bytes | Path | None
CA = bytes | Path | Literal["trust_all_connections"]
_ALL_INTERFACES = ("0.0.0.0", "::")
TRUST_ALL: Literal["trust_all_connections"] = "trust_all_connections"

_HOW = (
    "A job has one key for all, which this makes: "
    "python -c 'from monarch_nb.transport import Keys; Keys.load_or_create(\"job.key\")'. Give every worker and "
    "the client that file (mode 0600) as private_key=Path('job.key')" + more("manual/hosts.md#who-is-trusted")
)


def read_keys(private_key: PrivateKey, ca: CA) -> Keys | None:
    """Returns the key that `private_key`, else `ca`, gives: as a file's path, or as its content.

    Raises TrustError for an invalid key, and for two different ones.
    """
    own, trusted = _read(private_key, "private_key"), None if ca == TRUST_ALL else _read(ca, "ca")
    if own is not None and trusted is not None and own != trusted:
        raise TrustError("private_key and ca are different keys, but both ends of a job use the same one. " + _HOW)
    return own or trusted


def _read(key: "bytes | Path | str | None", parameter: str) -> Keys | None:
    if key is None:
        return None
    if isinstance(key, bytes):
        return Keys.from_text(key, parameter)
    if isinstance(key, Path):
        try:
            return Keys.load(key)
        except FileNotFoundError:
            raise TrustError(f"{parameter}: there is no key file {key}. {_HOW}") from None
    forms = "the path of a key file, its content as bytes" + (f", or {TRUST_ALL!r}" if parameter == "ca" else "")
    raise TrustError(f"{parameter}={key!r} is not one of: {forms}")


def check_trust(endpoint: ChannelEndpoint | str, keys: Keys | None) -> None:
    """Raises TrustError for a TCP endpoint without a key, unless it means this machine alone."""
    try:
        require_keys(str(endpoint), keys, True)
    except TrustError:
        raise TrustError(
            f"{endpoint} needs a key: ca={TRUST_ALL!r} without one is honoured only for ipc:// and loopback addresses, "
            f"since whoever connects to a worker runs code there. {_HOW}"
        ) from None


def numeric(endpoint: ChannelEndpoint) -> ChannelEndpoint:
    """Returns the endpoint with an IP address as its host, IPv4 first. Blocks for the look-up; raises AddressError."""
    if endpoint.scheme != "tcp":
        return endpoint
    try:
        ipaddress.ip_address(endpoint.host)
        return endpoint
    except ValueError:
        pass
    try:
        addresses = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(f"{endpoint}: the name {endpoint.host} cannot be resolved here: {error}") from None
    addresses.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return ChannelEndpoint("tcp", host=str(addresses[0][4][0]), port=endpoint.port)


def is_loopback(endpoint: ChannelEndpoint) -> bool:
    """Returns whether an endpoint is an IP address of this machine alone."""
    try:
        return ipaddress.ip_address(endpoint.host).is_loopback
    except ValueError:
        return False


def local_name(endpoint: ChannelEndpoint, keys: Keys | None) -> ChannelEndpoint:
    """Resolves a name that means this machine alone to an address; returns other endpoints unchanged.

    With a key only `localhost` is resolved: the addresses of other names matter only without one. Blocks for the
    look-up.
    """
    if endpoint.host != "localhost" and keys is not None:
        return endpoint
    try:
        address = numeric(endpoint)
    except AddressError:
        return endpoint
    return address if is_loopback(address) else endpoint


def bound_end(address: WorkerAddress, keys: Keys | None) -> ChannelEndpoint:
    """Returns the IP endpoint at which a worker listens. Blocks for look-ups; raises AddressError.

    Without a key, a worker that is dialled only from this machine listens only there, even if its address names all
    interfaces.
    """
    bind = numeric(address.bind)
    if keys is None and bind.host in _ALL_INTERFACES:
        dialled = local_name(address.dial, None)
        if is_loopback(dialled):
            narrow = ChannelEndpoint("tcp", host=dialled.host, port=bind.port)
            logger.warning(
                "the worker at %s listens on %s, for processes of this machine, and not on %s: that needs a key",
                address.dial, narrow, bind,
            )  # fmt: skip
            return narrow
    return bind
