"""One key of the configuration, which is also the attribute that the engine reads."""

from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeAlias, TypeVar, overload

if TYPE_CHECKING:
    from monarch_nb.settings.store import Settings

T = TypeVar("T", covariant=True)
Kind = Literal["duration", "flag", "count", "ratio", "text", "encoding", "transport", "range", "sharing"]

SECOND = 10**9


class Encoding(Enum):
    """Torchmonarch's formats of messages. Accepted without effect: messages have one format here."""

    Bincode = 0
    Json = 1
    Multipart = 2


class ChannelTransport(Enum):
    """Transports between processes of different hosts; within a host, a local socket is always used."""

    TcpWithLocalhost = "tcp(localhost)"
    TcpWithHostname = "tcp(hostname)"
    MetaTlsWithHostname = "metatls(hostname)"
    MetaTlsWithIpV6 = "metatls(ipv6)"
    Tls = "tls"
    Quic = "quic"
    MetaQuicWithHostname = "metaquic(hostname)"
    MetaQuicWithIpV6 = "metaquic(ipv6)"
    Local = "local"
    Unix = "unix"


# Of a key: durations in nanoseconds inside, as text outside.
Value: TypeAlias = bool | int | float | str | slice | Encoding | ChannelTransport | None


class Setting(Generic[T]):
    """A key: its kind, its default, and its meaning; "" for one that does nothing here.

    Durations are stored in nanoseconds and read in seconds.
    """

    def __init__(
        self,
        kind: Kind,
        default: Value,
        meaning: str = "",
        *,
        name: str = "",
        optional: bool = False,
        env: tuple[str, ...] = (),
        least: int = 0,
    ) -> None:
        self.kind = kind
        self.default = default
        self.meaning = meaning
        self.name = name
        self.optional = optional  # None may be set: it is the default
        self.env = env  # names of the environment besides those of all keys
        self.least = least  # minimum of a count

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: "Settings", owner: type) -> T: ...
    def __get__(self, instance: "Settings | None", owner: type) -> Any:
        if instance is None:
            return self
        value = instance.value_of(self)
        return value / SECOND if self.kind == "duration" and isinstance(value, int) else value

    def __repr__(self) -> str:
        return f"<setting {self.name}: {self.kind}>"


def seconds(default: float, meaning: str, *, optional: bool = False) -> Setting[float]:
    """Declares a duration."""
    return Setting("duration", round(default * SECOND), meaning, optional=optional)


def flag(default: bool, meaning: str) -> Setting[bool]:
    """Declares a flag."""
    return Setting("flag", default, meaning)


def count(default: int, meaning: str, *, least: int = 0) -> Setting[int]:
    """Declares a whole number."""
    return Setting("count", default, meaning, least=least)


def text(default: str, meaning: str) -> Setting[str]:
    """Declares a text."""
    return Setting("text", default, meaning)
