"""The private surface of torchmonarch that programs written for it use: other names for parts of this package.

Its programs import from `monarch._src`, `monarch._rust_bindings` and `monarch.tools`, as not all that they need has a
public home there. Those paths are aliases (the table is in `names`), created at first use. Parts only for such programs
are in this package: `pickling` (flatten, unflatten, dispatch tables), `mock` (patch_actor), `bootstrap_main`,
`network`, `workspaces`, `worker_loops`, `tasks`, `refs` and `internals`. docs/compatibility.md lists all of it.
"""

from monarch_nb.compat.names import ALIASES, MODULES, NAMES, Alias, check, missing_part

__all__ = ["ALIASES", "MODULES", "NAMES", "Alias", "check", "missing_part"]
