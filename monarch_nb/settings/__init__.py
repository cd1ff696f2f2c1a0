"""The configuration that every layer reads; `monarch.config` is its public face."""

from monarch_nb.settings.accepted_keys import Duration
from monarch_nb.settings.arguments import ConfigureArgs
from monarch_nb.settings.duration import DurationError, format_duration, parse_duration
from monarch_nb.settings.kinds import SHORT_TRANSPORTS, transport
from monarch_nb.settings.setting import ChannelTransport, Encoding, Setting
from monarch_nb.settings.store import KEYS, TRAVELS_IN, Settings, settings

__all__ = [
    "KEYS",
    "SHORT_TRANSPORTS",
    "TRAVELS_IN",
    "ChannelTransport",
    "ConfigureArgs",
    "Duration",
    "DurationError",
    "Encoding",
    "Setting",
    "Settings",
    "format_duration",
    "parse_duration",
    "settings",
    "transport",
]
