"""`monarch.config`: settings of programs, of the environment, and of the processes that programs start."""

import contextlib
import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_nb import config
from monarch_nb.settings import KEYS, ChannelTransport, ConfigureArgs, Settings, settings
from tests.effort import tries

pytestmark = pytest.mark.timeout(tries(60))


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    before = settings.runtime()
    config.clear_runtime_config()
    yield
    settings.replace(before)


def test_configured_values_are_in_force_and_shown_as_text() -> None:
    config.configure(message_delivery_timeout="90m", tail_log_lines=3)
    assert config.get_runtime_config() == {"message_delivery_timeout": "1h 30m", "tail_log_lines": 3}
    assert config.get_global_config()["message_delivery_timeout"] == "1h 30m"
    assert settings.message_delivery_timeout == 5400.0
    config.clear_runtime_config()
    assert config.get_runtime_config() == {}
    assert config.get_global_config()["message_delivery_timeout"] == "30s"


@pytest.mark.parametrize("value", ["45s", 45, 45.0, timedelta(seconds=45)])
def test_durations_may_be_given_in_several_ways(value: Any) -> None:
    config.configure(stop_actor_timeout=value)
    assert config.get_runtime_config() == {"stop_actor_timeout": "45s"}


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(
        ValueError, match=r"invalid configuration key: `mesage_delivery_timeout`; did you mean message_"
    ):
        config.configure(mesage_delivery_timeout="1s")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "wrong",
    [
        {"tail_log_lines": "3"},
        {"tail_log_lines": -1},
        {"tail_log_lines": True},
        {"tail_log_lines": 2**70},
        {"enable_log_forwarding": 1},
        {"prefix_with_rank": "x"},
        {"message_delivery_timeout": "30"},
        {"message_delivery_timeout": None},
        {"default_encoding": "json"},
        {"message_latency_sampling_rate": "1"},
        {"mesh_admin_addr": 1},
        {"default_transport": 1},
    ],
)
def test_a_value_of_another_type_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(TypeError, match=next(iter(wrong))):
        config.configure(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tail_log_lines": -1},
        {"tail_log_lines": 2**64},
        {"codec_max_frame_length": 0},
        {"rdma_max_nics_per_buffer": 0},
        {"max_cast_fanout": 0},
        {"message_delivery_timeout": -1},
        {"message_delivery_timeout": "30"},
        {"message_delivery_timeout": "soon"},
        {"message_delivery_timeout": ""},
        {"remote_alloc_allowed_port_range": slice(-1, 3)},
        {"remote_alloc_allowed_port_range": slice(0, 65536)},
    ],
)
def test_a_value_out_of_range_is_refused_by_name(wrong: Any) -> None:
    for kind in (ValueError, TypeError):  # torchmonarch says TypeError
        with pytest.raises(kind, match=next(iter(wrong))):
            config.configure(**wrong)
    assert config.get_runtime_config() == {}


def test_a_malformed_duration_is_refused_in_the_expected_words() -> None:
    for text in ("invalid", "30", "abc123", "", "1x"):
        with pytest.raises(TypeError, match="Invalid duration format"):
            config.configure(host_spawn_ready_timeout=text)


@pytest.mark.parametrize("name", sorted(name for name, key in KEYS.items() if key.kind == "duration"))
def test_every_duration_reads_back_as_it_was_written(name: str) -> None:
    assert isinstance(config.get_global_config()[name], str)
    for text in ("30s", "5m", "2h", "1h 30m", "500ms", "0s"):
        with config.configured(**{name: text}) as values:  # type: ignore[misc]
            assert values[name] == config.get_runtime_config()[name] == text
        with config.configured(**{name: config.get_global_config()[name]}):  # type: ignore[misc]
            pass


def test_an_unknown_transport_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="tcp, ipc"):
        config.configure(default_transport="zzz")


def test_one_wrong_value_leaves_all_as_it_was() -> None:
    with pytest.raises(TypeError):
        config.configure(tail_log_lines=3, prefix_with_rank="x")  # type: ignore[arg-type]
    assert config.get_runtime_config() == {}


def test_a_block_puts_back_what_was_set_before() -> None:
    config.configure(tail_log_lines=1)
    with config.configured(tail_log_lines=2, prefix_with_rank=False) as values:
        assert (values["tail_log_lines"], values["prefix_with_rank"]) == (2, False)
        assert config.get_runtime_config() == {"tail_log_lines": 2, "prefix_with_rank": False}
    assert config.get_runtime_config() == {"tail_log_lines": 1}


def test_a_block_puts_back_after_an_error_too() -> None:
    with contextlib.suppress(ZeroDivisionError), config.configured(tail_log_lines=2):
        raise ZeroDivisionError
    assert config.get_runtime_config() == {}


def test_a_configuration_that_was_returned_can_be_set_again() -> None:
    with config.configured(default_transport="tcp", actor_spawn_max_idle=None, cleanup_timeout=0.5):
        before = config.get_runtime_config()
        config.clear_runtime_config()
        config.configure(**before)
        assert config.get_runtime_config() == before
    config.configure(**config.get_global_config())


def test_changing_the_returned_dictionary_changes_nothing() -> None:
    config.get_global_config()["tail_log_lines"] = 7
    assert config.get_global_config()["tail_log_lines"] == 20


def test_a_key_that_does_nothing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    conf = Settings({})
    with caplog.at_level(logging.WARNING):
        conf.configure({"split_max_buffer_size": 7})
        conf.configure({"split_max_buffer_size": 8})
        conf.configure({"tail_log_lines": 8})
    assert [record.getMessage() for record in caplog.records] == [
        "configuration: split_max_buffer_size is accepted, but does nothing in monarch-nb"
    ]
    assert conf.everything()["split_max_buffer_size"] == 8


@pytest.mark.parametrize(
    ("name", "text", "key", "shown"),
    [
        ("HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT", "5m", "message_delivery_timeout", "5m"),
        ("HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE", "300s", "mesh_proc_spawn_max_idle", "5m"),
        ("HYPERACTOR_MESH_TAIL_LOG_LINES", "100", "tail_log_lines", 100),
        ("HYPERACTOR_MESH_ENABLE_LOG_FORWARDING", "true", "enable_log_forwarding", True),
        ("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", "1_000", "codec_max_frame_length", 1000),
        ("MONARCH_RDMA_MAX_NICS_PER_BUFFER", "none", "rdma_max_nics_per_buffer", None),
        ("MONARCH_HYPERACTOR_SMALL_WRITE_THRESHOLD", "9", "small_write_threshold", 9),
        ("HYPERACTOR_REMOTE_STOP_GRACE_PERIOD", "9s", "stop_grace_period", "9s"),
        ("PYSPY_BIN", "/opt/py-spy", "pyspy_bin", "/opt/py-spy"),
        ("MONARCH_NB_HEAL_MAX_RESTARTS", "9", "heal_max_restarts", 9),
        ("HYPERACTOR_MESH_DEFAULT_TRANSPORT", "tcp", "default_transport", ChannelTransport.TcpWithHostname),
    ],
)
def test_the_environment_sets_keys(name: str, text: str, key: str, shown: object) -> None:
    conf = Settings({name: text})
    assert conf.everything()[key] == shown
    assert conf.explicit(key)
    assert conf.runtime() == {}


def test_the_program_goes_before_the_environment() -> None:
    conf = Settings({"HYPERACTOR_MESH_TAIL_LOG_LINES": "5"})
    conf.configure({"tail_log_lines": 6})
    assert conf.tail_log_lines == 6
    conf.replace({})
    assert conf.tail_log_lines == 5


def test_a_wrong_word_in_the_environment_is_ignored_with_a_warning() -> None:
    conf = Settings({"HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "soon"})
    with pytest.warns(UserWarning, match=r"HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT is ignored: .*'soon' is not a duration"):
        assert conf.message_delivery_timeout == 30.0


def test_processes_do_not_repeat_the_warning_of_their_controller(recwarn: pytest.WarningsRecorder) -> None:
    environ = {"HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "soon"}
    controller, proc, other = Settings(environ), Settings(environ), Settings({**environ, "MONARCH_NB_LOG_DEDUP": "?"})
    for conf in (proc, other):
        conf.receive(controller.to_send())
        assert conf.message_delivery_timeout == 30.0
    assert [str(warning.message).split()[2] for warning in recwarn] == [*environ, "MONARCH_NB_LOG_DEDUP"]


def test_other_names_of_the_environment_are_left_alone() -> None:
    conf = Settings({"MONARCH_FILE_LOG": "x", "MONARCH_NB_PYTHON": "3.11", "HYPERACTOR_": "", "MONARCH_NB_CONFIG": "{"})
    assert conf.everything() == Settings({}).everything()


VALUES = {
    "duration": st.integers(0, 2**62).map(lambda n: f"{n}ns"),
    "flag": st.booleans(),
    "count": st.integers(4096, 2**63 - 1),
    "ratio": st.floats(0, 1e6),
    "text": st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc", "Z"]), max_size=20),
    "encoding": st.sampled_from(config.Encoding),
    "transport": st.sampled_from([*ChannelTransport, "tcp://127.0.0.1:8080"]),
    "sharing": st.sampled_from([False, True, "mps", "mps-equal"]),
    "range": st.builds(slice, st.integers(0, 65535), st.integers(0, 65535)),
}


@given(st.fixed_dictionaries({}, optional={name: VALUES[key.kind] for name, key in KEYS.items()}))
def test_a_controllers_configuration_arrives_whole_at_its_processes(values: dict[str, Any]) -> None:
    controller, proc = Settings({}), Settings({"HYPERACTOR_MESH_TAIL_LOG_LINES": "5"})
    controller.configure(values)
    proc.receive(controller.to_send())
    for name in values:
        assert proc.value_of(KEYS[name]) == pytest.approx(controller.value_of(KEYS[name]))
        assert proc.everything()[name] == controller.everything()[name]
    assert proc.to_send() == controller.to_send()
    assert proc.runtime() == {}


@pytest.mark.fuzz
@given(st.one_of(st.text(), st.dictionaries(st.sampled_from(sorted(KEYS)), st.text()).map(str)))
def test_any_text_handed_on_is_taken_or_left(text: str) -> None:
    conf = Settings({})
    conf.receive(text)
    conf.everything()


@pytest.mark.fuzz
@given(st.sampled_from(sorted(KEYS)), st.text(max_size=60))
def test_any_word_in_the_environment_is_taken_or_left(name: str, text: str) -> None:
    import warnings

    conf = Settings({f"HYPERACTOR_{name.upper()}": text})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        conf.everything()


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.fuzz
@given(st.sampled_from(sorted(KEYS)), ANYTHING)
def test_any_value_is_set_or_refused(name: str, value: Any) -> None:
    conf = Settings({})
    try:
        conf.configure({name: value})
    except (TypeError, ValueError):
        assert conf.runtime() == {}
    else:
        conf.to_send()


def test_editors_are_told_the_same_keys() -> None:
    assert set(get_type_hints(ConfigureArgs)) == set(KEYS)


class TestParametrized:
    combinations: list[tuple[bool, int]] = []  # noqa: RUF012

    @config.parametrize_config(prefix_with_rank=[True, False], tail_log_lines=[1, 2])
    def test_each_combination_is_run(self) -> None:
        values = config.get_global_config()
        self.combinations.append((values["prefix_with_rank"], values["tail_log_lines"]))

    def test_all_four_combinations_were_run(self) -> None:
        assert sorted(self.combinations) == [(False, 1), (False, 2), (True, 1), (True, 2)]


@config.parametrize_config_pointwise(prefix_with_rank=[True, False], tail_log_lines=[1, 2])
def test_values_of_several_keys_go_in_step() -> None:
    values = config.get_global_config()
    assert (values["prefix_with_rank"], values["tail_log_lines"]) in [(True, 1), (False, 2)]


def test_values_in_step_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="prefix_with_rank: 1, tail_log_lines: 2"):
        config.parametrize_config_pointwise(prefix_with_rank=[True], tail_log_lines=[1, 2])
    with pytest.raises(ValueError):
        config.parametrize_config()
