"""Asking host agents for their identity, before anything depends on them."""

import queue
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from monarch_nb._deferred import futures
from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.transport import (
    Keys,
    Node,
    Parcel,
    TransportError,
    TrustError,
    UnreachableError,
    Unready,
    greet,
    require_keys,
)
from monarch_nb.wire import Done, Header, Kind, MalformedMessageError, Verb, encode_body

_REFUSALS = 3  # failed handshakes in a row: a busy listener may cut off one
_CALMS = 3  # such moments in a row
_PAUSE_S = 0.1
_GLANCE_S = 0.2  # between checks whether the answer is still needed

IntroductionResult = p.HostState | TransportError
Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)


def introduce(
    endpoints: Sequence[str],
    keys: Keys | None,
    *,
    insecure_loopback: bool = False,
    timeout: float = 10.0,
    ways: p.Hosts | None = None,
    given_up: Callable[[], bool] = lambda: False,
) -> list[IntroductionResult]:
    """Returns the host, or the error, at each endpoint. Blocks up to `timeout` seconds, and a little.

    A refused connection is tried again until then, or until it is `given_up`. Each agent is sent `ways`, if any, before
    it answers.
    Raises TrustError for an endpoint that may not be used without keys.
    """
    for endpoint in endpoints:
        require_keys(endpoint, keys, insecure_loopback)
    deadline = time.monotonic() + timeout

    def ask(endpoint: str) -> IntroductionResult:
        problem = _check(endpoint, keys, deadline, given_up)
        if problem is not None:
            return problem
        seconds = max(1.0, deadline - time.monotonic())
        question = _Question(endpoint, keys, insecure_loopback, verbs.STATUS, given_up)
        return question.ask(seconds, Done(), ways)

    with futures.ThreadPoolExecutor(min(32, len(endpoints) or 1), "monarch-scout") as pool:
        return list(pool.map(ask, endpoints))


def ask_controller(
    endpoint: str, keys: Keys | None, me: p.HostState, *, insecure_loopback: bool, timeout: float
) -> p.IdentifyReply:
    """Returns the controller that accepts hosts at an endpoint where `me` wants to join; blocks.

    Raises TransportError if there is none.
    """
    require_keys(endpoint, keys, insecure_loopback)
    deadline = time.monotonic() + timeout
    problem = _check(endpoint, keys, deadline)
    if problem is not None:
        raise problem
    seconds = max(1.0, deadline - time.monotonic())
    answer = _Question(endpoint, keys, insecure_loopback, verbs.IDENTIFY).ask(seconds, me)
    if isinstance(answer, TransportError):
        raise answer
    return answer


def _check(
    endpoint: str, keys: Keys | None, deadline: float, given_up: Callable[[], bool] = lambda: False
) -> TransportError | None:
    """Returns the error at an endpoint, as far as it shows without a key."""
    while not given_up():
        seconds = deadline - time.monotonic()
        try:
            mechanism = greet(endpoint, min(5.0, max(0.2, seconds)))
        except UnreachableError as error:
            if isinstance(error, Unready) and seconds > _PAUSE_S:
                time.sleep(_PAUSE_S)
                continue
            return UnreachableError(f"{error}. {_HOW_TO_START}")
        if mechanism == "NULL" and keys is not None:
            return TrustError(f"the agent at {endpoint} was started without a key: start it again with --key FILE")
        if mechanism != "NULL" and keys is None:
            return TrustError(
                f"the agent at {endpoint} needs a key: pass key=FILE, the key file that it was started with"
            )
        return None
    return UnreachableError(f"{endpoint} is not asked any more: {_NOT_WANTED}")


_NOT_WANTED = "whoever wanted it has given it up"
_HOW_TO_START = "Start a host agent there: monarch-nb agent --tcp tcp://0.0.0.0:PORT --key FILE --keep"


class _Question(Generic[Q, R]):
    """A request from a separate address, so that it disturbs no existing link."""

    def __init__(
        self, endpoint: str, keys: Keys | None, insecure_loopback: bool, verb: Verb[Q, R],
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._endpoint = endpoint
        self._given_up = given_up
        self._verb = verb
        self._refusals = 0
        self._answers: queue.SimpleQueue[R | TransportError | float] = queue.SimpleQueue()
        self._node = Node(
            f"h0/q{secrets.token_hex(6)}",
            run_folders={},
            handler=self._on_reply,
            on_link_failed=lambda _header, _parcel, _reason: None,
            on_connection=self._on_connection,
            keys=keys,
            insecure_loopback=insecure_loopback,
        )

    def ask(self, timeout: float, body: Q, ways: p.Hosts | None = None) -> R | TransportError:
        """Returns the answer or the error."""
        self._node.start()
        try:
            self._node.learn("there", self._endpoint)
            if ways is not None:
                ways_header = Header(Kind.CONTROL, "", self._node.address, method=verbs.HOSTS.name)
                self._node.send_to_whoever("there", ways_header, Parcel([encode_body(ways)]))
            header = Header(Kind.CONTROL, "", self._node.address, method=self._verb.name, port=1)
            self._node.send_to_whoever("there", header, Parcel([encode_body(body)]))
            deadline = time.monotonic() + timeout
            calms, calm_at = 0, 0.0
            while isinstance(answer := self._next(deadline), float):
                if answer <= calm_at:
                    continue
                # Refusals between moments at which unknown peers are accepted: a few may be a busy agent's delay.
                calms = calms + 1 if self._is_calm() else 0
                if calms == _CALMS:
                    return TrustError(
                        f"the agent at {self._endpoint} does not accept this key: pass the very file that it was "
                        "started with (--key)"
                    )
                calm_at = time.monotonic()
            return answer
        except queue.Empty:
            suffix = f": {_NOT_WANTED}" if self._given_up() else f" within {timeout:.0f} s"
            return UnreachableError(f"the agent at {self._endpoint} has not answered{suffix}")
        finally:
            self._node.close(0.1)  # with the acknowledgements

    def _next(self, deadline: float) -> R | TransportError | float:
        """Returns the next event. Raises queue.Empty at the deadline, or when the answer is no longer wanted."""
        while True:
            seconds = deadline - time.monotonic()
            try:
                return self._answers.get(timeout=max(0.0, min(seconds, _GLANCE_S)))
            except queue.Empty:
                if seconds <= _GLANCE_S or self._given_up():
                    raise

    def _is_calm(self) -> bool:
        """Returns whether it accepts other peers: then it refuses because of the key, not of too many connections."""
        try:
            return bool(greet(self._endpoint, 1.0, stay=0.5))
        except UnreachableError:
            return False

    def _on_reply(self, header: Header, parcel: Parcel) -> None:
        if header.kind == Kind.CONTROL:
            try:
                self._answers.put(self._verb.decode_reply(bytes(parcel.frames[0])))
            except (MalformedMessageError, IndexError) as error:
                self._answers.put(
                    UnreachableError(
                        f"{self._endpoint} speaks another version of the protocol ({error}): install the same "
                        "version of monarch-nb on both sides"
                    )
                )

    def _on_connection(self, address: str, up: bool, reason: str) -> None:
        if reason == "refused":
            self._refusals += 1
            if self._refusals % _REFUSALS == 0:
                self._answers.put(time.monotonic())
