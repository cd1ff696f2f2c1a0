"""Messages that arrive at a process: each is passed to its actor, port or engine verb."""

from monarch_nb.runtime.actors.hosting import Hosting
from monarch_nb.runtime.features import Features
from monarch_nb.runtime.losses import Losses
from monarch_nb.runtime.sender import MessageSender, caller_of
from monarch_nb.runtime.tables import PortTable, ProcessTables
from monarch_nb.transport import Parcel, Transport, reason_of
from monarch_nb.wire import REPLY, Handlers, Header, Kind

SPAWN = "__spawn__"
_PORTS = frozenset({Kind.REPLY, Kind.FOLDED, Kind.PORT})


class Arrivals:
    """Passes messages on. `take` runs on the reading thread, and runs no user code."""

    def __init__(
        self,
        local: ProcessTables,
        node: Transport,
        ports: PortTable,
        verbs: Handlers,
        *,
        features: Features,
        hosting: Hosting,
        losses: Losses,
        sender: MessageSender,
    ) -> None:
        self._local, self._node, self._ports = local, node, ports
        self._verbs, self._features = verbs, features
        self._hosting, self._losses, self._sender = hosting, losses, sender

    def take(self, header: Header, parcel: Parcel) -> None:
        """Passes one message to its receiver."""
        kind = header.kind
        self._local.traffic.received += parcel.nbytes
        if kind == Kind.CALL:
            if header.unread:
                self._local.stored_answers.discard_read(caller_of(header.call), header.unread)
            cell = self._local.cells.get((header.mesh, header.rank))
            if cell is not None and cell.incarnation == header.incarnation:
                cell.arrive(header, parcel)
            elif header.method == SPAWN:
                for message in self._hosting.spawn(header, parcel):
                    self.take(*message)
            else:
                self._hosting.absent(header, parcel, self.take)
        elif kind in _PORTS:
            handler = self._ports.get(header.port)
            if handler is not None:
                handler.arrive(header, parcel)
                return
            if kind == Kind.PORT:
                self._sender.send_back(header, "nothing receives from that port any more")
            self._node.consumed(parcel)
        elif kind == Kind.CONTROL:
            self._serve(header, parcel)
        elif kind == Kind.RETURNED:
            reason = reason_of(parcel)
            self._node.consumed(parcel)
            self._losses.lost(header, reason)

    def _serve(self, header: Header, parcel: Parcel) -> None:
        if header.method == REPLY:
            handler = self._ports.get(header.port)
            if handler is not None:
                handler.arrive(header, parcel)
        elif header.method not in self._verbs and self._features.load_for(header, parcel, self.take):
            return
        else:
            self._verbs.take(header, parcel.frames[0] if parcel.frames else b"")
        self._node.consumed(parcel)
