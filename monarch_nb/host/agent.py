"""The host agent process: its own session, no user code, no pickles; one loop that runs the processes of a host."""

import contextlib
import logging
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from monarch_nb._package import __version__, open_streams
from monarch_nb.host import folders, verbs
from monarch_nb.host import protocol as p
from monarch_nb.host.casting import Caster
from monarch_nb.host.gateway import GatewayService
from monarch_nb.host.gpus import MpsDaemon
from monarch_nb.host.introduction import ask_controller
from monarch_nb.host.key_change import AgentKeys
from monarch_nb.host.linux import become_subreaper, close_other_fds, has_pidfd, name_process
from monarch_nb.host.loop import READ, Loop
from monarch_nb.host.mesh_leases import NOBODY, Idleness, MeshLeaseService, OwnerLeases
from monarch_nb.host.options import UNUSED, Options, parse, ready_text
from monarch_nb.host.preemption import END, Preemption
from monarch_nb.host.procs.children import Child, Children, ProcStopper
from monarch_nb.host.procs.liveness import LivenessMonitor
from monarch_nb.host.procs.reaper import end_all_descendants
from monarch_nb.host.procs.template import EarlyTemplates, can_fork_early, fork_early
from monarch_nb.host.protocol import AgentReady, Exited, StartedProc, observers
from monarch_nb.host.sender import AgentSender
from monarch_nb.host.service import AgentService, PendingProcs
from monarch_nb.host.verbs import PROC_EXITED, PROC_STARTED
from monarch_nb.logs.tailer import LogTailer
from monarch_nb.settings import TRAVELS_IN, settings
from monarch_nb.transport import Keys, Node, Parcel, TransportError
from monarch_nb.wire import REPLY, agent_of, host_of, parse_address
from monarch_nb.wire.header import Flags, Header, Kind

log = logging.getLogger(__name__)

_MOST_FDS = 65536
_LINGER_S = 0.3  # for last messages to processes that may have ended
_ORPHANED = "the process that owned it is gone"
_STARTER_ENDED = "the process that had started the host agent has ended"
_ORPHANED_TIMEOUT_S = 0.5  # between SIGTERM and SIGKILL once the owner has ended
_PAUSE_S = 0.5  # between attempts; grows to
_PAUSE_MAX_S = 5.0
_ASK_S = 2.0


class Dialler:
    """Finds the controller at an endpoint and joins it, and any later one at that endpoint."""

    def __init__(self, node: Node, sender: AgentSender, endpoint: str, keys: AgentKeys, insecure_loopback: bool,
                 state: Callable[[], p.HostState], soon: Callable[[Callable[[], None]], None]) -> None:  # fmt: skip
        self._node = node
        self._sender = sender
        self._endpoint = endpoint
        self._keys = keys
        self._insecure = insecure_loopback
        self._state = state
        self._soon = soon
        self._controller = ""
        self._cut = threading.Event()

    def start(self) -> None:
        """Starts the thread that dials."""
        threading.Thread(target=self._run, name="monarch-dial", daemon=True).start()

    def cut(self, address: str) -> None:
        """Handles a broken connection; any thread."""
        if address == self._controller:
            self._cut.set()

    def _run(self) -> None:
        pause = _PAUSE_S
        while True:
            for keys in self._keys.candidates:
                try:
                    controller = ask_controller(self._endpoint, keys, self._state(), insecure_loopback=self._insecure,
                                         timeout=_ASK_S)  # fmt: skip
                    problem = controller.error
                    break
                except TransportError as error:
                    controller, problem = p.IdentifyReply(), str(error)
            if problem:
                log.info("no controller to join: %s", problem)
                self._cut.wait(pause)
                pause = min(_PAUSE_MAX_S, 1.5 * pause)
                continue
            pause = _PAUSE_S
            self._cut.clear()
            self._join(controller.address)
            self._cut.wait()

    def _join(self, address: str) -> None:
        if self._controller not in ("", address):
            self._node.forget(self._controller, "another controller has taken its place")
        self._controller = address
        self._node.learn(address, self._endpoint)
        self._soon(lambda: self._announce(address))

    def _announce(self, address: str) -> None:
        self._sender.post(address, verbs.HOST_JOINS, self._state())


class HostAgent:
    """Combines the parts of an agent; `run()` returns once it has ended and nothing of it is left."""

    def __init__(self, options: Options, cord: tuple[int, int], early: EarlyTemplates | None = None) -> None:
        self.address = agent_of(options.host)
        self._options = options
        self._folder = options.run_folder
        self._lock = folders.hold(self._folder)
        self._loop = Loop()
        # Every process that must end with this one has the other end; the kernel closes ours whatever ends us.
        self._cord, self._cord_end = cord
        keys = None if options.key is None else Keys.load_or_create(options.key)
        self._node = self._make_node(keys)
        self._keys = AgentKeys(self._node, keys, options.key, self._other_users)
        self._sender = AgentSender(self._node, self.address)
        self._leases = OwnerLeases(options.lease_s)
        self._idleness = Idleness(options.unused_s)
        self.unused = False  # whether it ends because it was not used
        self._logs = LogTailer(self._sender, self._folder)
        self._children = Children(self._loop, self._folder, dict(os.environ), self._cord, self, early)
        self._stopper = ProcStopper(self._loop, self._children, self._sender)
        self._liveness = LivenessMonitor(self._loop, self._children, self._sender)
        self._gateway = GatewayService(self._node, self._sender, self._keys, options.insecure_loopback, self._loop.post)
        self._pending = PendingProcs()
        self._mps = MpsDaemon(options.host, self._folder, self._cord, self._loop.post)
        self._caster = Caster(self._node, self._sender, self._call_later, time.monotonic)
        self._service = AgentService(
            host=options.host, folder=self._folder, children=self._children, stopper=self._stopper,
            leases=self._leases, logs=self._logs, sender=self._sender, standalone=options.owner_fd is None,
            incarnation=self._node.incarnation,
            learn=self._learn, forget=self._host_lost, follow=self._follow, end=self.end,
            call_later=self._loop.call_later, gateway=self._gateway, keeper=self._keeper,
            pending=self._pending, replaced=self._replaced, caster=self._caster, keys=self._keys, mps=self._mps,
        )  # fmt: skip
        self._dialler: Dialler | None = None
        if options.dial is not None:
            self._dialler = Dialler(self._node, self._sender, options.dial, self._keys, options.insecure_loopback,
                                    self._service.introduction, self._loop.post)  # fmt: skip
        self._preemption = Preemption(self._sender, service=self._service, call_later=self._loop.call_later,
                                      give_up=self._give_up)  # fmt: skip
        self._watching_leases = False
        self._followed: dict[str, int] = {}  # pidfds of owners on this machine that are not processes of this host
        self._ending = False
        self._ownerless = False  # its starter, which was to end it, has ended

    def _keeper(self, grant: Callable[[str], None]) -> MeshLeaseService:
        return MeshLeaseService(
            children=self._children, stopper=self._stopper, sender=self._sender, logs=self._logs,
            call_later=self._loop.call_later, changed=self._end_if_orphaned, grant=grant,
            notices=lambda since: self._preemption.since(since),
        )  # fmt: skip

    def run(self, say_ready: Callable[[AgentReady], None]) -> None:
        """Serves until the owner has ended or an end is requested."""
        self._node.start()
        if self._options.owner_fd is not None:
            self._loop.register(self._options.owner_fd, READ, self._owner_pipe)
        signal.signal(signal.SIGTERM, lambda *_: self._loop.post(self._preemption.terminated))
        for signum in (END, signal.SIGINT)[: 2 if self._options.terminal else 1]:
            signal.signal(signum, lambda *_: self._loop.post(lambda: self._give_up("the host agent was terminated")))
        if self._options.prewarm:
            self._children.forker.prewarm()
        say_ready(AgentReady(host=self._options.host, pid=os.getpid(), address=self.address,
                        run_folder=str(self._folder),
                        endpoint=self._node.tcp_endpoint, python=sys.version.split()[0],
                        version=__version__, incarnation=self._node.incarnation))  # fmt: skip
        if self._dialler is not None:
            self._dialler.start()
        self._end_if_unused()
        try:
            self._loop.run()
        finally:
            self._service.keeper.agent_ends("its host agent was ended")
            self._children.close()
            self._mps.close()
            self._node.close(_LINGER_S)
            end_all_descendants()  # children of templates become children of this process when those end
            if not self._options.keep_folder:
                folders.remove_run_folder(self._folder)

    def end(self, reason: str, timeout_s: float = 0.0,
            done: Callable[[list[Exited]], None] = lambda _exits: None) -> None:  # fmt: skip
        """Stops every process, then the agent."""
        self._ending = True

        def all_gone(exits: list[Exited]) -> None:
            done(exits)
            self._loop.call_later(0.0, self._loop.stop)

        self._stopper.stop(self._children.alive(), timeout_s=timeout_s, grace_s=_ORPHANED_TIMEOUT_S, reason=reason,
                           done=all_gone)  # fmt: skip

    def _give_up(self, reason: str) -> None:
        """Ends the host without a request of remote owners of processes here, which counts as a failure for them."""
        for child in self._children.alive():
            child.evicted = True
        self.end(reason)

    # Events of processes.

    def started(self, child: Child) -> None:
        """Reports a process that has started."""
        if self._ending and not child.stop_wanted:
            self._children.signal(child, signal.SIGKILL)
        self._liveness.start()
        self._sender.post_all(observers(child.watchers, child.spec.owner), PROC_STARTED, StartedProc(
            address=child.address, pid=child.pid, how=child.how, why=child.why, log=child.log_file,
            seconds=time.monotonic() - child.requested_at))  # fmt: skip

    def exited(self, child: Child) -> None:
        """Reports at once to its watchers that a process has ended, or could not be started.

        If the host ends with it, messages to it get no answer: their senders are notified of the loss of the host.
        """
        assert child.exit is not None
        if self._ending and child.evicted:
            child.exit = msgspec.structs.replace(child.exit, host_ends=True)
        else:
            self._caster.proc_gone(child.address, child.exit.reason)  # first: later casts are sent back
        self._sender.post_all(self._children.reportable(child.watchers), PROC_EXITED, child.exit)
        if not child.exit.host_ends:
            self._node.forget(child.address, child.exit.reason)
        folders.remove_socket(self._folder, child.address)  # one that was killed could not
        self._logs.ended(child.address)
        self._service.keeper.exited(child)
        self._service.owner_gone(child.address, child.exit.reason)
        self._stopper.child_ended(child)
        self._end_if_orphaned()

    def pong(self, child: Child) -> None:
        """Reports a process that answers a ping."""
        self._liveness.pong(child)

    # Requests.

    def _handle(self, header: Header, parcel: Parcel) -> None:
        """Passes a message on; on the node's reader thread."""
        if header.kind == Kind.CONTROL:
            body = bytes(parcel.frames[0]) if parcel.frames else b""
            if header.method == REPLY:
                self._sender.replied(header, body)
            self._loop.post(lambda: self._serve(header, body))
        elif header.kind == Kind.CAST:
            self._caster.cast(header, parcel)
        elif header.kind in (Kind.REPLY, Kind.FOLDED, Kind.RETURNED):
            self._caster.reply(header, parcel)
        self._node.consumed(parcel)

    def _serve(self, header: Header, body: bytes) -> None:
        self._service.handle(header, body)
        self._watch_leases()
        self._end_if_orphaned()

    def _link_failed(self, header: Header, _parcel: Parcel, reason: str) -> None:
        """Handles an undelivered message; on the reader thread, or on the loop's after `forget`."""
        log.debug("%s to %s was lost: %s", header.method, header.dst, reason)
        if header.src == self.address and (header.kind in (Kind.CALL, Kind.CAST) or header.flags & Flags.TO_ENGINES):
            self._caster.lost(header, reason)

    def _call_later(self, seconds: float, call: Callable[[], None]) -> None:
        def arm() -> None:
            self._loop.call_later(seconds, call)

        self._loop.post(arm)

    def _owner_pipe(self, _events: int) -> None:
        assert self._options.owner_fd is not None
        if data := os.read(self._options.owner_fd, 4096):
            self._preemption.receive(data)
            return
        self._loop.unregister(self._options.owner_fd)
        self._node.settled(self._loop.post, self._owner_ended)  # its last messages may still be unread

    def _owner_ended(self) -> None:
        self._ownerless = True
        alive = self._children.alive()
        keeper = self._service.keeper
        cared_for = {NOBODY, *keeper.attached_controllers, *(child.address for child in alive)}
        owners = dict.fromkeys([*keeper.holders, *(child.spec.owner for child in alive)])
        by = self._preemption.by
        if self._options.bound:
            self._give_up(f"{_STARTER_ENDED}{f' ({by})' if by else ''}")
            return
        for child in alive:  # remote owners live on, and get the reason
            if child.spec.owner not in cared_for:
                child.stop_reason = child.stop_reason or f"{_STARTER_ENDED}{f' ({by})' if by else ''}"
        for owner in owners:
            if owner not in cared_for:
                self._service.owner_gone(owner, _ORPHANED)
        self._end_if_orphaned()

    def _end_if_orphaned(self) -> None:
        """Ends an agent whose starter has ended once no other owner has processes here."""
        keeper = self._service.keeper
        if self._ownerless and not (
            self._ending or keeper.waits or keeper.attached_controllers.intersection(self._leases.owners)
        ):
            self._give_up(_ORPHANED)
        self._preemption.notify_users()

    def _host_lost(self, host: str, reason: str, incarnation: int) -> None:
        self._node.forget(host, reason, incarnation)
        self._caster.host_lost(host, reason)

    def _stranger(self, address: str) -> None:
        """Handles the first message to a process (reader thread); if that is never started, senders are notified."""
        wait = settings.message_delivery_timeout

        def meet() -> None:
            if not parse_address(address).is_proc or self._children.find(address) is not None:
                return
            if self._pending.expect(address):
                self._loop.call_later(wait, look)
            else:
                self._replaced(address)

        def look() -> None:
            self._pending.expire(address)
            if self._children.find(address) is None and self._node.never_replied(address):
                self._node.forget(address, f"no such process: none was started on host {self._options.host} "
                                           f"within {wait:g} s (message_delivery_timeout)")  # fmt: skip

        self._loop.post(meet)

    def _replaced(self, address: str) -> None:
        """Handles that a process will never start here, since its rank has a later incarnation."""
        self._node.forget(address, f"it is over: its rank was started anew on host {self._options.host}")

    def _follow(self, owner: str, pid: int) -> None:
        if owner in self._followed or not has_pidfd():
            return
        try:
            fd = self._followed[owner] = os.pidfd_open(pid)
        except OSError:
            return  # its lease covers it

        def report() -> None:
            self._service.owner_ended(owner, "its process has ended")
            self._end_if_orphaned()

        def on_exit(_events: int) -> None:
            self._loop.unregister(fd)
            os.close(self._followed.pop(owner))
            self._node.settled(self._loop.post, report)

        self._loop.register(fd, READ, on_exit)

    def _end_if_unused(self) -> None:
        """Ends an agent that must not outlive its last controller for long."""
        keeper, limit = self._service.keeper, self._idleness.limit
        used = bool(self._leases or self._followed or keeper.waits or self._children.alive())
        if self._ending or limit is None:
            return
        if self._idleness.over(used, time.monotonic()):
            self.unused = True
            self.end(f"no program has used this host for {limit:g} s")
            return
        self._loop.call_later(self._idleness.pace, self._end_if_unused)

    def _watch_leases(self) -> None:
        if self._leases and not self._watching_leases:
            self._watching_leases = True
            self._loop.call_later(self._leases.pace, self._check_leases)

    def _check_leases(self) -> None:
        self._watching_leases = False
        now = time.monotonic()
        for owner in self._leases.owners:
            # Heartbeats, answered by libzmq's own thread, hold the connection: the owner may be busy.
            if self._node.connected(owner):
                self._leases.renew(owner, now)
        for owner in self._leases.expired(now):
            for child in self._children.alive():
                child.evicted |= child.spec.owner == owner  # an owner that was only asleep learns that it has lost them
            self._service.owner_gone(owner, "it was silent for longer than its lease")
            self._end_if_orphaned()
        for owner in self._leases.due(now):
            self._service.ask_after(owner)
        self._watch_leases()

    def _connection(self, address: str, up: bool, reason: str) -> None:
        """Handles a changed connection; on the node's reader thread."""
        if reason == "refused":
            log.warning("%s does not accept our key, or is not a monarch-nb process", address)
        elif not up:
            self._loop.post(lambda: self._gateway.cut(host_of(address), reason))
            if self._dialler is not None:
                self._dialler.cut(address)

    def _learn(self, host: str, endpoint: str, via: str, incarnation: int) -> None:
        if endpoint.startswith("ipc://"):
            self._node.learn(host, run_folder=Path(endpoint.removeprefix("ipc://")), via=via, incarnation=incarnation)
        else:
            self._node.learn(host, endpoint=endpoint or None, via=via, incarnation=incarnation)

    def _other_users(self, controller: str) -> tuple[str, ...]:
        """Describes the other users of this host's key: controllers, and those that may attach a detached mesh."""
        keeper = self._service.keeper
        users = {owner for owner in (*self._leases.owners, *keeper.holders) if not parse_address(owner).is_proc}
        detached = ("whoever comes back to a detached mesh",) if keeper.waits else ()
        return (*sorted(users - {controller, NOBODY}), *detached)

    def _make_node(self, keys: Keys | None) -> Node:
        options = self._options
        return Node(
            self.address, run_folders={options.host: self._folder}, handler=self._handle, tcp_bind=options.tcp,
            tcp_bound=options.tcp_fd, on_link_failed=self._link_failed,
            insecure_loopback=options.insecure_loopback,
            keys=keys, on_connection=self._connection, on_first_dial=self._stranger,
        )  # fmt: skip


def main(argv: Sequence[str], prog: str = "python -m monarch_nb.host") -> int:
    """Runs a host agent to its end. Raises nothing; errors of the start go to stderr."""
    open_streams()
    options = parse(argv, prog)
    if options.owner_fd is None:
        folders.sweep()  # nothing else sweeps where users start the agents
    settings.receive(os.environ.pop(TRAVELS_IN, ""))
    _settle(options)
    try:
        folders.make_run_folder(options.run_folder)
    except (OSError, TransportError) as error:
        sys.stderr.write(f"the host agent has no run folder: {error}\n")
        return 1
    become_subreaper()
    cord = os.pipe()
    early: EarlyTemplates | int | None = None
    if options.prewarm and can_fork_early():
        with contextlib.suppress(OSError):  # it is started at the first request then
            early = fork_early(cord[0], options.run_folder / "logs" / "template.log")
    if isinstance(early, int):
        return early  # a template, or a proc, that has ended
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    try:
        agent = HostAgent(options, cord, early)
        agent.run(lambda ready: _report_ready(options, ready))
    except TransportError as error:  # it cannot listen where it should, or has no key
        sys.stderr.write(f"{error}\n")
        _leave_nothing(options)
        return 1
    except folders.FolderInUseError as error:  # which is not removed
        sys.stderr.write(f"host {options.host} runs here: {error.strerror}. End it first, or start another host, with "
                         "another port (--tcp) or --host\n")  # fmt: skip
        return 1
    except BaseException:
        _leave_nothing(options)
        raise
    return UNUSED if agent.unused else 0


def _report_ready(options: Options, ready: AgentReady) -> None:
    text = ready_text(options, ready).encode() if options.terminal else msgspec.json.encode(ready)
    with contextlib.suppress(BrokenPipeError):  # the starter has ended, which its pipe shows as well
        os.write(options.ready_fd, text + b"\n")
    if options.ready_fd > 2:
        os.close(options.ready_fd)


def _leave_nothing(options: Options) -> None:
    """Records a failed start. An owner that still lives reads the reason in the folder, and removes it."""
    if options.owner_fd is None or options.keep_folder:
        return
    if select.select([options.owner_fd], [], [], 0)[0]:
        folders.remove_run_folder(options.run_folder)


def _settle(options: Options) -> None:
    """Leaves the terminal and the session of the starter, and closes their descriptors."""
    try:
        os.setsid()
    except PermissionError:
        pass  # already a leader
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    name_process("mnb-agent")
    close_other_fds({fd for fd in (options.owner_fd, options.ready_fd, options.tcp_fd) if fd is not None})
    if options.owner_fd is not None:
        os.set_inheritable(options.owner_fd, False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MOST_FDS if hard == resource.RLIM_INFINITY else min(hard, _MOST_FDS)
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
