"""The transport that a program requests. Links choose their own by their ends, so this is only recorded."""

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
    """Selects the transport to hosts: one of ChannelTransport, its short name ("tcp", "ipc"…) or an address.

    Nothing has to be enabled here: processes of a host use local sockets, hosts with a `tcp://` address TCP, encrypted
    with the key of the job. The choice is stored in `default_transport`; the transports of other clusters are accepted,
    but TCP is used instead, with a warning. Repeating a call does nothing; another transport raises RuntimeError, as
    does any after the first other call. Raises ValueError for an unknown transport.
    """
    global _enabled
    requested = named(transport)
    with _lock:
        if requested == (_enabled or settings.default_transport):
            _enabled = requested
            return
        if started() is not None:
            raise RuntimeError("enable_transport() must come before any other call: this program has a context already")
        if _enabled is not None:
            raise RuntimeError(f"only one transport can be enabled: it is {_enabled}, and cannot become {requested}")
        settings.configure({"default_transport": requested})
        _enabled = requested
    scheme = requested.partition(":")[0] if isinstance(requested, str) else ""
    if requested not in _SERVED and scheme not in ("tcp", "ipc"):
        logger.warning(
            "the transport %s is not available: hosts are connected by TCP, encrypted with the job's key", requested
        )
