"""References that programs of torchmonarch construct: an actor by address and names, a port of it, a message.

Here processes have addresses and actors belong to meshes, so no actor has such an address: messages to it return to
`_handle_undeliverable_message` of their sender.
"""

from dataclasses import dataclass, field

from monarch_nb.compat.pickling import FrozenBuffer
from monarch_nb.runtime import Instance, current_runtime
from monarch_nb.wire import Header, Kind, kind_of


@dataclass(frozen=True, kw_only=True)
class ActorAddr:
    """An actor: the address of its process, and the names of both."""

    addr: str
    proc_name: str
    actor_name: str

    @property
    def label(self) -> str:
        """The same as `actor_name`."""
        return self.actor_name

    @property
    def proc_label(self) -> str:
        """The same as `proc_name`."""
        return self.proc_name

    @property
    def uid(self) -> str:
        """The same as `actor_name`."""
        return self.actor_name

    def __str__(self) -> str:
        return f"{self.actor_name}.{self.proc_name}@{self.addr}"


@dataclass(frozen=True, kw_only=True)
class PortId:
    """A port of an actor, by number."""

    actor_id: ActorAddr
    port: int

    @property
    def index(self) -> int:
        """The same as `port`."""
        return self.port

    def __str__(self) -> str:
        return f"{self.actor_id}[{self.port}]"


@dataclass(frozen=True)
class Kinded:
    """The kind of a message, and the rank of its sender."""

    rank: int | None = None


class Result(Kinded):
    """A message with a value."""


class Raised(Kinded):
    """A message with an error."""


class PythonMessageKind:
    """The kinds of messages that a port may receive."""

    Result = Result
    Exception = Raised


@dataclass(frozen=True)
class PythonMessage:
    """A message: its kind, its bytes, and the objects that these refer to."""

    kind: Kinded
    message: FrozenBuffer | bytes
    refs: list[object] = field(default_factory=list)


@dataclass
class PortRef:
    """The address of a port; with `return_undeliverable` undelivered messages return to their sender."""

    port_id: PortId
    return_undeliverable: bool = field(default=True, kw_only=True)

    def send(self, instance: Instance, message: PythonMessage) -> None:
        """Sends a message on behalf of an actor, to which it returns. Does not wait."""
        if not isinstance(message, PythonMessage):
            raise TypeError(f"a port is sent a PythonMessage, not {kind_of(message)}")
        if self.return_undeliverable:
            sender = current_runtime()
            header = Header(
                Kind.PORT, str(self.port_id), sender.address, port=self.port_id.port, sender=instance.stream
            )
            sender.supervisor.undeliverable(header, f"no process of this program is at {self.port_id.actor_id.addr}")


__all__ = ["ActorAddr", "PortId", "PortRef", "PythonMessage", "PythonMessageKind"]
