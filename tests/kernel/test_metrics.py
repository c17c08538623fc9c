"""Metrics: samples of several processes add up, and the text is TGI's, not the library's."""

import subprocess
import sys
from pathlib import Path

import pytest

from tgi.kernel import metrics

WRITER = """
import sys
from pathlib import Path
from tgi.kernel import metrics
metrics.use(Path(sys.argv[1]))
metrics.limits(1000, 2000)
metrics.tgi_request_count.inc()
metrics.tgi_request_failure.labels(err='validation').inc(2)
metrics.tgi_queue_size.set(3)
metrics.tgi_request_input_length.observe(15)
"""


@pytest.fixture
def written(tmp_path: Path) -> Path:
    for _ in range(2):
        subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], check=True)
    return tmp_path


def test_two_processes_add_up(written: Path) -> None:
    text = metrics.render(written)
    assert "# HELP tgi_request_count Total number of requests\n# TYPE tgi_request_count counter\n" in text
    assert "\ntgi_request_count 2\n" in text
    assert '\ntgi_request_failure{err="validation"} 4\n' in text
    assert "\ntgi_queue_size 6\n" in text


def test_buckets_are_hundredths_of_the_limit_and_cumulative(written: Path) -> None:
    text = metrics.render(written)
    assert 'tgi_request_input_length_bucket{le="10.0"} 0\n' in text
    assert 'tgi_request_input_length_bucket{le="20.0"} 2\n' in text
    assert 'tgi_request_input_length_bucket{le="+Inf"} 2\n' in text
    assert "\ntgi_request_input_length_sum 30\n" in text
    assert "\ntgi_request_input_length_count 2\n" in text


def test_no_total_suffix_and_nothing_before_its_first_sample(written: Path) -> None:
    text = metrics.render(written)
    assert "_total " not in text
    assert "_created" not in text
    assert "tgi_request_success" not in text


def test_an_ended_process_takes_its_gauges_with_it(written: Path) -> None:
    (one, _) = sorted(int(path.stem.rsplit("_", 1)[1]) for path in written.glob("gauge_livesum_*.db"))
    metrics.forget(written, one)
    text = metrics.render(written)
    assert "\ntgi_queue_size 3\n" in text
    assert "\ntgi_request_count 2\n" in text
    metrics.clear(written)
    assert metrics.render(written) == ""


def test_an_unknown_series_is_an_error() -> None:
    with pytest.raises(AttributeError):
        _ = metrics.tgi_nothing
