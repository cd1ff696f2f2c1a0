"""Worker loops as torchmonarch's private bindings start them: a positional address, and ValueError in the future."""

from monarch_nb.connect.trust import TRUST_ALL, read_keys
from monarch_nb.connect.worker_loop import serve
from monarch_nb.host import AgentStartError
from monarch_nb.routing.routes import parse_worker_address
from monarch_nb.runtime import Future, fail_future, pending_future, resolve_future, when_done
from monarch_nb.transport import TransportError


def start_worker_loop_forever(address: str) -> Future[None]:
    """Makes this machine a host at an address; the shutdown of the host ends this process. Raises ValueError."""
    return _start(address, exits=True)


def start_worker_loop_until_shutdown(address: str) -> Future[None]:
    """Makes this machine a host at an address; the future resolves when the host is shut down. Raises ValueError."""
    return _start(address, exits=False)


def _start(address: str, *, exits: bool) -> Future[None]:
    started = serve(parse_worker_address(address), read_keys(None, TRUST_ALL), exits=exits)
    answer: Future[None] = pending_future(describe=lambda: f"the worker at {address} runs")

    def settle(future: Future[None]) -> None:
        error = future.exception(0)
        if isinstance(error, (AgentStartError, OSError, TransportError)):
            fail_future(answer, ValueError(f"listen: {error}"))
        elif error is not None:
            fail_future(answer, error)
        else:
            resolve_future(answer, None)

    when_done(started, settle)
    return answer
