"""Queries of the dashboard, the alerts and docs/metrics.md in a real Prometheus, which reads a running server; and each
alert, fired and not fired by promtool's clock. Prometheus comes from Debian's packages."""

import platform
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

from tests.clients.environments import made
from tests.deploy.test_docker import ALERTS, DOCKER, QUERIES, variables
from tests.live.server import TIMEOUT_SECONDS, SharedServers, free_port

pytestmark = pytest.mark.live

PACKAGE = "prometheus"


def install(directory: Path) -> None:
    """Unpacks the package; nothing is installed on the host."""
    commands = (["apt-get", "download", "--quiet", PACKAGE], ["dpkg-deb", "-x", "PACKAGE", "."])
    for command in commands:
        words = [str(next(directory.glob("*.deb"))) if word == "PACKAGE" else word for word in command]
        subprocess.run(words, cwd=directory, check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def programs() -> Path:
    """The directory of `prometheus` and `promtool`."""
    if found := shutil.which("promtool"):
        return Path(found).parent
    try:
        return made("prometheus", platform.machine(), "usr/bin", install)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"Debian's package {PACKAGE} cannot be had: {error}")


@pytest.fixture(scope="module")
def prometheus(programs: Path, tmp_path_factory: pytest.TempPathFactory, shared_server: SharedServers) -> Iterator[str]:
    """The URL of a Prometheus that has read a server before, while and after it answered requests."""
    server = shared_server("--worker", "scripted")
    directory, port = tmp_path_factory.mktemp("prometheus"), free_port()
    configuration = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    configuration["global"]["scrape_interval"] = "1s"
    configuration["rule_files"] = [str(DOCKER / "alerts.yml")]
    configuration["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}"]}]
    (directory / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    files = f"--config.file={directory / 'prometheus.yml'}", f"--storage.tsdb.path={directory / 'data'}"
    address = f"--web.listen-address=127.0.0.1:{port}"
    log = (directory / "log").open("w")
    with subprocess.Popen([str(programs / "prometheus"), *files, address], stderr=log, stdout=log) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            end = time.monotonic() + TIMEOUT_SECONDS
            while not ask(url, "increase(tgi_request_success[1m]) > 0"):  # as long as it has read one sample or none
                assert time.monotonic() < end
                server.generate("Hello", max_new_tokens=8)
                assert server.client.post("/generate", json={"inputs": ""}).status_code == 422
            yield url
        finally:
            process.terminate()
    log.close()


def ask(url: str, query: str) -> list[dict[str, Any]]:
    try:
        response = httpx.get(f"{url}/api/v1/query", params={"query": query})
    except httpx.TransportError:  # it is starting
        return []
    if response.status_code == 503:  # still
        return []
    answer = response.json()
    assert answer["status"] == "success", answer
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


def test_every_query_has_an_answer_on_a_running_server(prometheus: str) -> None:
    """Without the comparison of an alert, for its value, and the kinds of failures: one that has not occurred has no
    series, as in TGI."""
    values = {rule["expr"]: rule["expr"].rpartition(" > ")[0] for rule in ALERTS}
    asked = [re.sub("{err=[^}]+}", "", values.get(query, query)) for query in QUERIES]
    asked = [query.replace("$instance", ".*").replace("$model", ".*") for query in asked]
    assert [query for query in asked if not ask(prometheus, query)] == []
    assert {name: bool(ask(prometheus, asked[at])[0]["metric"][name]) for at, name in enumerate(variables())} == {
        "model": True,
        "instance": True,
    }
    rules = httpx.get(f"{prometheus}/api/v1/rules").json()["data"]["groups"][0]["rules"]
    assert {(rule["name"], rule["health"]) for rule in rules} <= {(rule["alert"], "ok") for rule in ALERTS} | {
        (rule["alert"], "unknown")
        for rule in ALERTS  # not evaluated yet
    }
    assert len(rules) == len(ALERTS)


class Case(NamedTuple):
    """Series of a minute each, as promtool writes them, that fire an alert at `minute`, and others that do not."""

    fires: dict[str, str]
    quiet: dict[str, str]
    minute: int
    labels: dict[str, str]


ONE = 'instance="a:80"'
COUNT = f"tgi_request_count{{{ONE}}}"
CASES = {
    "TgiDown": Case(
        {f'up{{job="tgi",{ONE}}}': "0x20"}, {f'up{{job="tgi",{ONE}}}': "0 1x20"}, 5, {"instance": "a:80", "job": "tgi"}
    ),
    "TgiProcessesRestart": Case(
        {f'tgi_process_restarts{{role="worker",{ONE}}}': "0+1x20"},
        {f'tgi_process_restarts{{role="worker",{ONE}}}': "0 0 1x20"},
        15,
        {"instance": "a:80", "role": "worker"},
    ),
    "TgiNoProgress": Case(
        {f'tgi_last_progress_timestamp_seconds{{process="worker-0",{ONE}}}': "60x20"},
        {f'tgi_last_progress_timestamp_seconds{{process="worker-0",{ONE}}}': "0+60x20"},
        10,
        {"instance": "a:80", "process": "worker-0"},
    ),
    "TgiRequestsFail": Case(
        {COUNT: "0+100x20", f'tgi_request_failure{{err="generation",{ONE}}}': "0+5x20"},
        {COUNT: "0+100x20", f'tgi_request_failure{{err="validation",{ONE}}}': "0+50x20"},
        15,
        {"instance": "a:80"},
    ),
    "TgiOverloaded": Case(
        {COUNT: "0+100x30", f'tgi_request_failure{{err="overloaded",{ONE}}}': "0+20x30"},
        {COUNT: "0+100x30", f'tgi_request_failure{{err="overloaded",{ONE}}}': "0+1x30"},
        25,
        {"instance": "a:80"},
    ),
    "TgiQueue": Case(
        {f"tgi_queue_size{{{ONE}}}": "3x30"}, {f"tgi_queue_size{{{ONE}}}": "3x8 0 3x21"}, 15, {"instance": "a:80"}
    ),
    "TgiKvCacheFull": Case(
        {f"tgi_preemptions{{{ONE}}}": "0+2x20"}, {f"tgi_preemptions{{{ONE}}}": "0+0.5x20"}, 15, {"instance": "a:80"}
    ),
}


@pytest.mark.parametrize("name", [rule["alert"] for rule in ALERTS])
@pytest.mark.parametrize("fires", [True, False])
def test_an_alert_fires_when_it_should(programs: Path, tmp_path: Path, name: str, fires: bool) -> None:
    case = CASES[name]
    (rule,) = [rule for rule in ALERTS if rule["alert"] == name]
    unit = {
        "interval": "1m",
        "input_series": [{"series": s, "values": v} for s, v in (case.fires if fires else case.quiet).items()],
        "promql_expr_test": [],
        "alert_rule_test": [{"eval_time": f"{case.minute}m", "alertname": name, "exp_alerts": []}],
    }
    (tmp_path / "unit.yml").write_text(yaml.safe_dump({"rule_files": [str(DOCKER / "alerts.yml")], "tests": [unit]}))
    command = [str(programs / "promtool"), "test", "rules", str(tmp_path / "unit.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode != 0) == fires, done.stdout + done.stderr  # none is expected, so promtool fails if it fires
    if fires:
        told = done.stdout + done.stderr
        for label in (*case.labels.items(), *rule["labels"].items()):
            assert '{}="{}"'.format(*label) in told
        assert "{{" not in told
