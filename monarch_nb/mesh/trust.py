"""The key of a job, as `private_key` and `ca` give it to workers and to those who attach to them."""

import ipaddress
import socket
from pathlib import Path
from typing import Literal

from monarch_nb.routing.addresses import AddressError, Endpoint
from monarch_nb.transport import Keys, TrustError, require_keys

PrivateKey = bytes | Path | None
CA = bytes | Path | Literal["trust_all_connections"]
TRUST_ALL: Literal["trust_all_connections"] = "trust_all_connections"

_HOW = (
    "A job has one key for all, which this makes: "
    "python -c 'from monarch_nb.transport import Keys; Keys.load_or_create(\"job.key\")'. Give every worker and "
    "the client that file (mode 0600) as private_key=Path('job.key')"
)


def read_keys(private_key: PrivateKey, ca: CA) -> Keys | None:
    """The key that `private_key`, else `ca`, names: a file's path, or what is in it.

    Raises TrustError for what is no key file of ours, and when the two are different keys.
    """
    own, trusted = _read(private_key, "private_key"), None if ca == TRUST_ALL else _read(ca, "ca")
    if own is not None and trusted is not None and own != trusted:
        raise TrustError("private_key and ca are different keys, but both ends of a job use the same one. " + _HOW)
    return own or trusted


def _read(given: "bytes | Path | str | None", what: str) -> Keys | None:
    if given is None:
        return None
    if isinstance(given, bytes):
        return Keys.from_text(given, what)
    if isinstance(given, Path):
        try:
            return Keys.load(given)
        except FileNotFoundError:
            raise TrustError(f"{what}: there is no key file {given}. {_HOW}") from None
    known = "the path of a key file, its content as bytes" + (f", or {TRUST_ALL!r}" if what == "ca" else "")
    raise TrustError(f"{what}={given!r} is none of: {known}")


def check_trust(endpoint: Endpoint | str, keys: Keys | None) -> None:
    """Raises TrustError for a TCP endpoint without a key, unless it means this machine alone."""
    try:
        require_keys(str(endpoint), keys, True)
    except TrustError:
        raise TrustError(
            f"{endpoint} needs a key: ca={TRUST_ALL!r} without one is honoured only for ipc:// and loopback addresses, "
            f"since whoever connects to a worker runs code there. {_HOW}"
        ) from None


def numeric(endpoint: Endpoint) -> Endpoint:
    """The endpoint with an IP address for its host name, IPv4 first. Blocks for the look-up; raises AddressError."""
    if endpoint.scheme != "tcp":
        return endpoint
    try:
        ipaddress.ip_address(endpoint.host)
        return endpoint
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(f"{endpoint}: the name {endpoint.host} cannot be resolved here: {error}") from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return Endpoint("tcp", host=str(found[0][4][0]), port=endpoint.port)


def local_name(endpoint: Endpoint) -> Endpoint:
    """`localhost` as an address, so that it is known to be this machine; other names stay."""
    return numeric(endpoint) if endpoint.host == "localhost" else endpoint
