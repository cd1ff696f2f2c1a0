"""Engine messages about process groups of torch.distributed."""

import msgspec

from monarch_nb.wire import Done, Verb


class GroupKey(msgspec.Struct, array_like=True, frozen=True):
    """Tells a process group from others, alike in all of its members."""

    name: str
    members: tuple[int, ...]  # ranks of torch.distributed
    store: str  # "host:port" through which its members found each other, "" where that is not known


class AskWaits(msgspec.Struct, array_like=True, frozen=True):
    """Asks one rank what it waits in, while it runs a call."""

    mesh: str
    rank: int
    call: str


class Waits(msgspec.Struct, array_like=True, frozen=True):
    """What the thread of a call waits in, and of which groups its process is a member."""

    runs: bool = False  # the call has not ended
    groups: tuple[GroupKey, ...] = ()
    joins: bool = False  # it waits for the others of a group that is being made
    used: tuple[GroupKey, ...] = ()  # in which this call has begun collectives
    member_of: tuple[GroupKey, ...] = ()


class EndWaits(msgspec.Struct, array_like=True, frozen=True):
    """Ends what one rank waits in, if it still runs that call: connections of these groups are cut."""

    mesh: str
    rank: int
    call: str
    groups: tuple[GroupKey, ...] = ()
    joins: bool = False


class AskBroken(msgspec.Struct, array_like=True, frozen=True):
    """Asks a process which of its groups are of no use any more. `raised`: the collectives of this call broke off."""

    mesh: str
    rank: int
    raised: str = ""


class Broken(msgspec.Struct, array_like=True, frozen=True):
    """Groups that were cut, or whose collectives broke off."""

    groups: tuple[GroupKey, ...] = ()
    joins: bool = False  # one was cut while it was being made
    port: int = 0  # one that is free on this host


class Renew(msgspec.Struct, array_like=True, frozen=True):
    """Gives groups up, and sets what torchrun would: new groups are made through another store.

    Names of groups that are made next begin at `number`: a store may still have what those of before have written
    there. `lost` are ranks of torch.distributed that are gone, and with them all groups they were in; `everything`
    gives up all groups. Variables that the user has set stay.
    """

    environment: dict[str, str]
    number: int
    groups: tuple[GroupKey, ...] = ()
    lost: tuple[int, ...] = ()
    everything: bool = False


class Renewed(msgspec.Struct, array_like=True, frozen=True):
    """Actors, by mesh and rank, whose `__init__` had made one of the groups that a process has given up."""

    makers: tuple[tuple[str, int], ...] = ()


WAITS = Verb("collectives.waits", AskWaits, Waits, doc="which process groups a rank waits in, and is a member of")
END_WAITS = Verb("collectives.end", EndWaits, Done, doc="ends what a rank waits in, in process groups")
BROKEN = Verb("collectives.broken", AskBroken, Broken, doc="which process groups of a process are of no use any more")
RENEW = Verb("collectives.renew", Renew, Renewed, doc="gives process groups up, and sets torchrun's environment anew")
