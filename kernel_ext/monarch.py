"""The import name `monarch`: another name for `monarch_nb` and for every module in it.

`import monarch` yields the package `monarch_nb` itself, and `import monarch.actor` the module `monarch_nb.actor`, not
copies: their specs, names and loaders stay as they are, so reloading works and pickles name `monarch_nb`. This is one
module file on purpose: beside an installed `torchmonarch` nothing is overwritten, and Python prefers its package.

Private paths of torchmonarch that programs import from are aliases too; see `monarch_nb.compat`.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader
else:  # its import takes a tenth of the time of ours, and the methods of a loader are all that is needed
    Loader = object

_ALIAS = "monarch"
_REAL = "monarch_nb"


class _AliasLoader(Loader):
    def __init__(self, real: str) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> None:
        """As usual."""
        return

    def exec_module(self, module: ModuleType) -> None:
        # The import system takes what stands in sys.modules afterwards and leaves its attributes alone; handing the
        # real module out of create_module() instead would have its __spec__ overwritten.
        spec = module.__spec__
        assert spec is not None
        sys.modules[spec.name] = importlib.import_module(self._real)


class _PrivateLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = importlib.import_module(f"{_REAL}.compat").Alias(spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Runs nothing."""

    def get_code(self, name: str) -> "CodeType | None":
        """Returns the code for `python -m`: that of the first home."""
        home = importlib.import_module(f"{_REAL}.compat").ALIASES[name][0]
        spec = importlib.util.find_spec(home)
        assert spec is not None
        code: CodeType | None = spec.loader.get_code(home)  # type: ignore[union-attr]
        return code


class _AliasFinder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, dot, rest = fullname.partition(".")
        if root != _ALIAS or not dot:
            return None
        real = f"{_REAL}.{rest}"
        try:
            spec = importlib.util.find_spec(real)
        except ModuleNotFoundError:  # not even its parent
            spec = None
        if spec is None or isinstance(spec.loader, _AliasLoader):  # the latter from the last finder
            return self._private_spec(fullname)
        return ModuleSpec(
            fullname, _AliasLoader(real), origin=spec.origin, is_package=spec.submodule_search_locations is not None
        )

    @staticmethod
    def _private_spec(fullname: str) -> ModuleSpec | None:
        aliases = importlib.import_module(f"{_REAL}.compat").ALIASES
        if fullname not in aliases:
            return None
        return ModuleSpec(
            fullname, _PrivateLoader(), is_package=any(name.startswith(f"{fullname}.") for name in aliases)
        )


class _LastFinder:
    """`from monarch.job import kubernetes` asks for `monarch_nb.job.kubernetes`: the package's own name."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, _, rest = fullname.partition(".")
        alias = f"{_ALIAS}.{rest}"
        if root != _REAL or alias not in importlib.import_module(f"{_REAL}.compat").ALIASES:
            return None
        return ModuleSpec(fullname, _AliasLoader(alias), is_package=True)


# First in the list: a later finder would see the real package's path and load second copies from it.
sys.meta_path.insert(0, _AliasFinder())
sys.modules[_ALIAS] = importlib.import_module(_REAL)
sys.meta_path.append(_LastFinder)
