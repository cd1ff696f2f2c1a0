"""The magics in a real kernel: results, messages and errors."""

import re

import pytest

from tests.notebook.notebook import Cell, Notebook

pytestmark = pytest.mark.timeout(120)


def test_mesh_binds_its_name_and_shows_itself(nb: Notebook) -> None:
    cell = nb.run("%mesh small gpus=2").ok()
    assert cell.text == "<ProcMesh 'small' {gpus=2}>"
    assert nb.run("type(small).__name__, small.sizes").text == "('ProcMesh', {'gpus': 2})"
    assert nb.run("again = small\n%stop small again small").ok().stdout == "stopped small: 2 procs\n"


def test_the_same_line_again_gives_the_same_mesh(nb: Notebook) -> None:
    before = nb.run("a.pid.call().get().values()").text
    cell = nb.run("%mesh w gpus=4").ok()
    assert "w is reused" in cell.stdout
    assert nb.run("%mesh w").ok().text == cell.text
    assert nb.run("a.pid.call().get().values()").text == before


def test_another_shape_setup_or_fresh_replaces_a_mesh_with_notice(nb: Notebook) -> None:
    nb.run("%mesh changing gpus=1").ok()
    assert "changing is replaced: it was gpus=1, now gpus=2" in nb.run("%mesh changing gpus=2").ok().stdout
    assert "its set-up has changed" in nb.run("%%mesh changing gpus=2\nmarker = rank + 10").ok().stdout
    assert nb.run("%%on changing\nmarker").ok().text.splitlines()[1:] == ["  gpus=0: 10", "  gpus=1: 11"]
    assert "is reused" in nb.run("%%mesh changing gpus=2\nmarker = rank + 10").ok().stdout
    assert "--fresh was asked for" in nb.run("%%mesh changing gpus=2 --fresh\nmarker = rank + 10").ok().stdout
    nb.run("%stop changing").ok()


def test_fresh_alone_gives_new_processes_of_the_same_shape_and_setup(nb: Notebook) -> None:
    nb.run("%%mesh anew gpus=2\nmarker = rank + 10").ok()
    assert "--fresh was asked for" in nb.run("%mesh anew --fresh").ok().stdout
    assert nb.run("%%on anew\nmarker").ok().text.splitlines()[1:] == ["  gpus=0: 10", "  gpus=1: 11"]
    failed = nb.run("%%mesh anew gpus=1\n1 / 0")
    assert failed.error is not None
    assert "anew is replaced: it was gpus=2, now gpus=1" in failed.stdout


@pytest.mark.slow
def test_a_mesh_over_two_hosts_has_their_dimension(nb: Notebook) -> None:
    assert nb.run("%mesh wide hosts=2 gpus=1").ok().text == "<ProcMesh 'wide' {hosts=2, gpus=1}>"
    cell = nb.run("%%on wide\nprint('here')\npoint['hosts']").ok()
    assert set(re.findall(r"\[wide hosts=([01-]+)\] here", cell.stdout)) in ({"0-1"}, {"0", "1"})
    assert cell.text.splitlines()[1:] == ["  hosts=0: 0", "  hosts=1: 1"]
    assert "mnb-idle" in nb.run("wide").html
    nb.run("%stop wide").ok()


def test_a_setup_that_raises_shows_its_line_and_leaves_no_mesh(nb: Notebook) -> None:
    cell = nb.run("%%mesh broken gpus=1\nx = 1\nx / 0")
    assert "ZeroDivisionError: division by zero" in cell.traceback
    assert "line 3" in cell.traceback
    assert "monarch_nb" not in cell.traceback
    assert nb.run("'broken' in globals()").text == "False"
    assert "broken" not in nb.run("%meshes").text


def test_on_keeps_a_namespace_and_gives_the_last_expression(nb: Notebook) -> None:
    assert nb.run("%%on w\nkept = rank * 2").ok().text == ""
    assert nb.run("%%on w\nkept + len(mesh)").ok().text.splitlines()[1] == "  gpus=0: 4"
    assert nb.run("%%on w gpus=1:3\nkept").ok().text.startswith("ValueMesh({gpus: 2})")
    assert nb.run("%%on w [gpus=3]\nkept").ok().text.startswith("ValueMesh({})")
    assert nb.run("Out[max(Out)].get(0)").ok().text == "6"  # `_` may be a variable of an earlier cell


def test_ranks_are_picked_as_output_names_them_and_keep_their_places(nb: Notebook) -> None:
    def shown(cell: str) -> list[str]:
        return nb.run(cell).ok().text.splitlines()[1:]

    assert shown("%%on w gpus=2:4\n'same'") == ["  gpus=2-3: 'same'"]
    assert shown("%%on w gpus=0-2\nrank") == ["  gpus=0: 0", "  gpus=1: 1", "  gpus=2: 2"]
    assert shown("%%on w gpus=0,2-3\n'same'") == ["  gpus=0,2-3: 'same'"]
    assert shown("%%on a gpus=0,3\ntype(self).__name__, len(mesh)") == ["  gpus=0,3: ('Worker', 2)"]
    printed = nb.run("%%on w gpus=0,2-3\nprint('hello')").ok().stdout
    assert "gpus=0,2-3] hello" in printed
    assert printed.count("hello") <= 3
    assert "gpus=0" in nb.run("%stacks a gpus=0,3").ok().text
    assert "healed 0" not in nb.run("%heal w gpus=0,2-3").ok().stdout
    assert "nothing runs on w gpus=0,2-3" in nb.run("%interrupt w gpus=0,2-3").ok().stdout
    assert "[gpus=3] hello" in nb.run("%logs w gpus=0,3 --last 1").ok().text


def test_ranks_of_several_hosts_are_picked_as_output_names_them(nb: Notebook) -> None:
    nb.run("%mesh grid hosts=2 gpus=3").ok()
    cell = nb.run("%%on grid hosts=0 gpus=0-1; hosts=1 gpus=2\nprint('here')\npoint['hosts']").ok()
    assert cell.text.splitlines()[1:] == ["  hosts=0 gpus=0-1: 0", "  hosts=1 gpus=2: 1"]
    nb.run("%stop grid").ok()


def test_one_host_is_not_named(nb: Notebook) -> None:
    nb.run("%mesh single hosts=1 gpus=2").ok()
    cell = nb.run("%%on single\nprint('here')\nrank").ok()
    assert cell.text.splitlines()[1:] == ["  gpus=0: 0", "  gpus=1: 1"]
    assert "hosts" not in cell.stdout
    nb.run("%stop single").ok()


def test_on_an_actor_mesh_has_self(nb: Notebook) -> None:
    nb.run("%%on a\nself.note = rank + 1").ok()
    assert nb.run("%%on a gpus=2\nself.note").ok().text.endswith("3")


def test_on_awaits_at_the_top(nb: Notebook) -> None:
    cell = nb.run("%%on w\nimport asyncio\nawait asyncio.sleep(0, rank)").ok()
    assert cell.text.splitlines()[-1] == "  gpus=3: 3"


def test_an_error_in_on_shows_the_line_of_the_cell(nb: Notebook) -> None:
    cell = nb.run("%%on w\nx = 0\n1 / x")
    assert cell.error is not None
    assert cell.error["ename"] == "ActorError"
    assert "ZeroDivisionError" in cell.error["evalue"]
    assert "line 3" in cell.traceback
    assert "1 / x" in cell.traceback
    assert "monarch_nb" not in cell.traceback
    assert "monarch_kernel" not in cell.traceback


def test_a_syntax_error_in_on_is_told_before_anything_runs(nb: Notebook) -> None:
    cell = nb.run("%%on w\nprint('ran')\n1 +")
    assert cell.error is not None
    assert cell.error["ename"] == "SyntaxError"
    assert cell.stdout == ""
    assert "line 3" in cell.traceback
    assert len(cell.traceback.splitlines()) < 8


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("%mesh", "which mesh? The name of a mesh comes first"),
        ("%mesh new", "how large?"),
        ("%mesh os gpus=1", "os is a module already"),
        ("%%on nothing\n1", "there is no mesh 'nothing'; meshes:"),
        ("%%on os\n1", "os is a module, not a mesh"),
        ("%%on w hosts=0\n1", "no dimension 'hosts'; its dimensions are 'gpus'"),
        ("%%on w gpus=9\n1", "index out of range: gpus=9"),
        ("%%on w gpus=3:3\n1", "is empty"),
        ("%%on w gpu=2\n1", "did you mean 'gpus'?"),
        ("%%on w gpus=0,1-9\n1", "index out of range: gpus=4"),
        ("%heal", "which mesh?"),
        ("%heal nothing", "there is no mesh 'nothing'"),
        ("%stop", "--all"),
        ("%stop nothing", "there is no mesh 'nothing'"),
        ("%stop w --all", "not both"),
        ("%interrupt", "which mesh?"),
        ("%meshes w", "takes no arguments"),
        ("%%mesh w gpus=-1\nx = 1", "without a set-up: write %mesh w gpus=-1, or a size of at least 1"),
        ("%%mesh w gpus=0\nx = 1", "gpus=0 is not a size"),
    ],
)
def test_mistakes_in_a_line_are_reported_in_one_line(nb_quick: Notebook, line: str, error: str) -> None:
    cell = nb_quick.run(line)
    assert error in cell.stderr
    assert cell.stderr.startswith("UsageError: ")
    assert cell.stderr.count("\n") <= 2


@pytest.fixture
def nb_quick(kernel: Notebook) -> Notebook:
    kernel.run("%mesh w gpus=4\nimport os").ok()
    return kernel


def test_meshes_lists_what_is_there_and_who_refers_to_it(nb: Notebook) -> None:
    nb.run("%stop --unused")  # of the tests before
    nb.run("held = [this_host().spawn_procs(per_host={'gpus': 1}, name='listed')]\nheld[0].initialized.get();").ok()
    lines = nb.run("%meshes").ok().text.splitlines()
    assert lines[0].split() == ["mesh", "kind", "shape", "ranks", "hosts", "variables"]
    row = next(line for line in lines if line.startswith("listed"))
    assert row.split()[1:] == ["procs", "gpus=1", "1", "idle", row.split()[-2], "held"]
    nb.run("del held").ok()
    text = nb.run("%meshes").ok().text
    assert "(nothing)" in next(line for line in text.splitlines() if line.startswith("listed"))
    assert "%stop --unused" in text
    cell = nb.run("%stop --unused").ok()
    assert cell.stdout.strip() == "stopped listed: 1 proc"
    assert "listed" not in nb.run("%meshes").ok().text


def test_every_magic_has_help_with_examples(nb: Notebook) -> None:
    for magic in ("mesh", "on", "actor", "meshes", "heal", "stop", "interrupt"):
        doc = nb.run(
            f"get_ipython().find_magic('{magic}', 'cell' if '{magic}' in ('on', 'actor') else 'line').__doc__"
        ).text
        assert f"%{magic}" in doc


def test_names_dimensions_and_options_are_completed(nb: Notebook) -> None:
    exact = nb.run("import IPython; IPython.version_info[:2] >= (8, 6)").text == "True"  # older ones add Python's names
    names = set(nb.complete("%stop "))
    assert {"w", "a", "--all", "--unused"} <= names
    for line, offered in (
        ("%%on w gp", ["gpus="]),
        ("x = 1\n%mesh w ", ["gpus=", "hosts=", "--fresh", "--no-dedup", "--job"]),
        ("%mesh w --fr", ["--fresh"]),
        ("%mesh w gpus=", ["1", "2", "4", "8"]),
        ("%heal w ", ["gpus=", "--kill", "--replace"]),
        ("%%on w gpus=", ["0", "1", "2", "3", "0-3"]),
        ("%why w ", ["--slow", "--replicas", "--memory", "--abort"]),
        ("%%why w --m", ["--memory"]),
        ("%%prof w ", ["gpus=", "--hz", "--torch"]),
    ):
        matches = nb.complete(line)
        assert matches == offered if exact else set(offered) <= set(matches), line
    assert not (exact and "print" in names)
    assert "a" in nb.complete("%heal a")
    assert "print" in nb.complete("%%on w\npri"), "the body of a cell is Python"


def test_the_extension_loads_under_both_names_and_unloads(nb: Notebook) -> None:
    nb.run("%load_ext monarch_nb").ok()
    nb.run("%unload_ext monarch").ok()
    assert nb.run("w").html == ""
    request = nb.start("a.work.call(say='plainly').get(); a.slice(gpus=3).die.broadcast(); time.sleep(60)")
    nb.until(request, nb.until(request, Cell(), "plainly"), "SIGKILL")
    nb.interrupt()
    nb.finish(request)
    nb.run("%load_ext monarch").ok()
    nb.run("heal_mesh(w)").ok()
    assert "mnb" in nb.run("w").html
    assert nb.run("%%on w gpus=0\nprint('once')").ok().stdout.count("once") == 1


def test_some_ranks_are_killed_healed_and_stopped_by_magics(nb: Notebook) -> None:
    nb.run("%mesh few gpus=3").ok()
    assert nb.run("%kill few gpus=0-1").ok().stdout == "killed 2 procs of few: %heal few starts what is lost again\n"
    assert nb.run("%heal few --replace").ok().stdout == "healed 2 procs of few\n"
    assert nb.run("%stop few gpus=2").ok().stdout == "stopped 1 proc of few\n"
    nb.run("%stop few").ok()
    assert (
        "it has no processes to kill" in nb.run("from monarch_nb.lifecycle import kill_mesh; kill_mesh(few)").traceback
    )
