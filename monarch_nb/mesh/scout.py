"""Asking host agents who they are, before anything depends on them."""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from monarch_nb.host import protocol as p
from monarch_nb.transport import Keys, Node, Parcel, TransportError, TrustError, UnreachableError, greet, require_keys
from monarch_nb.wire import Header, Kind

_REFUSALS = 3  # handshakes that fail, one after the other: a listener that is busy may cut off one
_PAUSE_S = 0.1

Found = p.HostState | TransportError


def introduce(
    endpoints: Sequence[str], keys: Keys | None, *, insecure_loopback: bool = False, timeout: float = 10.0
) -> list[Found]:
    """Who answers at each endpoint, or what is wrong there. Blocks up to `timeout` seconds, and a little.

    A refused connection is tried again until then. Raises TrustError for an endpoint that may not be used without keys.
    """
    for endpoint in endpoints:
        require_keys(endpoint, keys, insecure_loopback)
    deadline = time.monotonic() + timeout
    with ThreadPoolExecutor(min(32, len(endpoints) or 1), "monarch-scout") as pool:
        wrong = list(pool.map(lambda endpoint: _look(endpoint, keys, deadline), endpoints))
    open_ones = {number: endpoint for number, endpoint in enumerate(endpoints) if wrong[number] is None}
    found = _Round(open_ones, keys, insecure_loopback).run(max(1.0, deadline - time.monotonic())) if open_ones else {}
    return [found[number] if error is None else error for number, error in enumerate(wrong)]


def _look(endpoint: str, keys: Keys | None, deadline: float) -> TransportError | None:
    """What is wrong at an endpoint, as far as it can be told without showing a key."""
    while True:
        left = deadline - time.monotonic()
        try:
            mechanism = greet(endpoint, min(5.0, max(0.2, left)))
        except UnreachableError as error:
            if "nobody listens" in str(error) and left > _PAUSE_S:
                time.sleep(_PAUSE_S)
                continue
            return UnreachableError(f"{error}. {_HOW_TO_START}")
        if mechanism == "NULL" and keys is not None:
            return TrustError(f"the agent at {endpoint} takes part without a key: start it again with --key FILE")
        if mechanism != "NULL" and keys is None:
            return TrustError(f"the agent at {endpoint} wants a key: pass key=, the file it was started with")
        return None


_HOW_TO_START = "Start a host agent there: python -m monarch_nb.host --tcp tcp://0.0.0.0:PORT --key FILE --keep"


class _Round:
    """One question to several agents, from an address of its own, so that it disturbs no link there is."""

    def __init__(self, endpoints: dict[int, str], keys: Keys | None, insecure_loopback: bool) -> None:
        self._endpoints = endpoints
        self._found: dict[int, Found] = {}
        self._refusals: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._node = Node(
            f"h0/q{secrets.token_hex(6)}",
            run_folders={},
            handler=self._answered,
            on_link_failed=lambda _header, _parcel, _reason: None,
            on_connection=self._connection,
            keys=keys,
            insecure_loopback=insecure_loopback,
        )

    def run(self, timeout: float) -> dict[int, Found]:
        """All answers."""
        self._node.start()
        try:
            question = Parcel([p.encode(p.Done())])
            for number, endpoint in self._endpoints.items():
                self._node.learn(f"x{number}", endpoint)
                header = Header(Kind.CONTROL, "", self._node.address, method="agent.status", port=number + 1)
                self._node.send_to_whoever(f"x{number}", header, question)
            with self._changed:
                self._changed.wait_for(lambda: len(self._found) == len(self._endpoints), timeout)
        finally:
            self._node.close(0.1)  # with the acknowledgements
        for number, endpoint in self._endpoints.items():
            late = UnreachableError(f"the agent at {endpoint} has not answered within {timeout:.0f} s")
            self._found.setdefault(number, late)
        return self._found

    def _settle(self, number: int, found: Found) -> None:
        with self._changed:
            self._found.setdefault(number, found)
            self._changed.notify_all()

    def _answered(self, header: Header, parcel: Parcel) -> None:
        number = header.port - 1
        if header.kind != Kind.CONTROL or number not in self._endpoints:
            return
        try:
            self._settle(number, p.decode(bytes(parcel.frames[0]), p.HostState))
        except msgspec.MsgspecError as error:
            self._settle(number, UnreachableError(f"{self._endpoints[number]} speaks another dialect: {error}"))

    def _connection(self, address: str, up: bool, word: str) -> None:
        if word != "refused":
            return
        number = int(address.partition("/")[0][1:])
        self._refusals[number] += 1
        if self._refusals[number] >= _REFUSALS:
            self._settle(
                number,
                TrustError(
                    f"the agent at {self._endpoints[number]} does not accept this key: pass the very file that it was "
                    "started with (--key)"
                ),
            )
