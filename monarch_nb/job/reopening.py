"""Ways to the hosts of a job that another process has opened from its machine, opened from this one."""

import msgspec

from monarch_nb.job.adapter import EngineError
from monarch_nb.job.kinds import adapter_of
from monarch_nb.job.tunnels import Tunnel
from monarch_nb.transport import knock
from monarch_nb.wire import json_decoder

_KNOCK_S = 1.0


def opened(written: str) -> str:
    """Opens such a way, and gives the endpoint of this machine; blocks. It stays for as long as this process.

    Raises EngineError, in the words of the engine.
    """
    try:
        tunnel = json_decoder(Tunnel).decode(written)
        adapter = adapter_of(tunnel.job.kind)
    except (msgspec.MsgspecError, LookupError) as error:
        raise EngineError(f"there is no way to it that this version knows: {error}") from None
    adapter.hold(tunnel.job, True)
    ways = adapter.join(tunnel.job, tunnel.name, tunnel.joins)
    way = next((each for each in ways if knock(each, _KNOCK_S)), "")
    if not way:
        raise EngineError(f"{tunnel.name} of the {tunnel.job.kind} job {tunnel.job.job[:8]} does not answer")
    return way
