"""Preferences: layers, the file and its comments, and error messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_client.preferences.control import shown
from swarm_client.preferences.file import edited, set_preference, template
from swarm_client.preferences.hours import WEEKDAYS
from swarm_client.preferences.layers import (
    PreferenceSource,
    load,
    parse_file,
    preferences_path,
)
from swarm_client.preferences.model import GROUPS, GpuPreferences, Preferences
from swarm_client.preferences.reference_page import page
from swarm_client.tui.settings import value_text
from swarm_shared.base.errors import ConfigurationError, StorageError, VersionError

ROOT = Path(__file__).parents[3]


def written(folder: Path, text: str) -> Path:
    path = folder / "preferences.toml"
    path.write_text(text)
    return path


def test_a_flag_goes_before_the_environment_before_the_file_before_the_default(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, "cpu_percent = 10\nidle_minutes = 5\nmax_cores = 3\n")
    environment = {"SWARM_CPU_PERCENT": "20", "SWARM_IDLE_MINUTES": "7", "PATH": "/bin"}
    layered = load(path, environment, ["cpu_percent=30"])
    said = layered.preferences
    assert (said.cpu_percent, said.idle_minutes, said.max_cores, said.nice) == (30, 7, 3, 10)
    layers = [layered.origin(n).layer for n in ("cpu_percent", "idle_minutes", "max_cores", "nice")]
    assert layers == ["flag", "environment", "file", "default"]
    assert layered.origin("idle_minutes").where == "SWARM_IDLE_MINUTES"


def test_tables_can_be_set_in_every_layer(tmp_path: Path) -> None:
    path = written(tmp_path, "[gpu.all]\nvram_gib = 4\nduty_cycle_percent = 50\n")
    environment = {"SWARM_GPU_1_VRAM_GIB": "8", "SWARM_HOURS_ON_SATURDAY": "never"}
    said = load(path, environment, ["gpu.0.use=false", "exclusive_apps=game, Other.exe"])
    preferences = said.preferences
    assert preferences.for_gpu(0) == GpuPreferences(use=False, vram_gib=4, duty_cycle_percent=50)
    assert preferences.for_gpu(1) == GpuPreferences(vram_gib=8, duty_cycle_percent=50)
    assert preferences.hours_on == {"saturday": "never"}
    assert preferences.exclusive_apps == ("game", "Other.exe")


def test_variables_of_the_prefix_that_are_none_of_ours_are_left_alone(tmp_path: Path) -> None:
    environment = {"SWARM_PACE_FLOPS": "1e9", "SWARM_GPU_COUNT": "3", "SWARM_NICE": ""}
    assert load(tmp_path / "none", environment).preferences == Preferences()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cpu_procent = 5", "there is no preference 'cpu_procent'; did you mean 'cpu_percent'?"),
        ("[gpu.0]\nvram = 5", "[gpu.0] has no preference 'vram'; did you mean 'vram_gib'?"),
        ("cpu_percent = 101", "cpu_percent must be at most 100, not 101"),
        ("run_on_batteries = 'yes'", "run_on_batteries must be true or false, not 'yes'"),
        ("max_cores = 1.5", "max_cores must be a whole number, not 1.5"),
        ("idle_minutes = nan", "idle_minutes must be a finite number, not nan"),
        ("hours = '8 to 9'", "hours must be \"always\", \"never\" or two times like"),
        ("upload_bytes_per_second = 100", "must be 0 (no limit) or at least 65536, not 100"),
        ("exclusive_apps = 'game'", "exclusive_apps must be a list"),
        ("exclusive_apps = [3]", "each part of exclusive_apps must be text in quotes, not 3"),
        ("[hours_on]\nsamstag = 'never'", "must name days in English"),
        ("[gpu.first]\nuse = true", "must have tables named by a GPU's number or all"),
        ("cpu_percent.a = 3", "cpu_percent is a single value"),
        ("gpu = 3", "gpu is a table"),
        ("cpu_percent = ", "is not TOML"),
        ("version = 'x'", "version must be 1, not 'x'"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_is_one_sentence_that_names_the_file(
    tmp_path: Path, text: str, said: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        load(path, {})
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_two_mistakes_of_two_layers_are_reported_together(tmp_path: Path) -> None:
    path = written(tmp_path, "nice = 20")
    with pytest.raises(ConfigurationError) as caught:
        load(path, {"SWARM_CPU_PERCENT": "all"})
    assert str(caught.value) == (
        "SWARM_CPU_PERCENT: cpu_percent must be a number, not 'all'; "
        f"{path}: nice must be at most 19, not 20"
    )


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe", b"# \n" * 400_000, b"nice = " + b"9" * 5000, b"nice = " + b"[" * 5000],
    ids=["no text", "endless", "an endless number", "endless brackets"],
)
def test_a_file_that_is_no_text_or_endless_is_refused(content: bytes) -> None:
    with pytest.raises(ConfigurationError):
        parse_file(content, "a file")


@pytest.mark.parametrize("text", ["9" * 5000, "[" * 5000], ids=["digits", "brackets"])
def test_an_endless_value_is_none(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        set_preference(tmp_path / "preferences.toml", "nice", text)


def test_a_file_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    text = "version = 2\ncpu_procent = { of = 'something new' }\n"
    path = written(tmp_path, text)
    for attempt in (lambda: load(path, {}), lambda: set_preference(path, "nice", "3")):
        with pytest.raises(VersionError, match="newer swarm-client"):
            attempt()
    assert path.read_text() == text


def test_a_new_file_gives_nothing_and_every_line_of_it_can_be_taken_up() -> None:
    assert parse_file(template().encode(), "the template") == {}
    uncommented = "\n".join(
        line.removeprefix("# ") if " = " in line and line.startswith("# ") else line
        for line in template().splitlines()
        if not line.startswith(("# A line", "# use `"))
    )
    named = parse_file(uncommented.encode(), "the template")
    defaults = {name: value for name, value, _ in load(Path("/none"), {}).values()}
    assert {name: named[name] for name in defaults} == defaults
    assert {f"gpu.all.{name}" for name in GpuPreferences.model_fields} <= named.keys()


def test_a_change_keeps_what_a_person_wrote_around_it(tmp_path: Path) -> None:
    path = written(
        tmp_path, "# my own words\nnice = 3  # quiet\n\n[gpu.all]\nuse = true # for now\n"
    )
    assert set_preference(path, "nice", "5") == 5
    assert set_preference(path, "gpu.all.use", "false") is False
    assert set_preference(path, "gpu.0.vram_gib", "2") == 2
    assert set_preference(path, "cpu_percent", "50") == 50
    assert path.read_text() == (
        "# my own words\nnice = 5  # quiet\ncpu_percent = 50\n\n[gpu.all]\n"
        "use = false # for now\n\n[gpu.0]\nvram_gib = 2\n"
    )
    set_preference(path, "nice", None)
    assert "nice" not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_value_takes_the_place_of_the_comment_that_showed_its_default(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "preferences.toml"
    set_preference(path, "exclusive_apps", '["a b", "c"]')
    set_preference(path, "gpu.all.temperature_ceiling_celsius", "75.5")
    lines = path.read_text().splitlines()
    before = lines[lines.index('exclusive_apps = ["a b", "c"]') - 1]
    assert before == '# matter, and neither does ".exe".'
    ceiling = lines[lines.index("temperature_ceiling_celsius = 75.5") - 1]
    assert ceiling.startswith("# Temperature at")
    assert len(lines) == len(template().splitlines())


def test_a_change_that_cannot_be_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = written(tmp_path, "nice = 3\n")
    for name, value in (("nice", "99"), ("nise", "1"), ("gpu.0", "1"), ("hours_on.monday", "x")):
        with pytest.raises(ConfigurationError):
            set_preference(path, name, value)
    assert path.read_text() == "nice = 3\n"


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, files_no_larger_than) -> None:
    path = written(tmp_path, "nice = 3\n")
    with files_no_larger_than(4), pytest.raises(StorageError):
        set_preference(path, "nice", "5")
    assert path.read_text() == "nice = 3\n"
    assert [file.name for file in tmp_path.iterdir()] == ["preferences.toml"]


numbers = st.one_of(st.integers(5, 100), st.floats(5, 100))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("cpu_percent"), numbers),
            st.tuples(st.sampled_from(["gpu.0.duty_cycle_percent", "gpu.all.vram_gib"]), numbers),
            st.tuples(st.just("hours_on.monday"), st.sampled_from(["never", "10:00-11:00"])),
            st.tuples(
                st.just("exclusive_apps"),
                st.lists(st.text(st.characters(exclude_categories=["C"]), min_size=1)).map(tuple),
            ),
        ),
        max_size=6,
    )
)
def test_any_sequence_of_changes_leaves_the_values_that_were_set_last(
    changes: list[tuple[str, object]],
) -> None:
    content, expected = template(), {}
    for name, value in changes:
        content = edited(content, name, value)
        expected[name] = value
    assert parse_file(content.encode(), "the file") == expected
    for name in expected:
        content = edited(content, name, None)
    assert parse_file(content.encode(), "the file") == {}


def test_a_running_program_takes_up_a_change_and_keeps_what_holds_when_it_cannot(
    tmp_path: Path,
) -> None:
    path = tmp_path / "preferences.toml"
    source = PreferenceSource(path, {}, ["nice=4"])
    assert not source.changed()
    set_preference(path, "cpu_percent", "50")
    assert source.changed()
    source.reload()
    assert source.current.preferences.cpu_percent == 50
    assert source.current.preferences.nice == 4
    assert not source.changed()
    path.write_text("cpu_percent = 0")
    assert source.changed()
    with pytest.raises(ConfigurationError):
        source.reload()
    assert source.current.preferences.cpu_percent == 50
    assert not source.changed()


def test_the_control_socket_shows_and_changes_what_is_in_the_file(tmp_path: Path) -> None:
    path, flags = tmp_path / "preferences.toml", ["max_cores=2"]
    assert set_preference(path, "cpu_percent", "50") == 50
    found = shown(path, flags)["preferences"]
    assert found["cpu_percent"]["value"] == 50
    assert found["max_cores"] == {
        "value": 2, "layer": "flag", "where": "max_cores=2", "group": "Processor",
        "text": "Maximum number of processor cores to use; 0: all.", "allowed": "from 0 to 4096",
    }  # fmt: skip
    with pytest.raises(ConfigurationError, match="did you mean 'cpu_percent'"):
        set_preference(path, "cpu_procent", "50")
    set_preference(path, "cpu_percent", None)
    assert shown(path, flags)["preferences"]["cpu_percent"]["layer"] == "default"
    json.dumps(shown(path, flags))


def test_what_is_shown_is_all_that_can_be_set_group_by_group_and_each_can_be_set_as_shown(
    tmp_path: Path,
) -> None:
    path = tmp_path / "preferences.toml"
    set_preference(path, "hours", "22:00-06:30")
    set_preference(path, "hours_on.sunday", "always")
    set_preference(path, "gpu.1.vram_gib", "3")
    found = shown(path, ())["preferences"]
    groups = [row["group"] for row in found.values()]
    assert list(dict.fromkeys(groups)) == list(GROUPS)
    assert groups == sorted(groups, key=GROUPS.index)
    assert all(row["text"] for row in found.values())
    tables = ("hours_on", "network_hours_on")
    patterns = {name for name in Preferences.model_fields if name not in (*tables, "gpu")}
    patterns |= {f"{table}.{day}" for table in tables for day in WEEKDAYS}
    patterns |= {f"gpu.all.{name}" for name in GpuPreferences.model_fields}
    assert set(found) == patterns | {"gpu.1.vram_gib"}
    assert (found["hours_on.monday"]["value"], found["hours_on.monday"]["where"]) == (
        "22:00-06:30", "`hours`",
    )  # fmt: skip
    assert (found["hours_on.sunday"]["value"], found["hours_on.sunday"]["layer"]) == (
        "always", "file",
    )  # fmt: skip
    for name, row in found.items():
        # An empty text is taken out, and nothing is what holds then.
        assert (set_preference(path, name, value_text(row["value"]) or None) or ()) == (
            row["value"] or ()
        ), name


def test_preferences_lie_in_the_home_that_is_named(tmp_path: Path) -> None:
    assert preferences_path(tmp_path) == tmp_path / "preferences.toml"
    assert preferences_path(None).name == "preferences.toml"


def test_every_preference_has_a_meaning_and_the_page_of_the_documentation_is_up_to_date() -> None:
    for field in (*Preferences.model_fields.values(), *GpuPreferences.model_fields.values()):
        assert field.description
    text = (ROOT / "docs" / "preferences.md").read_text()
    mark, end = "<!-- yielding figures -->\n", "<!-- /yielding figures -->"
    before, _, rest = text.partition(mark)
    assert before + mark + "\n" + end + rest.partition(end)[2] == page()
