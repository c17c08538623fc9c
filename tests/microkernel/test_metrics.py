"""Metrics: sums over processes, ended processes, and the text of /metrics."""

import fcntl
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tgi.microkernel.observability import metrics
from tgi.microkernel.observability.metric_store import Distribution, MetricStore, SampleFile
from tgi.microkernel.observability.metrics import DURATION, SERIES

WRITER = """
import sys
from pathlib import Path
from tgi.microkernel.observability import metrics
metrics.use_directory(Path(sys.argv[1]))
metrics.set_length_limits(1000, 2000)
metrics.tgi_request_count.inc()
metrics.tgi_request_failure.labels(err='validation').inc(2)
metrics.tgi_queue_size.set(3)
metrics.tgi_request_input_length.observe(15)
metrics.tgi_request_skipped_tokens.observe_all([0] * 98 + [1, 3])
"""
HELP = {
    "tgi_request_count": "Total number of requests",
    "tgi_request_success": "Number of successful requests",
    "tgi_queue_size": "Current queue size",
    "tgi_batch_current_size": "Current batch size",
}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    for _ in range(2):
        subprocess.run([sys.executable, "-c", WRITER, str(folder)], check=True)
    return folder


@pytest.fixture
def written(once: Path, tmp_path: Path) -> Path:
    """The files of two ended processes."""
    return shutil.copytree(once, tmp_path / "copy")


@pytest.fixture
def here(samples_here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`samples_here` with limits for the buckets of lengths."""
    monkeypatch.setattr(metrics._process, "length_limits", {"input": 1000, "total": 2000})
    return samples_here


def samples(text: str) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    assert len({name for name, _ in lines}) == len(lines), "a sample is there twice"
    return {name: float(value) for name, value in lines}


def test_samples_of_processes_are_added(written: Path) -> None:
    text = metrics.render(written)
    assert "# HELP tgi_request_count Total number of requests\n# TYPE tgi_request_count counter\n" in text
    assert "\ntgi_request_count 2\n" in text
    assert '\ntgi_request_failure{err="validation"} 4\n' in text
    assert "\ntgi_queue_size 6\n" in text


def test_length_buckets_are_hundredths_of_the_limit_and_cumulative(written: Path) -> None:
    found = samples(metrics.render(written))  # in a process that does not know the limits
    assert found['tgi_request_input_length_bucket{le="10"}'] == 0
    assert found['tgi_request_input_length_bucket{le="20"}'] == 2
    assert found['tgi_request_input_length_bucket{le="+Inf"}'] == 2
    assert found["tgi_request_input_length_sum"] == 30
    assert found["tgi_request_input_length_count"] == 2
    assert len([name for name in found if name.startswith("tgi_request_input_length_bucket")]) == 101


def test_quantiles_of_the_summary(written: Path) -> None:
    text = metrics.render(written)
    assert "# TYPE tgi_request_skipped_tokens summary\n" in text
    assert [line for line in text.splitlines() if line.startswith("tgi_request_skipped_tokens")] == [
        'tgi_request_skipped_tokens{quantile="0"} 0',
        'tgi_request_skipped_tokens{quantile="0.5"} 0',
        'tgi_request_skipped_tokens{quantile="0.9"} 0',
        'tgi_request_skipped_tokens{quantile="0.95"} 0',
        'tgi_request_skipped_tokens{quantile="0.99"} 1',
        'tgi_request_skipped_tokens{quantile="0.999"} 3',
        'tgi_request_skipped_tokens{quantile="1"} 3',
        "tgi_request_skipped_tokens_sum 8",
        "tgi_request_skipped_tokens_count 200",
    ]


def test_no_total_suffix_and_no_series_before_its_first_sample(written: Path) -> None:
    text = metrics.render(written)
    assert "_total " not in text
    assert "_created" not in text
    assert "tgi_request_success" not in text


def test_own_counters_and_histograms_are_0_from_the_start(here: Path) -> None:
    found = samples(metrics.render())
    assert not any(found.values())
    assert found["tgi_worker_losses"] == found["tgi_time_to_first_token_duration_count"] == 0
    roles = "api", "media", "tokenizer", "scheduler", "worker"
    restarts = dict.fromkeys((f'tgi_process_restarts{{role="{role}"}}' for role in roles), 0)
    dropped = dict.fromkeys(
        (f'tgi_encoding_jobs_dropped{{cause="{cause}"}}' for cause in ("cancelled", "overloaded")), 0
    )
    assert restarts | dropped == {name: value for name, value in found.items() if "{" in name and "{le=" not in name}
    own = {name for name, series in metrics.OWN_SERIES.items() if series.kind != "gauge"} - {"tgi_energy_joules"}
    assert {line.split()[2] for line in metrics.render().splitlines() if line.startswith("# TYPE")} == own
    metrics.tgi_process_restarts.labels(role="worker").inc()
    assert samples(metrics.render()) == found | {'tgi_process_restarts{role="worker"}': 1}


def test_access_to_a_series_is_not_a_sample(here: Path) -> None:
    before = metrics.render()
    for name, series in SERIES.items():
        made = getattr(metrics, name)
        if series.labels:
            made.labels(**dict.fromkeys(series.labels, "a"))
    assert metrics.render() == before


def test_gauges_of_ended_processes_are_removed(written: Path) -> None:
    (one, _) = sorted(int(path.stem.rsplit("_", 1)[1]) for path in written.glob("gauges_*.db"))
    assert metrics.fold_ended_processes(written, [one])
    text = metrics.render(written)
    assert "\ntgi_queue_size 3\n" in text
    assert "\ntgi_request_count 2\n" in text
    metrics.fold_dead_processes(written)
    text = metrics.render(written)
    assert "tgi_queue_size" not in text
    assert "\ntgi_request_count 2\n" in text
    assert [path.name for path in written.iterdir()] == ["sums_ended.db"]
    metrics.remove_all_samples(written)
    assert "tgi_request_count" not in metrics.render(written)


def test_sums_of_ended_processes_are_folded_into_one_file(written: Path) -> None:
    before = samples(metrics.render(written)) | {"tgi_queue_size": 0}
    for path in sorted(written.glob("sums_*.db")):
        assert metrics.fold_ended_processes(written, [int(path.stem.rsplit("_", 1)[1])])
        assert samples(metrics.render(written)) | {"tgi_queue_size": 0} == before
    assert [path.name for path in written.iterdir()] == ["sums_ended.db"]


def test_no_folding_while_a_reader_holds_the_lock(written: Path) -> None:
    pids = [int(path.stem.rsplit("_", 1)[1]) for path in written.glob("sums_*.db")]
    held = os.open(written, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
    try:
        assert not metrics.fold_ended_processes(written, pids)
        assert "tgi_queue_size" not in metrics.render(written)  # gauges are removed without the lock
        assert samples(metrics.render(written))["tgi_request_count"] == 2
    finally:
        os.close(held)
    assert metrics.fold_ended_processes(written, pids)
    assert samples(metrics.render(written))["tgi_request_count"] == 2


def test_folding_never_decreases_a_sum(tmp_path: Path) -> None:
    """Prometheus takes a decrease for a restart and counts the whole sum again."""
    rng = random.Random(3)
    for pid in range(1, 41):
        store = MetricStore(tmp_path)
        store._files["sums"] = SampleFile(tmp_path / f"sums_{pid}.db")
        Distribution(store, "tgi_request_duration", (), (1.0,)).observe(rng.expovariate(1) * 10 ** rng.uniform(-6, 3))
    seen = [samples(metrics.render(tmp_path))["tgi_request_duration_sum"]]
    for pid in rng.sample(range(1, 41), 40):
        assert metrics.fold_ended_processes(tmp_path, [pid])
        seen.append(samples(metrics.render(tmp_path))["tgi_request_duration_sum"])
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(seen[0], rel=1e-13)


def test_observe_all_equals_observe(here: Path) -> None:
    rng = random.Random(1)
    values = [rng.choice([*DURATION, rng.expovariate(10), 1000.0]) for _ in range(500)]
    for value in values:
        metrics.tgi_request_duration.observe(value)
    metrics.tgi_inter_token_duration.observe_all(values)
    metrics.tgi_inter_token_duration.observe_all([])
    found = samples(metrics.render())
    for end in ("_count", "_sum", '_bucket{le="+Inf"}', *(f'_bucket{{le="{bound!r}"}}' for bound in DURATION)):
        assert found[f"tgi_inter_token_duration{end}"] == pytest.approx(found[f"tgi_request_duration{end}"])
    assert found["tgi_request_duration_count"] == 500
    for bound in DURATION:
        assert found[f'tgi_request_duration_bucket{{le="{bound!r}"}}'] == sum(value <= bound for value in values)


def test_process_with_a_reused_pid_continues_to_count(here: Path) -> None:
    metrics.tgi_request_count.inc(5)
    metrics.use_directory(here)
    metrics.tgi_request_count.inc()
    assert samples(metrics.render())["tgi_request_count"] == 6


@pytest.mark.parametrize("label", ['a"b', "a\\b", "a\nb", "a\u2028b", "\ud800", "é" * 5000, "{},=", ""])
def test_hostile_label_values_are_escaped(here: Path, label: str) -> None:
    metrics.tgi_request_failure.labels(err=label).inc()
    text = metrics.render()
    text.encode()
    (line,) = [line for line in text.split("\n") if line.startswith("tgi_request_failure")]
    escaped = line.removeprefix('tgi_request_failure{err="').removesuffix('"} 1')
    back = escaped.replace("\\\\", "\0").replace('\\"', '"').replace("\\n", "\n").replace("\0", "\\")
    assert back == label.replace("\ud800", "?")


def half(data: bytes) -> bytes:
    used = int.from_bytes(data[:4], sys.byteorder)
    return data[: used // 2]


@pytest.mark.parametrize(
    "broken",
    [lambda data: b"", lambda data: b"\0" * 65536, lambda data: data[:3], half, lambda data: b"\xff" * 5000],
    ids=["just made", "not yet used", "three bytes", "half", "garbage"],
)
def test_damaged_file_affects_only_its_own_samples(
    written: Path, broken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one = min(written.glob("sums_*.db"))
    one.write_bytes(broken(one.read_bytes()))
    found = samples(metrics.render(written))
    assert 1 <= found["tgi_request_count"] <= 2
    assert found["tgi_queue_size"] == 6


def test_render_while_processes_write_and_end(tmp_path: Path) -> None:
    loop = WRITER + "for k in range(3000): metrics.tgi_request_duration.observe(k / 1000)\n"
    writers = [subprocess.Popen([sys.executable, "-c", loop, str(tmp_path)]) for _ in range(3)]
    counts = []
    while any(writer.poll() is None for writer in writers):
        counts.append(samples(metrics.render(tmp_path)).get("tgi_request_duration_count", 0))
        metrics.fold_dead_processes(tmp_path)
    assert counts == sorted(counts)
    found = samples(metrics.render(tmp_path))
    assert found["tgi_request_duration_count"] == 9000
    assert found['tgi_request_duration_bucket{le="+Inf"}'] == 9000


def test_unknown_label_name_raises() -> None:
    with pytest.raises(ValueError, match="err"):
        metrics.tgi_request_failure.labels(reason="x")


def test_unknown_series_raises() -> None:
    with pytest.raises(AttributeError):
        _ = metrics.tgi_nothing


@pytest.mark.parametrize(("name", "text"), HELP.items())
def test_help_texts_of_tgi(name: str, text: str) -> None:
    assert SERIES[name].help == text


def test_text_is_parsed_by_prometheus_client(here: Path) -> None:
    """prometheus_client's parser accepts the text."""
    from prometheus_client.parser import text_string_to_metric_families

    for name, series in SERIES.items():
        made = getattr(metrics, name)
        if series.labels:
            made = made.labels(**dict.fromkeys(series.labels, "some"))
        getattr(made, {"counter": "inc", "gauge": "set"}.get(series.kind, "observe"))(2)
    families = {family.name: family for family in text_string_to_metric_families(metrics.render())}
    assert set(families) == set(SERIES)
    for name, series in SERIES.items():
        assert families[name].type == series.kind
        assert families[name].documentation == series.help
        assert all(set(series.labels) <= set(sample.labels) for sample in families[name].samples)


def test_observation_buffer_writes_on_flush(here: Path) -> None:
    buffer = metrics.ObservationBuffer()
    seconds = buffer.values("tgi_batch_decode_duration", method="decode")
    seconds.extend([0.5, 0.25])
    assert "tgi_batch_decode_duration" not in metrics.render()
    buffer.flush(10.0)
    assert buffer.due_at == 11.0
    assert buffer.values("tgi_batch_decode_duration", method="decode") is seconds
    assert seconds == []
    buffer.flush()
    found = samples(metrics.render())
    assert found['tgi_batch_decode_duration_count{method="decode"}'] == 2
    assert found['tgi_batch_decode_duration_sum{method="decode"}'] == 0.75
