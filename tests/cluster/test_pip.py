"""pip itself, on the ranks of a mesh."""

import zipfile
from pathlib import Path

import pytest

from monarch_nb.actor import this_host
from monarch_nb.code import PipError, packages, run_pip

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow, pytest.mark.usefixtures("host")]


def wheel(folder: Path, version: str) -> str:
    """A package `toy_of_test` with its version."""
    file = folder / f"toy_of_test-{version}-py3-none-any.whl"
    info = f"toy_of_test-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("toy_of_test.py", f"version = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: toy_of_test\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", f"toy_of_test.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return str(file)


def version() -> str:
    import toy_of_test  # type: ignore[import-not-found]

    return str(toy_of_test.version)


def test_ranks_import_installed_packages_and_stale_ones_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "packages"
    folder.mkdir()
    procs = this_host().spawn_procs({"gpus": 2}, name="trainers", env={"PYTHONPATH": str(folder)})
    try:
        words = ["install", "--no-index", "--no-deps", "--target", str(folder)]
        result = run_pip(procs, [*words, wheel(tmp_path, "1.0")])
        assert repr(result).endswith("): toy_of_test 1.0")
        assert "Successfully installed toy-of-test-1.0" in capfd.readouterr().out
        assert list(procs.run(version).get(20).values()) == ["1.0", "1.0"]
        loaded = procs.run(packages._loaded_packages, ["toy_of_test", "never-installed"]).get(20).values()
        assert list(loaded) == [["toy_of_test"]] * 2
        with pytest.raises(PipError, match=r"trainers gpus=0-1 \(.*\): pip has failed, with status 1"):
            run_pip(procs, [*words, "no-such-package-of-ours"])
    finally:
        procs.stop().get(20)
