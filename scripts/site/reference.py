"""Pages of the reference: one for each public module, from its docstrings, with code that tests run."""

import inspect
from pathlib import PurePosixPath

from scripts.site.names import Name, example, first_home, module_of, module_path, modules, names


def page_of(module: str) -> str:
    """The file of a module's page, within docs/."""
    return f"reference/{module or 'monarch'}.md"


def pages() -> dict[str, str]:
    """All pages, by file."""
    return {page_of(module): text(module) for module in modules()}


def text(module: str) -> str:
    """The page of a module."""
    parts = [f"# {module_path(module)}", inspect.getdoc(module_of(module)) or ""]
    parts[1] = _prose(parts[1])
    parts += [_entry(name) for name in names(module)]
    return "\n\n".join(parts) + "\n"


def _prose(doc: str) -> str:
    """A module's docstring: lines of code in it, after the first blank line, are shown as code."""
    first, *rest = doc.split("\n\n")
    shown = [part if part[:1].isupper() or part[:1] == "`" else f"```python\n{part}\n```" for part in rest]
    return "\n\n".join([first, *shown])


def _entry(name: Name) -> str:
    shown = f"`{name.name}`" if name.name.startswith("_") else name.name  # no emphasis
    lines = [f"## {shown} {{ #{name.anchor} }}", f"*{name.kind}* · `{name.full}`"]
    described = first_home().get(name.home)
    if not name.home:
        lines.append(_value(name))
    elif described is not None and described != name:
        there = PurePosixPath(page_of(described.module)).name
        lines.append(f"The same as [`{described.full}`]({there}#{described.anchor}).")
        return "\n\n".join(lines)
    else:
        lines.append(f"::: {name.home}")
    used = example(name)
    if used is not None:
        page = f"../{used.page.removeprefix('docs/')}" if used.page.startswith("docs/") else "../index.md"
        title = "README" if page.endswith("index.md") else PurePosixPath(page).stem
        lines.append(f"Example, from [{title}]({page}), which tests run:\n\n```python\n{used.text.rstrip()}\n```")
    return "\n\n".join(lines)


def _value(name: Name) -> str:
    value = name.value
    if isinstance(value, (str, int, float)):
        return "" if name.name == "__version__" else f"`{value!r}`"
    return inspect.getdoc(value) or ""
