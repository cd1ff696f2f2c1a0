"""Pages of the reference: one for each public module, from its docstrings, with code that tests run.

A module with many classes has a page for each of them, and its own page lists these.
"""

import inspect
from functools import cache
from pathlib import PurePosixPath

from scripts.site.names import Name, example, first_home, module_of, module_path, modules, names

FEW = 8  # classes that one page describes


def page_of(module: str) -> str:
    """The file of a module's page, within docs/."""
    return f"reference/{module or 'monarch'}.md"


def page_of_class(name: Name) -> str:
    """The file of the page of a class that has one."""
    return f"reference/{name.module or 'monarch'}/{name.name}.md"


def pages() -> dict[str, str]:
    """All pages, by file."""
    of_modules = {page_of(module): text(module) for module in modules()}
    return of_modules | {page_of_class(name): _class(name) for module in modules() for name in separate(module)}


@cache
def separate(module: str) -> tuple[Name, ...]:
    """The classes of a module that have pages of their own."""
    own = tuple(name for name in names(module) if name.kind == "class" and first_home()[name.home] == name)
    return own if len(own) > FEW else ()


def text(module: str) -> str:
    """The page of a module."""
    parts = [f"# {module_path(module)}", inspect.getdoc(module_of(module)) or ""]
    parts[1] = _prose(parts[1])
    parts += [_entry(name) for name in names(module)]
    return "\n\n".join(parts) + "\n"


def _class(name: Name) -> str:
    """The page of a class."""
    module = f"[`{module_path(name.module)}`](../{PurePosixPath(page_of(name.module)).name})"
    parts = [f"# {name.name}", f"*{name.kind}* · `{name.full}`, of {module}", *_described(name, "../")]
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
        lines += _example(name, "")
    elif described is not None and described != name:
        page = PurePosixPath(page_of(described.module)).name
        lines.append(f"The same as [`{described.full}`]({page}#{described.anchor}).")
    elif name in separate(name.module):
        page = PurePosixPath(page_of_class(name)).relative_to("reference")
        lines.append((inspect.getdoc(name.value) or "").partition("\n\n")[0])
        lines.append(f"[Members and example]({page})")
    else:
        lines += _described(name, "")
    return "\n\n".join(lines)


def _described(name: Name, up: str) -> list[str]:
    """The docstrings of an object, without members that a public class describes, and code that uses it."""
    lines = [f"::: {name.home}"]
    if inspect.isclass(name.value):
        shown, elsewhere = _inherited(name.value)
        lines[0] += f"\n    options:\n      inherited_members: {shown or 'false'}"
        for base, members in elsewhere.items():
            link = f"{up}{PurePosixPath(page_of(base.module)).name}#{base.anchor}"
            lines.append(f"Inherited from [`{base.full}`]({link}): {', '.join(f'`{member}`' for member in members)}.")
    return lines + _example(name, up)


def _inherited(kind: type) -> tuple[list[str], dict[Name, list[str]]]:
    """The public members that a class has from private classes of ours, and those from each public one."""
    names, shown, elsewhere = set(vars(kind)), list[str](), dict[Name, list[str]]()
    for base in kind.__mro__[1:]:
        if not base.__module__.startswith("monarch_nb"):
            continue
        members = [name for name in vars(base) if not name.startswith("_") and name not in names]
        names.update(members)
        described = first_home().get(f"{base.__module__}.{base.__qualname__}")
        if described is None:
            shown += members
        elif members:
            elsewhere[described] = members
    return shown, elsewhere


def _example(name: Name, up: str) -> list[str]:
    used = example(name)
    if used is None:
        return []
    page = f"{up}../{used.page.removeprefix('docs/')}" if used.page.startswith("docs/") else f"{up}../index.md"
    title = "README" if page.endswith("index.md") else PurePosixPath(page).stem
    return [f"Example, from [{title}]({page}), which tests run:\n\n```python\n{used.text.rstrip()}\n```"]


def _value(name: Name) -> str:
    value = name.value
    if isinstance(value, (str, int, float)):
        return "" if name.name == "__version__" else f"`{value!r}`"
    return inspect.getdoc(value) or ""
