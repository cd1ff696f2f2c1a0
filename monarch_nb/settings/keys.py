"""Every key of the configuration, by name."""

from typing import Any

from monarch_nb.settings.accepted import accepted
from monarch_nb.settings.effective import Effective
from monarch_nb.settings.setting import Setting

_effective = [value for value in vars(Effective).values() if isinstance(value, Setting)]

KEYS: dict[str, Setting[Any]] = {key.name: key for key in sorted((*_effective, *accepted()), key=lambda key: key.name)}
