"""The configuration that every layer reads; `monarch.config` is its public face."""

from monarch_nb.settings.accepted_keys import Duration
from monarch_nb.settings.kinds import (
    SHORT_TRANSPORTS,
    ChannelTransport,
    DurationError,
    Encoding,
    Setting,
    format_duration,
    parse_duration,
    positive_seconds,
    transport,
)
from monarch_nb.settings.store import KEYS, TRAVELS_IN, ConfigureArgs, Settings, settings

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
    "positive_seconds",
    "settings",
    "transport",
]
