"""Which transport a program asks for. Links choose theirs by what they connect, so this is bookkeeping."""

import logging
import threading

from monarch_nb.runtime import started
from monarch_nb.settings import ChannelTransport, settings
from monarch_nb.settings import transport as named

logger = logging.getLogger(__name__)

_SERVED = {
    ChannelTransport.Unix,
    ChannelTransport.Local,
    ChannelTransport.TcpWithHostname,
    ChannelTransport.TcpWithLocalhost,
}
_lock = threading.Lock()
_enabled: ChannelTransport | str | None = None


def enable_transport(transport: ChannelTransport | str) -> None:
    """Says how hosts are to be reached: one of ChannelTransport, its short word ("tcp", "ipc"…) or an address.

    Nothing has to be enabled here: processes of a host use local sockets, hosts with a `tcp://` address TCP, encrypted
    with the key of the job. What programs say is kept in `default_transport`; the transports of other clusters are
    accepted, and TCP is used instead, which is said. The same again does nothing; another one raises RuntimeError, also
    after the first other call; ValueError for what is no transport.
    """
    global _enabled
    wanted = named(transport)
    with _lock:
        if wanted == (_enabled or settings.default_transport):
            _enabled = wanted
            return
        if started() is not None:
            raise RuntimeError("enable_transport() must come before any other call: this program has a context already")
        if _enabled is not None:
            raise RuntimeError(f"only one transport can be enabled: it is {_enabled}, and cannot become {wanted}")
        settings.configure({"default_transport": wanted})
        _enabled = wanted
    scheme = wanted.partition(":")[0] if isinstance(wanted, str) else ""
    if wanted not in _SERVED and scheme not in ("tcp", "ipc"):
        logger.warning(
            "the transport %s is not available: hosts are connected by TCP, encrypted with the job's key", wanted
        )
