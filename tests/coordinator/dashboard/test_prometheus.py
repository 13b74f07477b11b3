"""What Prometheus reads, and that dashboards, alerts and documents name what is really emitted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from kits.coordinator.http_server import ANNA, BERT, peer, run_with_pages, status
from swarm_coordinator.dashboard.database_reader import DatabaseReader
from swarm_coordinator.dashboard.prometheus import HttpStatistics, RunMetrics
from swarm_coordinator.dashboard.snapshot import Snapshot
from swarm_coordinator.durability.run_files import load_manifest
from swarm_coordinator.run_dir.folder import RunFolder

MONITORING = Path(__file__).parents[3] / "docs" / "monitoring"
SERVING = HttpStatistics({"2xx": 7, "4xx": 1}, {"request": 0, "unreadable": 2}, 3, 1, 5, 4)
NAMES = re.compile(r"\bswarm_\w+")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return run_with_pages(tmp_path_factory.mktemp("metrics") / "run")


@pytest.fixture(scope="module")
def text(folder: RunFolder) -> str:
    return emitted(folder, heldout_loss=2.25)


@pytest.fixture(scope="module")
def described(folder: RunFolder) -> dict[str, Metric]:
    """All metrics by the names of their documentation; those without a value now are among them."""
    return {
        f"{metric.name}_total" if metric.type == "counter" else metric.name: metric
        for metric in metrics(folder, loss=float("nan")).collect()
    }


def emitted(folder: RunFolder, **changes: object) -> str:
    return metrics(folder, **changes).exposition().decode()


def metrics(folder: RunFolder, **changes: object) -> RunMetrics:
    manifest = load_manifest(folder)
    read = DatabaseReader(folder.database, [0.5, 0.5]).refresh(2e9)
    told = status(**changes)
    snapshot = Snapshot(told, read, manifest, told.time + 0.5)
    return RunMetrics(snapshot, SERVING)


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def sample_names(described: dict[str, Metric]) -> set[str]:
    """The names of all samples in queries."""
    histograms = {name for name, metric in described.items() if metric.type == "histogram"}
    parts = {f"{name}_{part}" for name in histograms for part in ("bucket", "count", "sum")}
    return (described.keys() - histograms) | parts


def test_everything_described_is_emitted_and_nothing_else(
    text: str, described: dict[str, Metric]
) -> None:
    assert {name for name, _ in samples(text)} == sample_names(described)


def test_names_have_the_prefix_and_each_stands_once(folder: RunFolder) -> None:
    names = [metric.name for metric in metrics(folder).collect()]
    assert len(names) == len(set(names))
    for metric in metrics(folder).collect():
        assert metric.name.startswith("swarm_")
        assert not re.search(r"_(ms|milliseconds|kb|mb|minutes|percent)\b", metric.name)
        assert metric.documentation.endswith(".")


def test_no_label_is_a_peer(text: str) -> None:
    for _, labels in samples(text):
        for _, value in labels:
            assert ANNA[-8:] not in value
            assert BERT[-8:] not in value
            assert len(value) <= 30


def test_the_values_are_those_of_the_run(text: str) -> None:
    found = samples(text)

    def value(name: str, **labels: str) -> float:
        return found[name, tuple(sorted(labels.items()))]

    assert value("swarm_applied_steps") == 5
    assert value("swarm_trained_tokens") == 5 * 32
    assert value("swarm_step_seconds_count") == 5
    assert value("swarm_step_seconds_bucket", le="1.0") == 5
    assert value("swarm_step_seconds_bucket", le="0.3") == 0
    assert value("swarm_step_seconds_sum") == 2.5
    assert value("swarm_run_health", state="healthy") == 1
    assert value("swarm_run_phase", phase="collecting") == 1
    assert value("swarm_peers", phase="ready") == 2
    assert value("swarm_flagged_peers") == 1
    assert value("swarm_stage_microbatch_seconds_count", stage="1") == 600
    assert value("swarm_stage_microbatch_seconds_bucket", stage="1", le="0.512") == 600
    assert value("swarm_stage_microbatch_seconds_bucket", stage="1", le="0.256") == 0
    assert value("swarm_stage_microbatch_seconds_sum", stage="1") == 300
    assert value("swarm_stage_held_seconds_total", stage="1") == 600
    assert value("swarm_stage_idle_ratio", stage="1") == pytest.approx(0.5)
    assert value("swarm_bubble_ratio") == pytest.approx(0.3)
    assert value("swarm_rejected_total", reason="not finite") == 3
    assert value("swarm_stage_microbatches_per_second", stage="1") == 4.0
    assert value("swarm_http_failures_total", kind="unreadable") == 2
    assert value("swarm_status_age_seconds") == pytest.approx(0.5)


def test_what_has_no_value_is_left_out_and_the_rest_stays(folder: RunFolder) -> None:
    found = {name for name, _ in samples(emitted(folder, loss=float("nan"), peers=[]))}
    assert "swarm_loss_nats" not in found
    assert "swarm_heldout_loss_nats" not in found
    assert "swarm_peers" in found


def test_labels_stay_few_however_many_peers_there_are(folder: RunFolder) -> None:
    few = len(samples(emitted(folder)))
    many = [peer(f"12D3KooW{number:044}", number % 2) for number in range(300)]
    assert len(samples(emitted(folder, peers=many))) == few


# ---------------------------------------------------------------- docs/monitoring


def named_in(path: Path) -> set[str]:
    return set(NAMES.findall(path.read_text()))


def test_every_metric_is_documented_and_every_documented_one_exists(
    described: dict[str, Metric],
) -> None:
    rows = re.findall(r"^\| `(swarm_\w+)` \|", (MONITORING / "README.md").read_text(), re.M)
    assert sorted(rows) == sorted(described)
    for name, metric in described.items():
        line = next(
            line for line in (MONITORING / "README.md").read_text().splitlines()
            if line.startswith(f"| `{name}` |")
        )  # fmt: skip
        assert metric.documentation in line
        assert metric.type in line


def test_the_dashboard_and_the_alerts_name_only_what_is_emitted(
    described: dict[str, Metric],
) -> None:
    known = sample_names(described)
    for name in ("grafana-dashboard.json", "alerts.yml"):
        named = named_in(MONITORING / name)
        assert named, name
        assert named <= known, (name, named - known)


def test_labels_in_queries_are_those_that_are_emitted(text: str) -> None:
    values: dict[str, set[str]] = {}
    for _, labels in samples(text):
        for label, value in labels:
            values.setdefault(label, set()).add(value)
    queries = "".join(
        (MONITORING / n).read_text() for n in ("grafana-dashboard.json", "alerts.yml")
    )
    asked = re.findall(r"\{(\w+)=\\?\"([^\"\\]+)\\?\"\}", queries)
    assert asked
    for label, value in asked:
        assert value in values[label], (label, value)


def test_the_alerts_say_what_is_wrong_and_what_to_do() -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert {"alert", "expr", "for", "labels", "annotations"} <= set(rule)
            assert {"summary", "description"} <= set(rule["annotations"])
            assert rule["labels"]["severity"] in ("warning", "critical")


def test_the_dashboard_is_whole() -> None:
    board = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    identities = [panel["id"] for panel in board["panels"]]
    assert len(identities) == len(set(identities))
    for panel in board["panels"]:
        assert panel["title"]
        assert all(target["expr"] for target in panel["targets"])
        position = panel["gridPos"]
        assert position["x"] + position["w"] <= 24


def test_until_the_run_ends_its_held_out_loss_is_that_of_an_evaluated_checkpoint(
    folder: RunFolder,
) -> None:
    evaluation = {"version": 3, "heldout_loss": 2.5, "tokens": 64, "sample": "def"}
    found = dict(samples(emitted(folder, evaluation=evaluation)))
    assert found["swarm_heldout_loss_nats", ()] == 2.5
    found = dict(samples(emitted(folder, evaluation=evaluation, heldout_loss=2.25)))
    assert found["swarm_heldout_loss_nats", ()] == 2.25
