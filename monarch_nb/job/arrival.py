"""The hosts of a job as they join: which have, which are missing and why; and later, how the scheduler ends them."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from monarch_nb._package import more
from monarch_nb.connect import AttachError, attach, attach_to_workers
from monarch_nb.connect.remote_host import RemoteHost
from monarch_nb.connect.routes import HostLosses, HostRoutes
from monarch_nb.job.adapter import EngineError, JobAdapter, Role, Running, Seen, deduplicated, mesh_of
from monarch_nb.lifecycle.watching import show_host_message
from monarch_nb.mesh import HostMesh, give_up
from monarch_nb.runtime import Future, current_runtime, fail_future, pending_future, resolve_future
from monarch_nb.settings import settings
from monarch_nb.transport import TransportError, TrustError, knock
from monarch_nb.wire import counted, error_line

_LOOK_S, _LOOK_MAX_S = 0.02, 2.0  # between checks of the agents while hosts are missing
_KNOCK_S = 1.0
_POOL_SIZE = 32
_TICK_S = 0.5
_CUT_LOOK_S = 1.0  # the same while a host that has joined is out of touch
_UNKNOWN = Seen("ended", "is not known to its engine any more")
_MORE = more("guides/jobs.md#which-addresses-must-be-open")
_NAMED = 4
_PLURALS = {"is": "are", "has": "have", "was": "were", "waits": "wait", "runs": "run", "does": "do"}
_VERB = re.compile(rf"\b({'|'.join(_PLURALS)})\b")


class Progress(NamedTuple):
    """The number of `wanted` hosts that have joined; `missing` has the obstacle of each of the others.

    Spares are counted separately: no mesh waits for them.
    """

    wanted: int
    joined: tuple[str, ...]
    missing: Mapping[str, str]
    spares: tuple[str, ...] = ()
    wanted_spares: int = 0

    def __str__(self) -> str:
        head = f"{len(self.joined)}/{counted(self.wanted, 'host')} joined"
        if self.wanted_spares:
            head += f", {len(self.spares)}/{counted(self.wanted_spares, 'spare')}"
        reasons: dict[str, list[str]] = {}
        for name, reason in self.missing.items():
            reasons.setdefault(reason, []).append(name)
        parts = [sentence(names, reason) for reason, names in reasons.items()]
        more = f"; and {len(parts) - _NAMED} other reasons" if len(parts) > _NAMED else ""
        return f"{head}. Missing: {'; '.join(parts[:_NAMED])}{more}" if parts else head

    def bar(self, width: int = 20) -> str:
        """Returns the text with a bar before it."""
        full = width * len(self.joined) // max(1, self.wanted)
        return f"[{'#' * full}{'.' * (width - full)}] {self}"


def sentence(names: Sequence[str], predicate: str) -> str:
    """Makes a sentence about several hosts from the predicate for one, such as "waits for a node"; cuts long lists."""
    more = len(names) - _NAMED
    subject = ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
    if len(names) > 1:
        predicate = _VERB.sub(lambda verb: _PLURALS[verb[0]], predicate, count=1)
    return f"{subject} {predicate}"


class HostsMissingError(RuntimeError):
    """Hosts of a job's mesh will not come; `missing` has the reason for each."""

    def __init__(self, job: str, missing: Mapping[str, str]) -> None:
        self.missing = dict(missing)
        reasons = "\n".join(f"  {name} {reason}" for name, reason in deduplicated(missing).items())
        super().__init__(f"{len(missing)} of the hosts of {job} will not come:\n{reasons}" + _MORE)


class Arrival:
    """Follows the agents of one job, on a thread of its own, for as long as this process uses them."""

    def __init__(self, adapter: JobAdapter, job: Running, roles: Mapping[str, Role], title: str, patience: float | None,
                 on_joined: Callable[[Mapping[str, str]], object]) -> None:  # fmt: skip
        """`on_joined` is called with the ids of hosts that have just joined, by name, on the arrival's thread."""
        self.hosts: dict[str, Future[tuple[str, ...]]] = {
            mesh: pending_future(describe=lambda: str(self.progress)) for mesh in roles
        }
        self._adapter = adapter
        self._job = job
        self._roles = roles
        self._title = title
        self._patience = patience  # seconds for the scheduler to start all of them
        self._on_joined = on_joined
        self._begun = time.monotonic()
        self._runtime = current_runtime()
        self._joined: dict[str, str] = {}  # host ids, by name
        self._descriptions = dict.fromkeys(job.agents, "has not been looked at yet")
        self._failed: dict[str, str] = {}
        self._silent_since: dict[str, float] = {}  # agents that run and do not answer
        self._dialled: dict[str, tuple[str, ...]] = {}  # addresses at which they were last tried
        self._foreign_addresses: set[str] = set()  # at which another agent answers
        self._unreached: set[str] = set()  # addresses that the gateway has just tried
        self._gateways: dict[str, str] = {}  # the address of the agent that leads to the others
        self._watched = 0.0  # monotonic: the last wait for changes of the progress
        self._warned: set[str] = set()  # descriptions
        self.ends: dict[str, str] = {}  # descriptions, by the scheduler, of the ends of hosts that had joined, by name
        self._parts: list[HostMesh] = []
        self._ended = threading.Event()
        self._changed = threading.Condition()
        adapter.hold(job, True)
        threading.Thread(target=self._run, name="monarch-job", daemon=True).start()

    def belongs_here(self) -> bool:
        """Returns whether it attaches hosts to the current runtime, not to one that this process has shut down."""
        return self._runtime is current_runtime() and not self._ended.is_set()

    @property
    def progress(self) -> Progress:
        """The current progress."""
        with self._changed:
            missing = {name: self._descriptions[name] for name in self._job.agents if name not in self._joined}
            return Progress(len(self._job.agents), tuple(self._joined), missing)

    @property
    def joined(self) -> dict[str, str]:
        """The ids of the hosts that have joined, by name."""
        with self._changed:
            return dict(self._joined)

    def wait(self, seconds: float) -> bool:
        """Blocks until something has changed, or the time is over; returns whether the outcome is decided."""
        self._watched = time.monotonic()
        with self._changed:
            if not self._decided():
                self._changed.wait(seconds)
            return self._decided()

    def forget(self, hosts: Iterable[str]) -> dict[str, str]:
        """Stops watching hosts that are released; returns those that joined in this arrival, by name."""
        with self._changed:
            released = {name: host for name, host in self._joined.items() if host in hosts}
            for name in released:
                del self._joined[name], self._job.agents[name]
            return released

    def stop(self, reason: str) -> None:
        """Ends the arrival with its job, or the job's use: pending meshes fail, attached hosts are given up."""
        with self._changed:
            self._ended.set()
            parts, self._parts = self._parts, []
            self._changed.notify_all()
        for part in parts:
            give_up(part, reason)
        for future in self.hosts.values():
            if not future.done():
                fail_future(future, RuntimeError(f"{self._title}: {reason}"))

    def _decided(self) -> bool:
        return self._ended.is_set() or all(future.done() for future in self.hosts.values())

    def _over(self) -> bool:
        return self._ended.is_set() or self._runtime.closed

    # -- the thread

    def _run(self) -> None:
        pause = _LOOK_S
        while not self._over() and (missing := self.missing()):
            try:
                self._take(self._adapter.look(self._job), missing)
            except EngineError as error:
                self._describe(dict.fromkeys(missing, f"its engine cannot be asked: {error}"))
            except Exception as error:
                self._fail(dict.fromkeys(missing, f"could not be looked at: {type(error).__name__}: {error}"))
            if self.missing():
                self._ended.wait(pause)
                pause = min(_LOOK_MAX_S, 1.3 * pause)
        self._watch()
        if self._adapter.watch_s or self._over():
            self._adapter.hold(self._job, False)

    def missing(self) -> list[str]:
        """Returns the names of hosts that may still join."""
        return [name for name in self._job.agents if name not in self._joined and not self.hosts[mesh_of(name)].done()]

    def _take(self, states: Mapping[str, Seen], names: Iterable[str]) -> None:
        ready, failed, descriptions, given_up = {}, {}, {}, {}
        stuck: dict[str, list[str]] = {}
        late = self._patience is not None and time.monotonic() - self._begun > self._patience
        for name in names:
            state, gpus = states.get(name, _UNKNOWN), self._roles[mesh_of(name)].gpus
            if state.state == "ended":
                failed[name] = state.description
            elif state.state == "waiting" and late:
                given_up[name] = f"has not been started within {self._patience:g} s: {state.description}"
            elif gpus and state.gpus is not None and state.gpus < gpus:
                failed[name] = f"has {state.gpus} GPUs, and {gpus} were asked for ({state.description})"
            elif state.state == "running" and state.joins:
                ready[name] = state
            else:
                descriptions[name] = state.description or state.state
                if state.stuck:
                    stuck.setdefault(state.description, []).append(name)
        self._describe(descriptions)
        self._warn(stuck)
        if ready:
            failed.update(self._attach(ready))
        if given_up:
            failed.update(self._withdraw(given_up))
        self._fail(failed)

    def _warn(self, stuck: Mapping[str, Sequence[str]]) -> None:
        """Reports once what hosts wait for that does not happen with time alone, unless the progress is shown."""
        watched = time.monotonic() - self._watched < 2 * _TICK_S
        for description, names in stuck.items():
            if description not in self._warned:
                self._warned.add(description)
                if not watched:
                    show_host_message(f"{self._title}: {sentence(names, description)}")

    def _withdraw(self, descriptions: Mapping[str, str]) -> dict[str, str]:
        """Withdraws agents that are not needed any more, so that none starts later."""
        agents = {name: agent for name, agent in self._job.agents.items() if name in descriptions}
        try:
            self._adapter.release(structs.replace(self._job, agents=agents), self._job.now())
        except Exception as error:
            error_text = error_line(error)
            return {name: f"{text}. It may still start: {error_text}" for name, text in descriptions.items()}
        return {name: f"{text}. It is not asked for any more" for name, text in descriptions.items()}

    def _attach(self, ready: Mapping[str, Seen]) -> dict[str, str]:
        """Attaches those that answer; returns those that never will, with the reasons."""
        self._set_up_gateway(ready)
        with ThreadPoolExecutor(min(_POOL_SIZE, len(ready)), "monarch-join") as pool:
            addresses = dict(zip(ready, pool.map(self._address, ready, ready.values()), strict=True))
        silent = {name: ready[name] for name, address in addresses.items() if not address}
        failed = self._time_out_silent(silent)
        names = {address: name for name, address in addresses.items() if address}
        if not names or self._over():
            return failed
        part = attach_to_workers(
            name=self._title, ca="trust_all_connections", workers=list(names), private_key=self._key
        )
        with self._changed:
            self._parts.append(part)
        if self._ended.is_set():
            give_up(part, "its job has ended")
            return failed
        try:
            ids = part.host_ids
        except AttachError as error:
            with self._changed:
                self._parts = [mesh for mesh in self._parts if mesh is not part]
            self._unreached.update(error.errors)
            for address, reason in error.errors.items():
                name = names.get(address)
                if name is not None and (isinstance(reason, TrustError) or not isinstance(reason, TransportError)):
                    failed[name] = f"cannot take part: {reason}"
            self._describe({name: f"runs, but: {error.errors.get(address, error)}" for address, name in names.items()})
            return failed
        joined = {}
        for (address, name), host in zip(names.items(), ids, strict=True):
            if ready[name].host not in ("", host):
                self._foreign_addresses.add(address)
            else:
                joined[name] = host
        for host in joined.values() if self._adapter.watch_s else ():
            if (remote := self._remote_of(host)) is not None:
                remote.has_engine = True
        self._on_joined(joined)  # before anybody can use them, and lose them
        for name, host in joined.items():
            failed.update(self._register(name, host))
        return failed

    @property
    def _key(self) -> Path | None:
        key = Path(self._job.folder, "key")
        return key if self._job.folder and key.exists() else None

    def _set_up_gateway(self, ready: Mapping[str, Seen]) -> None:
        """Makes one of the hosts, or a given gateway, dial the other hosts, if the job is configured so."""
        if self._runtime.part(HostRoutes).gateway is not None:
            return
        gateway = self._job.options.get("attach_to", "")
        if not gateway and self._job.options.get("through_first"):
            for name, state in ready.items():
                gateway = self._address(name, state)
                if gateway:
                    self._gateways[name] = gateway
                    break
        if gateway:
            try:
                attach(gateway, private_key=self._key)
            except AttachError as error:
                self._gateways.clear()  # another gateway is tried the next time
                self._describe(dict.fromkeys(ready, f"is to be reached through {gateway}, but: {error}"))

    def _register(self, name: str, host: str) -> dict[str, str]:
        with self._changed:
            twin = next((key for key, joined in self._joined.items() if joined == host), None)
            if twin is not None:
                return {name: f"is host {host}, as {twin} is: it was named twice"}
            self._joined[name] = host
            self._adapter.joined(self._job, name)
            self._changed.notify_all()
        mesh = mesh_of(name)
        members = [member for member in self._job.agents if mesh_of(member) == mesh]
        if all(member in self._joined for member in members) and not self.hosts[mesh].done():
            resolve_future(self.hosts[mesh], tuple(self._joined[member] for member in members))
        return {}

    def _address(self, name: str, state: Seen) -> str:
        """Returns the first of an agent's addresses at which something listens."""
        if name in self._gateways:
            return self._gateways[name]
        self._dialled[name] = addresses = tuple(self._adapter.join(self._job, name, state.joins))
        gateway = self._runtime.part(HostRoutes).gateway
        if gateway is not None and self._unreached.issuperset(addresses):
            self._unreached.difference_update(addresses)
        for address in addresses:
            if address in self._foreign_addresses:
                continue
            if not address.startswith("tcp://"):
                if os.path.exists(address.rpartition("ipc://")[2]):
                    return address
            elif address not in self._unreached if gateway is not None else knock(address, _KNOCK_S):
                return address
        return ""

    def _time_out_silent(self, silent: Mapping[str, Seen]) -> dict[str, str]:
        now, failed = time.monotonic(), {}
        for name, state in silent.items():
            since = self._silent_since.setdefault(name, now)
            if now - since > settings.mesh_attach_config_timeout:
                tried = ", ".join(self._dialled.get(name) or state.joins)
                failed[name] = (
                    f"runs ({state.description}), but nobody answers at {tried} for {now - since:.0f} s: "
                    f"check whether a firewall is between, with monarch-nb doctor, or {self._adapter.detour(self._job)}"
                )
        self._describe({name: f"runs ({state.description}), but does not answer yet" for name, state in silent.items()})
        return failed

    def _describe(self, descriptions: Mapping[str, str]) -> None:
        with self._changed:
            if any(self._descriptions.get(name) != description for name, description in descriptions.items()):
                self._descriptions.update(descriptions)
                self._changed.notify_all()

    def _fail(self, failed: Mapping[str, str]) -> None:
        self._describe(failed)
        for mesh in {mesh_of(name) for name in failed}:
            reasons = {name: reason for name, reason in failed.items() if mesh_of(name) == mesh}
            if not self.hosts[mesh].done():
                fail_future(self.hosts[mesh], HostsMissingError(f"{mesh} ({self._title})", reasons))
        if failed:
            with self._changed:
                self._changed.notify_all()

    # -- after they have joined

    def _watch(self) -> None:
        """Gives up hosts that the scheduler has ended and whose agents do not answer, before their lease is over."""
        seconds, last = self._adapter.watch_s, time.monotonic()
        while seconds and not self._ended.wait(min(seconds, _TICK_S)) and not self._runtime.closed:
            pause = min(seconds, _CUT_LOOK_S) if self._awaited() else seconds
            if time.monotonic() - last < pause or len(self.ends) == len(self._joined):
                continue
            last = time.monotonic()
            try:
                states = self._adapter.look(self._job)
            except Exception:  # nothing is known
                continue
            ended: dict[str, list[str]] = {}  # the names of hosts, by the scheduler's description of their end
            for name in [name for name in tuple(self._job.agents) if name in self._joined]:
                state = states.get(name, _UNKNOWN)
                if state.state in ("ended", "waiting") and name not in self.ends:
                    ended.setdefault(state.description, []).append(name)
            for end, names in ended.items():
                self.ends.update(dict.fromkeys(names, end))
                for name in names:
                    remote = self._remote_of(self._joined.get(name, ""))
                    if remote is not None and not self._ended.is_set():
                        remote.ends(sentence(names, end))

    def _awaited(self) -> bool:
        """Returns whether any host is unreachable, about which the scheduler may know more."""
        losses = self._runtime.part(HostLosses)
        return any(losses.awaits(host) for name, host in tuple(self._joined.items()) if name not in self.ends)

    def _remote_of(self, host: str) -> RemoteHost | None:
        """None for a host that was returned, or that is on this machine."""
        remote = self._runtime.part(HostRoutes).attached.get(host)
        return remote if isinstance(remote, RemoteHost) else None
