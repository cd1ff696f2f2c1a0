"""Engine messages about process groups of torch.distributed."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from monarch_nb.collectives.environment import RendezvousEnvironment
from monarch_nb.wire import Done, Verb


class GroupKey(msgspec.Struct, array_like=True, frozen=True):
    """Identifies a process group, equally on all its members: every rank sends the keys of all its groups."""

    name: str
    runs: tuple[tuple[int, int, int], ...]  # ranks of torch.distributed: start, stop (excluded) and step of each run
    store: str  # "host:port" through which its members have met; "" if not known

    @classmethod
    def of(cls, name: str, members: Iterable[int], store: str) -> "GroupKey":
        """Returns the key of a group of these ranks, in ascending order."""
        return cls(name, tuple(_runs([*members])), store)

    @property
    def members(self) -> list[int]:
        """The ranks of torch.distributed in it, in ascending order."""
        return [rank for run in self.runs for rank in range(*run)]

    @property
    def size(self) -> int:
        """The number of members."""
        return sum(len(range(*run)) for run in self.runs)


def _runs(ranks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    first = 0
    while first < len(ranks):
        step = ranks[first + 1] - ranks[first] if first + 1 < len(ranks) else 1
        last = first
        while last + 1 < len(ranks) and ranks[last + 1] == ranks[last] + step:
            last += 1
        yield ranks[first], ranks[last] + 1, step
        first = last + 1


class AskWaits(msgspec.Struct, array_like=True, frozen=True):
    """Asks ranks in which groups they wait, while they run a call."""

    mesh: str
    call: str


class ThreadWaits(msgspec.Struct, array_like=True, frozen=True):
    """The wait of the thread of a call, and the groups of its process."""

    runs: bool = False  # the call has not ended
    groups: tuple[GroupKey, ...] = ()
    joins: bool = False  # it waits for the other members of a group that is being created
    used: tuple[GroupKey, ...] = ()  # groups in which this call has begun collectives
    member_of: tuple[GroupKey, ...] = ()


class Ending(msgspec.Struct, array_like=True, frozen=True):
    """Groups in which some ranks must stop waiting, or which they must not join."""

    ranks: tuple[int, ...]
    groups: tuple[GroupKey, ...] = ()
    joins: bool = False


class EndWaits(msgspec.Struct, array_like=True, frozen=True):
    """Ends waits of ranks that still run that call, by cutting connections of groups."""

    mesh: str
    call: str
    ends: tuple[Ending, ...]


class AskBroken(msgspec.Struct, array_like=True, frozen=True):
    """Asks processes which of their groups are unusable, after the calls on a mesh have ended.

    In `call` the collectives of `ranks` broke off.
    """

    mesh: str
    call: str = ""
    ranks: tuple[int, ...] = ()


class Broken(msgspec.Struct, array_like=True, frozen=True):
    """Groups that were cut, or whose collectives broke off."""

    groups: tuple[GroupKey, ...] = ()
    joins: bool = False  # a group was cut during its creation
    port: int = 0  # a free port of this host
    ended: tuple[GroupKey, ...] = ()  # all groups of the process that cannot be renewed once broken


class Renew(msgspec.Struct, array_like=True, frozen=True):
    """Gives groups up, and sets torchrun's variables: new groups are created through another store.

    Names of the next groups begin at `number`, which is larger than all before: a store may still have entries of
    earlier groups. `lost` are ranks of torch.distributed that were lost, and with them all groups with these members.
    Variables that the user has set stay.
    """

    number: int
    port: int = 0  # of the next store, if the world is unchanged
    world: RendezvousEnvironment | None = None  # if it has changed
    groups: tuple[GroupKey, ...] = ()
    lost: tuple[int, ...] = ()
    again: tuple[GroupKey, ...] = ()  # groups that continue, once all their members have reconnected


class Renewed(msgspec.Struct, array_like=True, frozen=True):
    """Actors, by mesh and rank, whose `__init__` had created one of the groups that a process has given up."""

    makers: tuple[tuple[str, int], ...] = ()
    failed: tuple[GroupKey, ...] = ()  # groups that could not be reconnected


WAITS = Verb("collectives.waits", AskWaits, ThreadWaits, doc="which process groups a rank waits in, and is a member of")
END_WAITS = Verb("collectives.end", EndWaits, Done, doc="ends what a rank waits in, in process groups")
BROKEN = Verb("collectives.broken", AskBroken, Broken, doc="which process groups of a process are broken")
RENEW = Verb("collectives.renew", Renew, Renewed, doc="destroys process groups, and sets torchrun's environment again")
