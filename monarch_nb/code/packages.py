"""Packages of the ranks of a mesh: pip, run once in each environment."""

import importlib
import os
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from msgspec import Struct

from monarch_nb.host.launch import untraced
from monarch_nb.host.linux import boot_id
from monarch_nb.mesh.handle import part_of, region_of, state_of
from monarch_nb.mesh.proc import ProcMesh
from monarch_nb.shape import Region, first_places_of, places_of, region_of_ranks

_MARK = ".monarch-nb-pip-"
_SETTINGS = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off"}


class PipResult(Struct, frozen=True):
    """Result of pip in one environment."""

    python: str
    where: str  # the ranks that run there: "hosts=0-1"
    status: int  # 0 for success
    changed: dict[str, tuple[str, str]]  # distributions: their versions before and now; empty for none


class Installed(Struct, frozen=True):
    """Results of pip on the hosts of a mesh; displayed as lines."""

    mesh: str
    done: tuple[PipResult, ...]
    loaded: dict[str, str]  # distributions that have changed while ranks had them loaded, and which ranks

    def __repr__(self) -> str:
        lines = []
        for run in self.done:
            changes = ", ".join(_change(name, *versions) for name, versions in sorted(run.changed.items()))
            outcome = f"pip has failed, with status {run.status}" if run.status else changes or "nothing has changed"
            lines.append(f"{self.mesh} {run.where}".rstrip() + f" ({run.python}): {outcome}")
        for name, ranks in sorted(self.loaded.items()):
            lines.append(
                f"{name} is loaded on {ranks or 'its process'} as it was before: %heal {self.mesh} --kill starts the "
                "processes anew; what their host keeps loaded for new ones, as torch, it has until it is started anew"
            )
        return "\n".join(lines)


class PipError(RuntimeError):
    """A failure of pip in some environment; `installed` has the results in all of them."""

    def __init__(self, installed: Installed) -> None:
        super().__init__(repr(installed))
        self.installed = installed

    def __reduce__(self) -> tuple[object, ...]:
        return PipError, (self.installed,)


def run_pip(procs: ProcMesh, words: Sequence[str]) -> Installed:
    """Runs `pip WORDS` for the interpreter of these processes, once in each environment; blocks until all are done.

    Where hosts share an environment, as on a network file system, or as several hosts of one machine, one of them runs
    pip. Its output is shown as output of that rank. From then on all ranks can import new packages; packages that they
    have loaded stay as they are, and are listed. Raises ValueError for no words, PipError where pip fails.
    """
    if not words:
        raise ValueError("pip needs words, such as: install einops")
    state, region = state_of(procs), region_of(procs)
    first: dict[str, int] = {}
    for rank in region.ranks():
        first.setdefault(state.layout.host_of(rank), rank)
    leaders = _part(procs, list(first.values()))
    token = uuid.uuid4().hex
    try:
        leaders.run(_mark, token).get()  # all marks are written before any are read
        environments = dict(zip(first.values(), leaders.run(_environment, token).get().values(), strict=True))
    finally:
        leaders.run(_unmark, token).exception()
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, environment in environments.items():
        groups.setdefault(environment, []).append(rank)
    outcomes = _part(procs, [ranks[0] for ranks in groups.values()]).run(_pip, list(words)).get().values()
    done, versions = [], dict[str, str]()
    for (environment, ranks), (status, changed) in zip(groups.items(), outcomes, strict=True):
        hosts = {state.layout.host_of(rank) for rank in ranks}
        members = [rank for rank in region.ranks() if state.layout.host_of(rank) in hosts]
        done.append(PipResult(environment[0], _ranks_text(region, members), status, changed))
        versions.update({name: version for name, (version, _) in changed.items() if version})
    loaded: dict[str, list[int]] = {}
    for rank, names in zip(region.ranks(), procs.run(_loaded_packages, sorted(versions)).get().values(), strict=True):
        for name in names:
            loaded.setdefault(name, []).append(rank)
    installed = Installed(state.name, tuple(done), {name: _ranks_text(region, ranks) for name, ranks in loaded.items()})
    if any(run.status for run in done):
        raise PipError(installed)
    return installed


def _part(procs: ProcMesh, ranks: Sequence[int]) -> ProcMesh:
    return part_of(procs, region_of_ranks(["rank"], [len(ranks)], ranks))


def _ranks_text(region: Region, ranks: Sequence[int]) -> str:
    """Formats ranks by coordinates; by the first alone if all ranks with these first coordinates are included."""
    if len(region.labels) < 2:
        return places_of(region, ranks)
    coordinates = {region.ndslice.coordinates(rank)[0] for rank in ranks}
    if len(ranks) * region.ndslice.sizes[0] != len(coordinates) * len(region):
        return places_of(region, ranks)
    return first_places_of(region, ranks)


def _change(name: str, before: str, now: str) -> str:
    return f"{name} {before} → {now}" if before and now else f"{name} {now}" if now else f"{name} {before} is gone"


# -- on the ranks, on their main threads --------------------------------------------------------------------------


def _packages() -> Path:
    return Path(sysconfig.get_path("purelib"))


def _mark(token: str) -> None:
    """Creates a mark in the folder of the packages, visible to ranks that share it."""
    try:
        (_packages() / f"{_MARK}{token}-{uuid.uuid4().hex}").touch()
    except OSError:  # not writable: pip then installs in a folder of this user
        return


def _environment(token: str) -> tuple[str, ...]:
    """Returns a key that is equal on ranks that share an environment."""
    marks = sorted(path.name for path in _packages().glob(f"{_MARK}{token}-*"))
    machine = [boot_id(), str(Path(sys.prefix).resolve())]
    return (sys.executable, *(marks or machine))


def _unmark(token: str) -> None:
    for path in _packages().glob(f"{_MARK}{token}-*"):
        path.unlink(missing_ok=True)


def _pip(words: Sequence[str]) -> tuple[int, dict[str, tuple[str, str]]]:
    before = _versions()
    with subprocess.Popen(
        untraced([sys.executable, "-m", "pip", *words]), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", env={**os.environ, **_SETTINGS},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            for line in process.stdout:
                sys.stdout.write(line)
                sys.stdout.flush()
        except BaseException:  # an interrupt
            process.kill()
            raise
    now = _versions()
    names = [name for name in before.keys() | now.keys() if before.get(name) != now.get(name)]
    return process.returncode, {name: (before.get(name, ""), now.get(name, "")) for name in names}


def _versions() -> dict[str, str]:
    importlib.invalidate_caches()
    return {distribution.name: distribution.version for distribution in metadata.distributions() if distribution.name}


def _loaded_packages(names: Sequence[str]) -> list[str]:
    """Clears import caches; returns the distributions that this rank had already loaded."""
    importlib.invalidate_caches()
    modules = metadata.packages_distributions()
    tops: Mapping[str, set[str]] = {
        name: {top for top, packages in modules.items() if name in packages} for name in names
    }
    return [name for name in names if not (tops[name] or {name.replace("-", "_")}).isdisjoint(sys.modules)]
