"""The configuration of this process, in layers: defaults, the environment, the settings of its controller, and those
of the program here. The last layer that has a value counts.
"""

import difflib
import json
import logging
import os
import threading
import warnings
from collections.abc import Mapping

from monarch_nb.settings.accepted_keys import accepted
from monarch_nb.settings.effective import Effective
from monarch_nb.settings.kinds import checked, from_text, public_value, to_text
from monarch_nb.settings.setting import Setting, Value

logger = logging.getLogger(__name__)

TRAVELS_IN = "MONARCH_NB_CONFIG"  # environment variable that passes a controller's settings to its processes
_PREFIXES = ("MONARCH_NB_", "HYPERACTOR_MESH_", "HYPERACTOR_", "MONARCH_HYPERACTOR_", "MONARCH_")
_effective = [value for value in vars(Effective).values() if isinstance(value, Setting)]
KEYS: dict[str, Setting[object]] = {
    key.name: key for key in sorted((*_effective, *accepted()), key=lambda key: key.name)
}


class Settings(Effective):
    """The values in force, as attributes; any thread may read and set them."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._lock = threading.RLock()
        self._env: dict[str, Value] | None = None  # None while it has to be read
        self._set: dict[str, Value] | None = None  # all layers merged; None after one has changed
        self._sent: dict[str, Value] = {}
        self._runtime: dict[str, Value] = {}
        self._warned: set[str] = set()

    # -- for the engine -----------------------------------------------------------------------------------------------

    def explicit(self, name: str) -> bool:
        """Returns whether any layer has set a key."""
        return name in self._merged()

    def value_of(self, key: Setting[object]) -> Value:
        """Returns the value of a key in force, durations in nanoseconds."""
        values = self._set
        return (self._merged() if values is None else values).get(key.name, key.default)

    def _merged(self) -> dict[str, Value]:
        with self._lock:
            if self._set is None:
                self._env = self._read_environment() if self._env is None else self._env
                self._set = {**self._env, **self._sent, **self._runtime}
            return self._set

    def _read_environment(self) -> dict[str, Value]:
        values: dict[str, Value] = {}
        names = {name: key for key in KEYS.values() for name in key.env}
        for prefix in reversed(_PREFIXES):  # ours is read last and wins
            for name, text in self._environ.items():
                if not name.startswith(prefix) and name not in names:
                    continue
                key = names.get(name) or KEYS.get(name.removeprefix(prefix).lower())
                if key is None:
                    continue
                try:
                    values[key.name] = from_text(key, text)
                except (TypeError, ValueError) as error:
                    if name not in self._warned:
                        self._warned.add(name)
                        warnings.warn(f"the environment's {name} is ignored: {error}", stacklevel=2)
        return values

    # -- for programs -------------------------------------------------------------------------------------------------

    def configure(self, values: Mapping[str, object]) -> None:
        """Sets all of `values` or, if one of them is wrong, none. Raises ValueError, TypeError."""
        layer = {name: checked(_key(name), value) for name, value in values.items()}
        with self._lock:
            self._runtime = {**self._runtime, **layer}
            self._set = None
        for name, value in layer.items():
            self._warn_if_unused(KEYS[name], value)

    def replace(self, values: Mapping[str, object]) -> None:
        """Restores a layer that `runtime` has returned."""
        layer = {name: checked(_key(name), value) for name, value in values.items()}
        with self._lock:
            self._runtime = layer
            self._set = None

    def runtime(self) -> dict[str, Value]:
        """Returns the values that were set here, durations as text."""
        return {name: public_value(KEYS[name], value) for name, value in self._runtime.items()}

    def everything(self) -> dict[str, Value]:
        """Returns all keys with the values in force, durations as text."""
        return {key.name: public_value(key, self.value_of(key)) for key in KEYS.values()}

    def _warn_if_unused(self, key: Setting[object], value: Value) -> None:
        if key.meaning or value == key.default or key.name in self._warned:
            return
        self._warned.add(key.name)
        logger.warning("configuration: %s is accepted, but does nothing in monarch-nb", key.name)

    # -- from process to process --------------------------------------------------------------------------------------

    def to_send(self) -> str:
        """Returns the settings that this process passes on to those that it starts."""
        layer = {**self._sent, **self._runtime}
        return json.dumps({name: to_text(KEYS[name], value) for name, value in sorted(layer.items())}) if layer else ""

    def receive(self, text: str) -> None:
        """Takes over settings from the controller, and reads the environment again. Ignores unknown ones, as the
        controller may be newer.
        """
        try:
            layer = json.loads(text) if text else {}
        except ValueError:
            layer = {}
        received = {}
        for name, value in layer.items() if isinstance(layer, dict) else ():
            if name in KEYS and isinstance(value, str):
                try:
                    received[name] = from_text(KEYS[name], value)
                except (TypeError, ValueError):
                    continue
        with self._lock:
            self._runtime, self._sent = {}, received
            self._env = self._set = None

    def reload(self) -> None:
        """Makes the next use read the environment again."""
        with self._lock:
            self._env = self._set = None


def _key(name: str) -> Setting[object]:
    key = KEYS.get(name)
    if key is None:
        matches = difflib.get_close_matches(name, KEYS, 1, 0.6)
        hint = f"; did you mean {matches[0]}?" if matches else "; get_global_config() has all"
        raise ValueError(f"invalid configuration key: `{name}`{hint}")
    return key


settings = Settings()
"""The settings of this process."""
