"""Processes that are written to before they are there: which of them may yet be started. Pure."""

from monarch_nb.wire import parse_address

_REMEMBERED = 1 << 16  # ranks; of those that were started longest ago nothing is known any more


class Strangers:
    """Incarnations of a rank begin in order: once a later one has, an earlier one will not be started any more."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, int], int] = {}
        self._met: dict[tuple[str, int], set[str]] = {}

    def meet(self, address: str) -> bool:
        """A process that is not here is written to, or watched; whether it may yet be started."""
        mesh, rank, incarnation = parse_address(address).place
        if incarnation < self._latest.get((mesh, rank), -1):
            return False
        self._met.setdefault((mesh, rank), set()).add(address)
        return True

    def part(self, address: str) -> None:
        """Nobody waits for it any more."""
        mesh, rank, _ = parse_address(address).place
        met = self._met.get((mesh, rank), set())
        met.discard(address)
        if not met:
            self._met.pop((mesh, rank), None)

    def started(self, address: str) -> list[str]:
        """A process is started; those that were met, and never will be now."""
        mesh, rank, incarnation = parse_address(address).place
        self._latest.pop((mesh, rank), None)  # the latest last
        self._latest[mesh, rank] = incarnation
        if len(self._latest) > _REMEMBERED:
            del self._latest[next(iter(self._latest))]
        met = self._met.pop((mesh, rank), set())
        later = {other for other in met if parse_address(other).incarnation > incarnation}
        if later:
            self._met[mesh, rank] = later
        return sorted(met - later - {address})
