"""The arguments that magics read from their lines, and their errors about malformed lines."""

from collections.abc import Callable
from typing import Any

import pytest
from IPython.core.error import UsageError

from monarch_kernel.arguments import check_name, read_actor, read_logs, read_mesh, read_names, read_place, read_timeline


def test_a_mesh_is_read_with_its_sizes_and_options() -> None:
    mesh = read_mesh("workers hosts=2, gpus=4 --fresh")
    assert (mesh.name, mesh.dims, mesh.fresh, mesh.dedup) == ("workers", {"hosts": 2, "gpus": 4}, True, True)
    assert read_mesh("workers [gpus=4] --no-dedup").dims == {"gpus": 4}


def test_a_selection_is_an_index_a_list_a_range_or_slice() -> None:
    target = read_place("%%on", "workers hosts=0 gpus=0-2,5")
    assert (target.name, target.picks) == ("workers", ({"hosts": 0, "gpus": [0, 1, 2, 5]},))
    assert read_place("%%on", "workers gpus=1:3").picks == ({"gpus": slice(1, 3, None)},)
    assert read_place("%%on", "w hosts=0 gpus=1; hosts=1").picks == ({"hosts": 0, "gpus": 1}, {"hosts": 1})
    assert read_place("%heal", "workers gpus=3 --kill", ("--kill",)).options == {"--kill"}
    assert read_place("%%on", "workers").picks == ()


def test_arguments_of_actors_have_blanks_only_inside_brackets_and_quotes() -> None:
    actor = read_actor("trainers on workers.slice(gpus=0) 3 sizes=[64, 10] name='a b' class=Trainer --fresh")
    assert (actor.name, actor.mesh, actor.cls, actor.fresh) == ("trainers", "workers.slice(gpus=0)", "Trainer", True)
    assert (actor.args, actor.kwargs) == (("3",), {"sizes": "[64, 10]", "name": "'a b'"})


def test_the_options_of_logs_may_stand_anywhere() -> None:
    logs = read_logs("workers --grep 'loss|nan' gpus=0-1 --since=5m --stderr --last 7")
    assert (logs.place.name, logs.place.picks) == ("workers", ({"gpus": [0, 1]},))
    assert logs.filters == {"grep": "loss|nan", "since": "5m", "stream": "stderr"}
    assert (logs.last, logs.follow) == (7, False)
    plain = read_logs("workers")
    assert (plain.filters, plain.last, plain.follow) == ({}, None, False)
    assert read_logs("workers --follow").follow


READ: dict[str, Callable[[str], Any]] = {
    "%mesh": lambda line: check_name(read_mesh(line).name),
    "%%on": lambda line: read_place("%%on", line),
    "%heal": lambda line: read_place("%heal", line, ("--kill",)),
    "%%actor": read_actor,
    "%logs": read_logs,
    "%timeline": lambda line: read_timeline("%timeline", line),
    "%stop": lambda line: read_names("%stop", line, ("--all", "--unused")),
}


@pytest.mark.parametrize(
    ("magic", "line", "message"),
    [
        ("%mesh", "", "which mesh? The name of a mesh comes first"),
        ("%mesh", "gpus=4", "which mesh? The name of a mesh comes first"),
        ("%mesh", "3x gpus=4", "cannot be the name of a variable"),
        ("%mesh", "for gpus=4", "cannot be the name of a variable"),
        ("%mesh", "new gpus=0", "gpus=0 is not a size"),
        ("%mesh", "new gpus=many", "gpus=many is not a size"),
        ("%mesh", "new four", "'four' is not a dimension"),
        ("%mesh", "new gpus=1 gpus=2", "given twice"),
        ("%mesh", "new gpus=1 --frsh", "knows no option --frsh; its options are --fresh, --job, --no-dedup"),
        ("%mesh", "new gpu=2", "did you mean gpus=2?"),
        ("%%on", "", "which mesh? The name of a mesh comes first"),
        ("%%on", "w gpus=x", "picks no rank"),
        ("%%on", "w gpus=3-1", "runs backwards: write gpus=1-3"),
        ("%%on", "w gpus=0,1:3", "mixes a list and a slice"),
        ("%heal", "w --gently", "knows no option --gently; its options are --kill"),
        ("%stop", "", "or %stop --all"),
        ("%stop", "--al", "knows no option --al"),
        ("%%actor", "", "a name, and the mesh"),
        ("%%actor", "counters", "a name, and the mesh"),
        ("%%actor", "counters w", "a name, and the mesh"),
        ("%%actor", "3x on w", "cannot be the name of a variable"),
        ("%%actor", "counters on w start=", "start= is not an expression"),
        ("%%actor", "counters on w start=1 start=2", "start is given twice"),
        ("%%actor", "counters on w start=1 2", "2 comes after start=1"),
        ("%%actor", "counters on w start = 1", "is not an expression"),
        ("%%actor", "counters on w --frsh", "knows no option --frsh; its options are --fresh"),
        ("%logs", "w --loud", "knows no option --loud"),
        ("%logs", "w --grep", "--grep: expected one argument"),
        ("%logs", "w --last many", "invalid int value"),
        ("%logs", "w --last -5", "--last -5 is no number of lines"),
        ("%timeline", "--save", "--save: expected one argument in '--save'"),
        ("%logs", "w --grep 'open", "No closing quotation"),
    ],
)
def test_a_malformed_line_is_explained(magic: str, line: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        READ[magic](line)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "change"), [("trainers hosts=+2", ("hosts", 2)), ("trainers hosts=-1", ("hosts", -1))]
)
def test_a_size_with_a_sign_changes_the_mesh_that_is_there(line: str, change: tuple[str, int]) -> None:
    assert read_mesh(line).change == change


@pytest.mark.parametrize("line", ["trainers hosts=+0", "trainers hosts=+2 gpus=4", "trainers hosts=-1 --fresh"])
def test_a_change_stands_alone(line: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        read_mesh(line)
