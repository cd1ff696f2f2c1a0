"""Parsers of magics' lines: words in, plain values out; errors say what to write instead."""

import argparse
import ast
import difflib
import functools
import keyword
import re
import shlex
from collections.abc import Iterable
from typing import Any, TypeAlias

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser
from msgspec import Struct, field

from monarch_nb.job.named import arguments_of
from monarch_nb.mesh import ActorMesh, ProcMesh, part_of, region_of
from monarch_nb.shape import Region

_DIM = re.compile(r"([^\W\d]\w*)=(.*)", re.ASCII)
_SLICE = re.compile(r"(-?\d*):(-?\d*)(?::(-?\d*))?")
_SPAN = re.compile(r"(-?\d+)(?:-(\d+))?")
_JOB = re.compile(r"(?:^|\s)--job(?:\s*=\s*|\s+)(\S+)")
_CHANGE = re.compile(r"[+-][1-9]\d*")
_NAMED = re.compile(r"([^\W\d]\w*)=(?!=)(.*)", re.ASCII | re.DOTALL)
_BLANKS = "positional arguments come before named ones, and an expression has no blanks outside of brackets"
USUAL_DIMS = ("hosts", "gpus")  # a dimension with a similar name is taken for a misspelt one
LOG_OPTIONS = ("--follow", "--grep", "--level", "--since", "--last", "--stderr", "--stdout")
PROFILE_OPTIONS = ("--hz", "--torch")
TIMELINE_OPTIONS = ("--stop", "--save")
WHY_OPTIONS = ("--slow", "--replicas", "--memory", "--abort")  # the last one without a cell
Mesh: TypeAlias = "ProcMesh | ActorMesh[Any]"
Picks: TypeAlias = "dict[str, int | slice | list[int]]"


def split_words(line: str) -> list[str]:
    """Returns the words of a line, which blanks and commas separate."""
    # The brackets with which documentation marks what may be left out are often typed along. A comma before a number
    # goes on with a list of indices.
    return [word.strip("[]") if "=" in word else word for word in re.split(r"\s*,(?!\d)\s*|\s+", line.strip()) if word]


def split_line(usage: str, line: str, options: set[str]) -> tuple[str, list[str], set[str]]:
    """Returns the name that comes first, the other words, and the options. Raises UsageError."""
    words = split_words(line)
    magic = usage.split()[0]
    flags = {word for word in words if word.startswith("-")}
    check_options(magic, flags, options)
    words = [word for word in words if not word.startswith("-")]
    if not words or "=" in words[0]:
        raise UsageError(f"{magic}: which mesh? The name of a mesh comes first: {usage}")
    return words[0], words[1:], flags


def read_names(magic: str, line: str, options: Iterable[str] = ()) -> tuple[list[str], set[str]]:
    """Reads names, each once, and options. Raises UsageError."""
    words = line.split()
    flags = {word for word in words if word.startswith("-")}
    check_options(magic, flags, set(options))
    names = list(dict.fromkeys(word.rstrip(",") for word in words if not word.startswith("-")))
    if not names and not flags:
        alternatives = "".join(f", or {magic} {option}" for option in options)
        raise UsageError(f"{magic}: which mesh? Write {magic} NAME{alternatives}")
    return names, flags


def check_options(magic: str, options: set[str], allowed: set[str]) -> None:
    """Raises UsageError for an option that a magic does not have."""
    for option in sorted(options - allowed):
        hint = f"; its options are {', '.join(sorted(allowed))}" if allowed else ""
        raise UsageError(f"{magic} knows no option {option}{hint}. {magic}? shows its help")


def check_name(name: str) -> None:
    """Raises UsageError for a name that no variable can have."""
    if not is_name(name):
        raise UsageError(f"%mesh: {name!r} cannot be the name of a variable; write %mesh workers gpus=4")


def is_name(name: str) -> bool:
    """Returns whether a variable can have this name."""
    return name.isidentifier() and not keyword.iskeyword(name)


def read_dim(word: str, example: str) -> tuple[str, str]:
    """Returns the name of a dimension, and the text after its equals sign. Raises UsageError."""
    match = _DIM.fullmatch(word)
    if match is None:
        raise UsageError(f"{word!r} is not a dimension: write a name and a number, as in {example}")
    return match[1], match[2]


class MeshSelection(Struct, frozen=True):
    """The mesh and ranks that a line of `magic` names."""

    magic: str
    name: str
    picks: tuple[Picks, ...] = ()
    options: frozenset[str] = frozenset()

    def of(self, mesh: Mesh) -> Mesh:
        """Returns the selected part of `mesh`. Raises UsageError for an unknown dimension or index."""
        if not self.picks:
            return mesh
        region = region_of(mesh)
        try:
            parts = [region.pick(**picks) for picks in self.picks]
        except (TypeError, IndexError, ValueError) as error:
            raise UsageError(f"{self.magic}: {error}") from None
        return part_of(mesh, functools.reduce(Region.union, parts))


def read_place(magic: str, line: str, options: Iterable[str] = ()) -> MeshSelection:
    """Reads the name of a mesh and the picked ranks, written as in output: `gpus=0-2,5`.

    Raises UsageError.
    """
    first, *parts = line.split(";")
    name, words, flags = split_line(f"{magic} NAME gpus=0-2", first, set(options))
    picks = [_picks(magic, words)] if words else []
    for part in parts:
        words = split_words(part)
        flags |= {word for word in words if word.startswith("-")}
        picks.append(_picks(magic, [word for word in words if not word.startswith("-") and word != name]))
    check_options(magic, flags, set(options))
    return MeshSelection(magic, name, tuple(pick for pick in picks if pick), frozenset(flags))


def _picks(magic: str, words: Iterable[str]) -> Picks:
    picks: Picks = {}
    for word in words:
        label, text = read_dim(word, "gpus=0-2")
        if label in picks:
            raise UsageError(f"{magic}: {label} is given twice")
        parts = [_pick(magic, label, part) for part in text.strip("[]").split(",")]
        if len(parts) == 1:
            picks[label] = parts[0]
        elif any(isinstance(part, slice) for part in parts):
            raise UsageError(f"{magic}: {label}={text} mixes a list and a slice: write {label}=0,2-4")
        else:
            flat = [[part] if isinstance(part, int) else part for part in parts if not isinstance(part, slice)]
            picks[label] = [index for part in flat for index in part]
    return picks


def _pick(magic: str, label: str, text: str) -> int | slice | list[int]:
    if match := _SLICE.fullmatch(text):
        return slice(*(int(part) if part else None for part in match.groups()))
    match = _SPAN.fullmatch(text)
    if match is None:
        raise UsageError(
            f"{magic}: {label}={text} picks no rank: write an index ({label}=0), a list ({label}=0,2-4) or a slice "
            f"({label}=0:2)"
        )
    first, last = match.groups()
    if last is None:
        return int(first)
    if int(last) < int(first):
        raise UsageError(f"{magic}: {label}={text} runs backwards: write {label}={last}-{first}")
    return list(range(int(first), int(last) + 1))


class _Options:
    """The options of one magic. The other words of its line name a mesh or a slice of one."""

    def __init__(self, magic: str) -> None:
        self._magic = magic
        self._parser = MagicArgumentParser(prog=magic, argument_default=argparse.SUPPRESS)  # type: ignore[no-untyped-call]
        self._parser.allow_abbrev = False
        self._parser.add_argument("words", nargs="*")

    def add(self, *names: str, **form: Any) -> None:
        """Adds options with the same keyword arguments of `add_argument`."""
        for name in names:
            self._parser.add_argument(name, **form)

    def read(self, line: str, allowed: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
        """Returns the other words, and the options of the line, which must be allowed ones. Raises UsageError."""
        try:
            namespace, unknown = self._parser.parse_known_intermixed_args(shlex.split(line))
        except (ValueError, UsageError) as error:
            raise UsageError(f"{self._magic}: {error} in {line!r}") from None
        check_options(self._magic, {word.partition("=")[0] for word in unknown}, set(allowed))
        options = vars(namespace)
        return " ".join(options.pop("words", ())), options


_logs = _Options("%logs")
_logs.add("--follow", "--stderr", "--stdout", action="store_true")
_logs.add("--grep", "--level", "--since")
_logs.add("--last", type=int)


class LogArguments(Struct, frozen=True):
    """`%logs NAME gpus=0-2 --grep RE --since 5m`; `filters` are those of `logs_of`."""

    place: MeshSelection
    follow: bool = False
    last: int | None = None
    filters: dict[str, Any] = field(default_factory=dict)


def read_logs(line: str) -> LogArguments:
    """Reads the arguments of %logs. Raises UsageError."""
    words, options = _logs.read(line, LOG_OPTIONS)
    follow, last = options.pop("follow", False), options.pop("last", None)
    if last is not None and last < 1:
        raise UsageError(f"%logs: --last {last} is no number of lines: write --last 50")
    stream = next((name for name in ("stderr", "stdout") if options.pop(name, False)), None)
    return LogArguments(read_place("%logs", words), follow, last, {**options, **({"stream": stream} if stream else {})})


_profile = _Options("%%prof")
_profile.add("--torch", action="store_true")
_profile.add("--hz", type=float)


class ProfileArguments(Struct, frozen=True):
    """`%%prof NAME gpus=0-2 --hz 100 --torch`."""

    place: MeshSelection
    hz: float = 100.0
    torch: bool = False


def read_profile(line: str) -> ProfileArguments:
    """Reads the arguments of %%prof. Raises UsageError."""
    words, options = _profile.read(line, PROFILE_OPTIONS)
    arguments = ProfileArguments(read_place("%%prof", words), **options)
    if not 0 < arguments.hz <= 1000:
        raise UsageError("%%prof: --hz is the number of samples a second of each rank: up to 1000, 100 by default")
    return arguments


class TimelineArguments(Struct, frozen=True):
    """`%timeline NAME gpus=0-2 --save step.json`; without a name it is about the newest."""

    place: MeshSelection | None = None
    stop: bool = False
    save: str = ""


def read_timeline(magic: str, line: str) -> TimelineArguments:
    """Reads the arguments of %timeline, or %%timeline. Raises UsageError."""
    options = _Options(magic)
    options.add("--stop", action="store_true")
    options.add("--save")
    words, values = options.read(line, TIMELINE_OPTIONS)
    return TimelineArguments(read_place(magic, words) if words else None, **values)


class MeshArguments(Struct, frozen=True):
    """Arguments of a %mesh line."""

    name: str
    dims: dict[str, int] = field(default_factory=dict)
    fresh: bool = False
    dedup: bool = True
    job: str = ""  # the kind of the job that has its hosts, or the name of one in monarch.toml
    arguments: dict[str, Any] = field(default_factory=dict)  # of that job
    change: tuple[str, int] | None = None  # a dimension of an existing mesh, and by how much it grows or shrinks


def read_mesh(line: str) -> MeshArguments:
    """Reads the arguments of %mesh. Raises UsageError."""
    job, parameters = "", frozenset[str]()
    if match := _JOB.search(line):
        job, line = match[1], f"{line[: match.start()]} {line[match.end() :]}"
        parameters = arguments_of(job)
    elif "--job" in line.split():
        raise UsageError("%mesh: which job? Write --job slurm, or --job and a name that monarch.toml has")
    name, words, options = split_line("%mesh NAME gpus=4", line, {"--fresh", "--no-dedup", "--job"})
    dims: dict[str, int] = {}
    arguments: dict[str, Any] = {}
    for word in words:
        label, size = read_dim(word, "gpus=4")
        if label in parameters and label not in USUAL_DIMS:
            arguments[label] = _value(size)
            continue
        usual = difflib.get_close_matches(label, USUAL_DIMS, n=1, cutoff=0.8)
        if usual and label not in USUAL_DIMS:
            raise UsageError(
                f"%mesh: the usual dimensions are called {' and '.join(USUAL_DIMS)}; did you mean {usual[0]}={size}?"
            )
        if _CHANGE.fullmatch(size) and len(words) == 1 and not job and not options:
            return MeshArguments(name, {}, change=(label, int(size)))
        if not size.isdecimal() or int(size) < 1:
            suggestions = difflib.get_close_matches(label, parameters - set(USUAL_DIMS), n=1, cutoff=0.7)
            if suggestions:
                raise UsageError(f"%mesh --job {job}: there is no {label}; did you mean {suggestions[0]}={size}?")
            raise UsageError(
                f"%mesh: {label}={size} is not a size: write a whole number of at least 1, as in {label}=4"
            )
        if label in dims:
            raise UsageError(f"%mesh: {label} is given twice")
        dims[label] = int(size)
    return MeshArguments(name, dims, "--fresh" in options, "--no-dedup" not in options, job, arguments)


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):  # 1:00:00, 64G, gpu
        return text


class ActorArguments(Struct, frozen=True):
    """Arguments of a %%actor line."""

    name: str
    mesh: str
    args: tuple[str, ...] = ()
    kwargs: dict[str, str] = field(default_factory=dict)
    cls: str = ""
    fresh: bool = False

    @property
    def constructor(self) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        """The arguments of `__init__`, to be compared."""
        return self.args, tuple(sorted(self.kwargs.items()))


def read_actor(line: str) -> ActorArguments:
    """Reads the arguments of %%actor. Raises UsageError."""
    usage = "write %%actor trainers on workers lr=1e-3"
    words = _expressions(line)
    options = {word for word in words if re.fullmatch(r"--[a-z]+", word)}
    check_options("%%actor", options, {"--fresh"})
    words = [word for word in words if word not in options]
    if len(words) < 3 or words[1] != "on":
        raise UsageError(f"%%actor: a name, and the mesh that the actors are to live on, come first: {usage}")
    name, _, mesh, *expressions = words
    if not is_name(name):
        raise UsageError(f"%%actor: {name!r} cannot be the name of a variable; {usage}")
    args: list[str] = []
    kwargs: dict[str, str] = {}
    for word in expressions:
        match = _NAMED.fullmatch(word)
        label, text = (match[1], match[2]) if match is not None else ("", word)
        if label in kwargs:
            raise UsageError(f"%%actor: {label} is given twice")
        if not label and kwargs:
            raise UsageError(f"%%actor: {word} comes after {'='.join(next(reversed(kwargs.items())))}; {_BLANKS}")
        if label != "class":
            _check_expression(label, text)
        if label:
            kwargs[label] = text
        else:
            args.append(text)
    return ActorArguments(name, mesh, tuple(args), kwargs, kwargs.pop("class", ""), "--fresh" in options)


def _check_expression(label: str, text: str) -> None:
    try:
        compile(text, "<argument>", "eval")
    except SyntaxError as error:
        argument = f"{label}={text}" if label else text
        raise UsageError(f"%%actor: {argument} is not an expression ({error.msg}); {_BLANKS}") from None


def _expressions(line: str) -> list[str]:
    """Expressions separated by blanks outside of brackets and quotes; commas at their ends are dropped."""
    words, word, depth, quote = [], "", 0, ""
    index = 0
    while index < len(line):
        char = line[index]
        if quote:
            if char == "\\":
                word += line[index : index + 2]
                index += 2
                continue
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char.isspace() and depth <= 0:
            words.append(word)
            word = ""
        word += "" if not word and char.isspace() else char
        index += 1
    return [stripped for text in (*words, word) if (stripped := text.rstrip(","))]
