"""`Node`: sends and receives all messages of a process."""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from monarch_nb._private import open_private
from monarch_nb.gpu import announce, announced
from monarch_nb.routing.actions import LinkConfig
from monarch_nb.settings import settings
from monarch_nb.transport import interrupts, shared, tcp
from monarch_nb.transport.errors import TransportError, TrustError
from monarch_nb.transport.keys import Keys, KeyStep, require_keys
from monarch_nb.transport.links import Connection, Links
from monarch_nb.transport.parcel import Parcel, missed, reason_parcel, returned, snapshot
from monarch_nb.transport.pool import Loans, Pool
from monarch_nb.transport.reader import Reader
from monarch_nb.transport.shared import available
from monarch_nb.transport.streams import Message, UnixListener
from monarch_nb.transport.tcp.endpoints import Limits, bound_at, ipc_endpoint, spare_descriptors
from monarch_nb.wire import OutFrame, agent_of, parse_address
from monarch_nb.wire.header import Header, Kind

if TYPE_CHECKING:
    from monarch_nb.transport.tcp.sockets import Socket

log = logging.getLogger("monarch_nb.transport")
_EXEMPT = frozenset(
    {Kind.REPLY, Kind.FOLDED, Kind.CONTROL, Kind.RETURNED, Kind.GIVEN_BACK}
)  # waiting for credits here could deadlock
_MAX_HOPS = 8  # relays a message passes at most
_ANYBODY = "*"  # as a destination: any receiver

Handler = Callable[[Header, Parcel], None]
LinkFailed = Callable[[Header, Parcel, str], None]


class SocketFile:
    """The file of a listening unix socket, which libzmq leaves behind."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = path.lstat().st_ino

    def remove(self) -> None:
        """Removes the file, unless another process listens there by now."""
        with contextlib.suppress(OSError):
            if self._path.lstat().st_ino == self._inode:
                self._path.unlink()


def private_folder(folder: Path) -> None:
    """Creates a run folder that nobody else can enter, or checks that it is one. Raises TrustError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    try:
        os.close(open_private(folder))
    except PermissionError as error:
        raise TrustError(str(error)) from None


class Node:
    """A process's address on the network.

    `run_folders` are the folders of the hosts on this machine; the process listens in its own host's, if it is
    among them. `agent` takes messages without another route. `tcp_bind` (needs `keys`) makes it listen on TCP too,
    `tcp_bound` instead by a socket that is bound already, given as its descriptor.
    `handler`, `on_link_failed` (a message of this process will never arrive, and why) and `on_connection` (a TCP peer's
    address, whether it is connected, a detail) are called on the reader thread, the latter two also from `forget` and
    `close`; `on_first_dial` (a process on this machine is dialled for the first time) on any: they are quick, and run
    no user code. All methods may be called from any thread.
    """

    def __init__(
        self,
        address: str,
        *,
        run_folders: Mapping[str, Path],
        agent: str | None = None,
        handler: Handler,
        on_link_failed: LinkFailed,
        keys: Keys | None = None,
        tcp_bind: str | None = None,
        tcp_bound: int | None = None,
        insecure_loopback: bool = False,
        on_connection: Connection | None = None,
        on_first_dial: Callable[[str], None] | None = None,
        config: LinkConfig | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.address = address
        self.host, self.name, *_ = parse_address(address)
        self.tcp_endpoint: str | None = None  # endpoint for others, once started
        self.garbage = 0  # number of malformed messages that were dropped
        self._own_folder = run_folders.get(self.host)
        self._handler, self._on_link_failed, self._on_first_dial = handler, on_link_failed, on_first_dial
        self._keys, self._insecure_loopback = keys, insecure_loopback
        self._tcp_bind, self._tcp_bound = tcp_bind, tcp_bound
        self._limits = limits or Limits()
        config = config or LinkConfig()
        self._portable = not available()
        self._has_gpu = False  # has a GPU and has announced it
        self._gpu_peers: dict[str, bool] = {}
        if settings.explicit("shared_memory_threshold"):
            shared.threshold = settings.shared_memory_threshold
        self._reader = Reader(f"monarch-nb-{self.name}", config.tick)
        self._pool = Pool(self._reader.busy)
        self._loans = Loans(address, self._pool, self._reader, self.send)
        self._links = Links(
            address,
            agent,
            self,
            reader=self._reader,
            keys=keys,
            insecure_loopback=insecure_loopback,
            portable=self._portable,
            config=config,
            limits=self._limits,
            on_connection=on_connection,
        )
        for host, folder in run_folders.items():
            self._links.learn(host, None, folder, None, None)
        self._listener: UnixListener | None = None
        self._file: SocketFile | None = None
        self._tcp: tcp.TcpListener | None = None
        self._state_lock = threading.Lock()
        self._state = "new"

    @property
    def incarnation(self) -> int:
        """The number of this process among those at its address, one after the other; later ones are larger."""
        return self._links.incarnation

    @property
    def run_folder(self) -> Path:
        """The folder in which this process listens."""
        assert self._own_folder is not None
        return self._own_folder

    def announce_gpu(self) -> None:
        """Announces this process's GPUs to other processes of the host, if it may use any."""
        self._has_gpu = not self._portable and announce(self.run_folder, self.name)

    def shares_gpu(self, address: str) -> bool:
        """Returns whether a process sees the same GPUs as this one, so that files of a GPU can be sent to it."""
        if not self._has_gpu or self._own_folder is None:
            return False
        host, name, *_ = parse_address(address)
        if host != self.host:
            return False
        shared = self._gpu_peers.get(name)
        if shared is None:
            shared = self._gpu_peers[name] = announced(self._own_folder, name)
        return shared

    # lifecycle

    def start(self) -> None:
        """Listens and starts to read. Raises TrustError, DescriptorLimitError or TransportError, leaving nothing."""
        if self._tcp_bound is not None:
            self._tcp_bind = bound_at(self._tcp_bound)
        if self._tcp_bind is not None:
            require_keys(self._tcp_bind, self._keys, self._insecure_loopback)
        with self._state_lock:
            if self._state != "new":
                raise TransportError(f"this node is {self._state}")
            self._state = "started"
        try:
            self._listen()
        except BaseException:
            self.close(0)
            raise
        self._reader.start()
        _alive.add(self)

    def _listen(self) -> None:
        spare_descriptors("the message layer")
        if self._own_folder is not None:
            path = ipc_endpoint(self._own_folder, self.name).removeprefix("ipc://")
            private_folder(self._own_folder)
            self._listener = UnixListener(path, self._limits.backlog, self._reader, self._links.accept)
            self._file = SocketFile(Path(path))
        if self._tcp_bind is not None:
            self._listen_tcp(self._tcp_bind, self._keys)

    def _listen_tcp(self, bind: str, keys: Keys | None) -> str:
        self._tcp = tcp.TcpListener(
            self._links.context(),
            bind,
            keys,
            reader=self._reader,
            limits=self._limits,
            bound=self._tcp_bound,
            received=self._received,
        )
        self.tcp_endpoint = self._tcp.endpoint
        return self._tcp.endpoint

    def listen(self, bind: str, keys: Keys | None, insecure_loopback: bool = False) -> str:
        """Listens on TCP from now on, too; returns the endpoint, with its port. Once only.

        Raises TrustError without keys, TransportError for an unavailable endpoint.
        """
        require_keys(bind, keys, insecure_loopback)
        with self._state_lock:
            if self._state != "started" or self._tcp is not None:
                raise TransportError(self._why_not() if self._tcp is None else "this node listens already")
            return self._listen_tcp(bind, keys)

    def close(self, linger_s: float = 1.0) -> None:
        """Stops; blocks up to `linger_s` seconds until sent messages are acknowledged. Leaves no thread or file."""
        with self._state_lock:
            if self._state in ("closed", "inherited"):
                return
            started, self._state = self._state == "started", "closed"
        self.flush()
        end = time.monotonic() + linger_s
        while started and self._reader.running and not self._links.settled and time.monotonic() < end:
            time.sleep(0.005)
        self._reader.stop()
        self._links.close(int(linger_s * 1000))
        self._reader.run_calls()
        if self._tcp is not None:
            self._tcp.stop()
        self._reader.run_calls()
        if self._file is not None:
            self._file.remove()
        if self._listener is not None:
            self._listener.close()
        if self._tcp is not None:
            self._tcp.close(now=linger_s == 0)
        self._links.destroy()
        self._pool.close()
        self._reader.close()

    # sending

    def snapshot(self, frames: Sequence[OutFrame]) -> Parcel:
        """Copies buffers (frame 0 is the pickle stream) into a parcel that may be sent many times."""
        return snapshot(frames, portable=self._portable, hold=self._pool.holding)

    def send(self, header: Header, parcel: Parcel, *, lane: int = 0) -> None:
        """Sends a message. Blocks while the receiver is behind by more than its window; Ctrl-C ends that.

        Raises TransportError when the destination is gone or no route to it is known.
        """
        if self._state != "started":
            raise TransportError(self._why_not())
        if interrupts.inside():  # a finalizer within another send, which it must not disturb
            self._reader.call_soon(self._send_later, header, parcel.clone(), lane)
        elif header.dst == self.address:
            self._reader.call_soon(self._handler, header, parcel.clone())
        else:
            exempt = lane != 0 or header.kind in _EXEMPT or threading.get_ident() == self._reader.ident
            self._links.to(header.dst, lane).send(header, parcel, exempt)

    def begin(self, address: str) -> None:
        """Dials a process before there are messages for it: its own messages need not wait for this node to listen."""
        self._reader.call_soon(self._links.begin, address)

    def flush(self) -> None:
        """Writes messages held back in bursts, before the calling thread waits. Thread-safe; never blocks."""
        if self._reader.bursts.holders:
            if not interrupts.inside():  # else this is a finalizer within a write, which the reading thread completes
                interrupts.uninterrupted(self._reader.bursts.flush)
        else:
            self._reader.bursts.pauses += 1

    def send_to_whoever(self, target: str, header: Header, parcel: Parcel, *, lane: int = 1) -> None:
        """Sends to any process at the known place of host `target`, to learn its name. Never blocks."""
        self._links.to(agent_of(target), lane).send(msgspec.structs.replace(header, dst=_ANYBODY), parcel, True)

    def _send_later(self, header: Header, parcel: Parcel, lane: int) -> None:
        try:
            self.send(header, parcel, lane=lane)
        except TransportError as error:
            self.undeliverable(header, parcel, str(error))

    def consumed(self, parcel: Parcel) -> None:
        """Records that the application took a message: its sender may send more."""
        origin, parcel.origin = parcel.origin, None
        if origin is not None:
            peer, charge, incarnation = origin
            if interrupts.inside():
                self._reader.call_soon(peer.consumed, charge, incarnation)
            else:
                peer.consumed(charge, incarnation)

    def _why_not(self) -> str:
        if self._state == "inherited":
            return (
                "this process was forked from one that is connected, and cannot use its connections: start it with "
                'multiprocessing.get_context("spawn"), or call shutdown_context() in it first and spawn processes anew'
            )
        return f"this node is {self._state}"

    # membership

    def learn(
        self,
        target: str,
        endpoint: str | None = None,
        run_folder: Path | None = None,
        via: str | None = None,
        *,
        keys: Keys | None = None,
        insecure_loopback: bool = False,
        incarnation: int = 0,
    ) -> None:
        """Records a route to a host (or process, "host/name"): a TCP endpoint, a run folder here, or another process.

        `keys` are for this host alone; by default this node's own are used. `incarnation` is that of its
        agent now: links to earlier ones are renewed. Raises TrustError for a TCP endpoint without any keys.
        """
        self._links.learn(target, endpoint, run_folder, via, (keys, insecure_loopback), incarnation)

    def change_keys(self, step: KeyStep, old: Keys, new: Keys) -> None:
        """Takes one step of a change from one pair to another, which all processes of a job take together.

        "expect": peers that refuse one pair are dialled with the other. "use": `new` is used to dial from now on, and a
        node that listens with `old` soon accepts only peers with `new`: connections that others had dialled are cut,
        they redial, and no sent message is lost. "done": `old` is no longer used to dial. "cancel": `new` is not used
        to dial.
        """
        self._links.change_keys(step, old, new)
        if step == "use":
            self._reader.call_soon(self._listen_with, old, new)

    def _listen_with(self, old: Keys, new: Keys) -> None:
        if self._tcp is not None and self._tcp.keys == old:
            self._tcp.use(new, self._links.cut_inbound)

    def connected(self, target: str) -> bool:
        """Returns whether the TCP connection for urgent messages to a process is up, by libzmq's heartbeats.

        A connection that the peer dialled is known to be gone only after a write to it. False for processes that
        are reached otherwise, or were never written to.
        """
        return self._links.connected(target)

    def never_replied(self, address: str) -> bool:
        """Returns whether a process was written to and has never replied: it may not exist."""
        return self._links.never_replied(address)

    def forget(self, target: str, reason: str, incarnation: int = 0) -> None:
        """Records the end of a process (or host): closes its connections, and reports unacknowledged messages.

        With the `incarnation` of the agent that has ended, a later known incarnation stays.
        """
        self._links.forget(target, reason, incarnation)

    def settled(self, function: Callable[..., object], *args: object) -> None:
        """Runs `function(*args)` once messages that have arrived by now are read; some may still be unread."""
        self._reader.settled(function, *args)

    # receiving; the reader thread calls these

    def _received(self, router: "Socket", routing_id: bytes, messages: Sequence[Message]) -> None:
        peer = self._links.incoming(router, routing_id)
        if peer is not None:
            self._links.receive(peer, messages)

    def arrived(self, header: Header, parcel: Parcel) -> None:
        """Handles a whole message, for this process or to be forwarded."""
        if header.kind == Kind.GIVEN_BACK:
            self._loans.returned(header, parcel)
        elif header.dst == self.address or header.dst == _ANYBODY:
            try:
                self._handler(header, parcel)
            except Exception:
                log.exception("monarch_nb: error while a message was taken in")
        else:
            self._pass_on(header, parcel)

    def _pass_on(self, header: Header, parcel: Parcel) -> None:
        parcel.hops += 1
        if parcel.hops > _MAX_HOPS:
            reason = f"went through {_MAX_HOPS} processes without finding {header.dst}"
            self.undeliverable(header, parcel, reason)
            self.consumed(parcel)
            return
        lane = parcel.lane
        try:
            peer = self._links.to(header.dst, lane)
            peer.relay(header, parcel, lane != 0 or header.kind in _EXEMPT, lambda: self.consumed(parcel))
        except TransportError as error:
            self.undeliverable(header, parcel, str(error))
            self.consumed(parcel)

    def undeliverable(self, header: Header, parcel: Parcel, reason: str) -> None:
        """Reports to the sender: for a call of ours directly, for one of another process by a RETURNED message."""
        if header.kind == Kind.GIVEN_BACK:
            return  # the lender forgets the loan in time
        if header.src == self.address:
            self._on_link_failed(header, parcel, reason)
        elif header.kind != Kind.RETURNED and self._state == "started":
            body = reason_parcel(reason)
            report = (missed if header.kind == Kind.REPLY else returned)(header, self.address)
            self._reader.call_soon(self._try_to_report, report, body)

    def _try_to_report(self, header: Header, parcel: Parcel) -> None:
        try:
            self.send(header, parcel, lane=1)
        except TransportError as error:
            log.info("monarch_nb: could not return a message to %s: %s", header.dst, error)

    def lend(self, parcel: Parcel, to: str) -> int:
        """Returns a number for the loan of a message's memory files to `to`; 0 if they are given for good."""
        return self._loans.lend(parcel, to)

    def give_back(self, to: str, number: int) -> None:
        """Returns a loan to `to`, which is notified soon. Thread-safe, also in a finalizer."""
        self._loans.give_back(to, number)

    def first_dial(self, address: str) -> None:
        """Reports that a process on this machine is dialled for the first time: others find out whether it exists."""
        if self._on_first_dial is not None:
            self._on_first_dial(address)

    def dropped(self, sender: str, reason: object) -> None:
        """Counts malformed messages and logs them, ever more rarely."""
        self.garbage += 1
        if self.garbage & (self.garbage - 1) == 0:  # the 1st, 2nd, 4th, 8th...
            log.warning("monarch_nb: dropped a message from %s: %s (%d dropped so far)", sender, reason, self.garbage)

    def _inherit(self) -> None:
        self._state = "inherited"
        _inherited.append(self)  # never finalized: the sockets belong to the parent


_alive: "weakref.WeakSet[Node]" = weakref.WeakSet()
_inherited: list[Node] = []


def _forked() -> None:
    for node in list(_alive):
        node._inherit()
    _alive.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
