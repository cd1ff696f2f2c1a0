"""%pip for meshes leaves IPython's own as it is."""

from typing import Any, cast

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from monarch_kernel.magics import PackageMagics, _split_pip

pytestmark = pytest.mark.timeout(20)


def test_lines_without_a_mesh_are_ipythons_after_repeated_loading() -> None:
    lines: list[str] = []
    shell, session = InteractiveShell(), cast("Any", None)
    shell.register_magic_function(lines.append, "line", "pip")
    for _ in range(2):
        shell.register_magics(PackageMagics(shell, session))
    for line in ("install 'einops", "install --mesh-free x", ""):
        shell.run_line_magic("pip", line)
    assert lines == ["install 'einops", "install --mesh-free x", ""]


def test_the_mesh_and_the_words_are_read() -> None:
    assert _split_pip("install 'a b' --mesh w -U") == ("w", ["install", "a b", "-U"])
    assert _split_pip("install x --mesh=w") == ("w", ["install", "x"])
    with pytest.raises(UsageError, match="which mesh"):
        _split_pip("install x --mesh")
    with pytest.raises(UsageError, match="No closing quotation"):
        _split_pip("install 'x --mesh w")
