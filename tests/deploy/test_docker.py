"""deploy/docker: images whose steps run, a compose file that is valid, a dashboard of metrics that exist."""

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compose_spec
import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard

from tests.deploy.dockerfile import lineage, read_stages
from tests.deploy.shapes import DEPLOY, ROOT, settings_of
from tests.deploy.test_kubernetes import MORE_VARIABLES, VARIABLES
from tests.test_wheel import SOURCES
from tgi.microkernel.observability.metrics import OWN_SERIES, TGI_SERIES
from tgi.microkernel.processes.supervisor import ROLE_GRACE_SECONDS
from tgi.server import ROLES

pytestmark = pytest.mark.slow

DOCKER = DEPLOY / "docker"
STAGES = read_stages(DOCKER / "Dockerfile")
IGNORED = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
IMAGES = ("cpu", "cuda", "front-end")
COMMANDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
# Of NVIDIA's container runtime and the system.
OTHERS_VARIABLES = {"PATH", "HOME", "PORT", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("", "_sum", "_count")}


# --- images ---


def environment_of(image: str) -> dict[str, str]:
    """The variables of a container."""
    return {
        name: value
        for stage in lineage(STAGES, image)
        for one in stage.all("ENV")
        for name, value in one.variables.items()
    }


def test_images_build_on_stages_that_exist() -> None:
    for number, stage in enumerate(STAGES.values()):
        before = list(STAGES)[:number]
        assert stage.base in before or stage.base == "python:${PYTHON}-slim-bookworm"
        for copy in stage.all("COPY"):
            source = re.match(r"--from=(\S+)", copy.arguments)
            assert source is None or source.group(1) in before
    assert list(STAGES)[-1] == "cpu"


@pytest.mark.parametrize("stage", STAGES)
def test_run_lines_are_valid_shell(stage: str) -> None:
    for line in STAGES[stage].all("RUN"):
        done = subprocess.run(["sh", "-n", "-c", line.arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert ("apt-get" in line.arguments) == ("rm -rf /var/lib/apt/lists/*" in line.arguments)


def admitted(name: str) -> bool:
    """Whether the context of a build has a file or directory of the root: the last pattern that matches decides."""
    matching = [
        pattern for pattern in IGNORED if not pattern.startswith("#") and fnmatch.fnmatch(name, pattern.lstrip("!"))
    ]
    return matching[-1].startswith("!")


def test_the_context_is_what_the_images_copy() -> None:
    copied = {
        name
        for stage in STAGES.values()
        for copy in stage.all("COPY")
        if not copy.arguments.startswith("--from")
        for name in copy.words[:-1]
    }
    assert {*SOURCES, "constraints.txt"} == copied
    assert {path.name for path in ROOT.iterdir() if admitted(path.name)} == copied
    assert not any(stage.all("ADD") for stage in STAGES.values())


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_starts_the_server_without_rights(image: str) -> None:
    stages = lineage(STAGES, image)
    instructions = [one for stage in stages for one in stage.instructions]
    (user,) = [one.arguments for one in instructions if one.name == "USER"]
    assert instructions.index(next(one for one in instructions if one.name == "USER")) > max(
        at for at, one in enumerate(instructions) if one.name in ("RUN", "COPY")
    )
    (created,) = [one.arguments for one in instructions if "useradd" in one.arguments]
    assert f"--uid {user.split(':')[0]} " in created
    assert int(user.split(":")[0]) > 0
    environment = environment_of(image)
    (entry,) = [one.words for one in instructions if one.name == "ENTRYPOINT"][-1]
    assert entry in COMMANDS
    (exposed,) = [one.arguments for one in instructions if one.name == "EXPOSE"]
    assert settings_of(["text-generation-launcher"], environment | {"NVIDIA_VISIBLE_DEVICES": ""}).port == int(exposed)
    assert set(environment) <= VARIABLES | MORE_VARIABLES | OTHERS_VARIABLES
    assert not [name for name in environment if re.search("KEY|TOKEN|SECRET|PASSWORD", name)]


def link_dependencies(site: Path, directory: Path) -> None:
    """Lets an environment import the packages of this one, except this project."""
    directory.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("tgi_server", "__editable__")):
            (directory / path.name).symlink_to(path)
    (site / "dependencies.pth").write_text(f"{directory}\n")
    for old in (*site.glob("setuptools*"), site / "pkg_resources"):  # of venv, before Python 3.12
        shutil.rmtree(old, ignore_errors=True)


def test_the_steps_of_the_cpu_image_install_a_server(tmp_path: Path) -> None:
    """Runs the steps in a copy of the context, except those that fetch dependencies: torch and the others come from
    this environment."""
    context, root = tmp_path / "build", tmp_path / "opt"
    context.mkdir()
    stages = lineage(STAGES, "packages-cpu")
    environment = {
        "PATH": os.environ["PATH"],
        "PIP_NO_INDEX": "1",  # what a step would download is an error
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as: no isolation, use the setuptools of this environment
        "PIP_NO_COMPILE": "1",  # all modules of the project, of which few are imported here
        "HOME": str(tmp_path),
    }
    ran = []
    for one in (one for stage in stages for one in stage.instructions):
        if one.name == "COPY":
            *names, target = one.words
            for name in names:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, context / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / name, context)
        elif one.name == "ENV":
            environment |= one.variables
            environment["TGI_WHEEL_KERNELS"] = "none"  # tests/test_wheel.py compiles some
        elif one.name == "RUN" and not re.search(r"apt-get|-r requirements", one.arguments):
            step = one.arguments.replace("python -m venv", f"{shlex.quote(sys.executable)} -m venv")
            step = step.replace("/opt/tgi", str(root))
            done = subprocess.run(["sh", "-ec", step], cwd=context, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            ran.append(one.arguments)
            if "venv" in step:
                (site,) = root.glob("lib/python*/site-packages")
                link_dependencies(site, tmp_path / "dependencies")
    assert len(ran) == 2
    for command in COMMANDS:
        shown = subprocess.run([root / "bin" / command, "--version"], env=environment, capture_output=True, text=True)
        assert shown.returncode == 0, shown.stderr
    where = "import tgi; print(tgi.__file__)"
    found = subprocess.run(
        [root / "bin" / "python", "-P", "-c", where], env=environment, capture_output=True, text=True
    )
    assert found.stdout.startswith(str(root))


# --- compose ---


def compose(name: str) -> dict[str, Any]:
    """A compose file with the defaults of its variables, after the checks of the specification."""
    content = with_defaults(yaml.safe_load((DOCKER / name).read_text()))
    compose_spec.PyCompose.from_yaml(yaml.safe_dump(content)).validate()
    return content  # type: ignore[no-any-return]


def with_defaults(value: Any) -> Any:
    """The same with `${NAME:-default}` replaced by the default, in every string."""
    if isinstance(value, dict):
        return {name: with_defaults(item) for name, item in value.items()}
    if isinstance(value, list):
        return [with_defaults(item) for item in value]
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) if isinstance(value, str) else value


def test_an_invalid_compose_file_is_found() -> None:
    with pytest.raises(ValueError, match="imagee"):
        compose_spec.PyCompose.from_yaml("services: {a: {imagee: b}}")


def test_the_compose_file_describes_the_server(tmp_path: Path) -> None:
    server = compose("compose.yaml")["services"]["server"]
    build = server["build"]
    assert (DOCKER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    assert build["target"] in IMAGES
    environment = server["environment"]
    assert set(environment) <= VARIABLES | MORE_VARIABLES
    keys = tmp_path / "keys"
    keys.write_text("a-key\n")
    assert environment["TGI_API_KEY_FILE"] == f"/run/secrets/{server['secrets'][0]}"
    given = environment_of("cpu") | environment | {"TGI_API_KEY_FILE": str(keys)}
    settings = settings_of(["text-generation-launcher"], given)
    assert server["ports"] == [f"8080:{settings.port}"]
    patience = settings.graceful_termination_timeout + (len(ROLES) - 1) * ROLE_GRACE_SECONDS
    assert float(server["stop_grace_period"].removesuffix("s")) > patience
    writable = [*(one.split(":")[0] for one in server["tmpfs"]), *(one.split(":")[1] for one in server["volumes"])]
    for name in ("TGI_RUN", "HF_HOME", "XDG_CACHE_HOME", "HOME"):
        assert any(f"{given[name]}/".startswith(f"{path}/") for path in writable), name


def test_the_file_for_gpus_adds_to_the_server() -> None:
    (service,) = compose("compose.gpu.yaml")["services"]
    assert service in compose("compose.yaml")["services"]


def test_prometheus_and_grafana_find_their_files_and_the_server() -> None:
    services = compose("compose.yaml")["services"]
    mounted = {}
    for name in ("prometheus", "grafana"):
        for volume in services[name]["volumes"]:
            source, target, *_ = volume.split(":")
            if source.startswith("./"):
                assert (DOCKER / source).is_file()
                mounted[target] = DOCKER / source
    assert f"--config.file={next(iter(mounted))}" in services["prometheus"]["command"]
    (scrape,) = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    (target,) = scrape["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert services[host]["ports"][0].endswith(f":{port}")
    (source,) = yaml.safe_load((DOCKER / "grafana" / "datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((DOCKER / "grafana" / "dashboards.yaml").read_text())["providers"]
    dashboard = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(dashboard).parent == Path(provider["options"]["path"])
    assert mounted[dashboard].name == "tgi.json"
    assert source["isDefault"]
    assert {panel["datasource"]["uid"] for panel in panels()} == {"${datasource}"}  # as in an import to any Grafana
    assert Path("/etc/prometheus/prometheus.yml").parent / "alerts.yml" in map(Path, mounted)


# --- queries ---


BOARD: dict[str, Any] = json.loads((DOCKER / "grafana" / "tgi.json").read_text())


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = BOARD["panels"]
    return found


def variables() -> dict[str, str]:
    """The variables of the board that have the values of a label: what each reads."""
    queries = {one["name"]: one["query"]["query"] for one in BOARD["templating"]["list"] if one["type"] == "query"}
    return {name: query.removeprefix("label_values(").removesuffix(f", {name})") for name, query in queries.items()}


def selectors(query: str) -> list[promql_parser.VectorSelector]:
    """What a query reads. Raises ValueError if it is not PromQL."""
    found: list[promql_parser.VectorSelector] = []

    def collect(expression: promql_parser.Expr) -> None:
        if isinstance(expression, promql_parser.VectorSelector):
            found.append(expression)
        elif isinstance(expression, promql_parser.MatrixSelector):
            found.append(expression.vector_selector)

    promql_parser.walk(promql_parser.parse(query), collect)
    return found


SAMPLES = {
    f"{name}{suffix}": {*series.labels, *(["le"] if suffix == "_bucket" else [])}
    for name, series in (TGI_SERIES | OWN_SERIES).items()
    for suffix in SUFFIXES.get(series.kind, ("",))
}
ALERTS = [rule for group in yaml.safe_load((DOCKER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
SCRAPED = {"instance", "job"}  # labels that Prometheus adds
QUERIES = [
    *variables().values(),
    *(target["expr"].replace("$__rate_interval", "5m") for panel in panels() for target in panel["targets"]),
    *(rule["expr"] for rule in ALERTS if rule["alert"] != "TgiDown"),  # which reads no metric of ours
    *(
        line
        for block in re.findall(r"^```promql\n(.*?)^```$", (ROOT / "docs" / "metrics.md").read_text(), re.DOTALL | re.M)
        for line in block.splitlines()
    ),
]


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_reads_samples_that_exist(query: str) -> None:
    read = {one.name: str(one.matchers) for one in selectors(query)}
    assert read
    assert set(read) <= set(SAMPLES)
    for name, matchers in read.items():
        assert set(re.findall(r"(\w+)(?:=|!)", matchers)) <= SAMPLES[name] | SCRAPED, name
    for by in re.findall(r"by \(([^)]*)\)", query):
        assert any({label.strip() for label in by.split(",")} <= SAMPLES[name] | SCRAPED for name in read), by


def test_alerts_name_only_labels_that_they_have() -> None:
    for rule in ALERTS:
        by = re.findall(r"by \(([^)]*)\)", rule["expr"])
        labels = {label.strip() for label in by[0].split(",")} if by else {"instance"}
        used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert {"instance"} <= used <= labels


def missing(kept: Any, given: Any, path: str = "") -> Iterator[str]:
    """The paths of what `given` has and `kept` has not."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            yield from missing(kept[name], value, f"{path}.{name}") if name in kept else [f"{path}.{name}"]
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for at, (one, other) in enumerate(zip(kept, given, strict=True)):
            yield from missing(one, other, f"{path}[{at}]")
    elif kept != given:
        yield path


def test_the_board_is_one_of_grafana() -> None:
    """Grafana's own types of a dashboard keep all of its fields. They do not know the older form of a variable's query,
    which Grafana shows in its editor."""

    def lost(board: dict[str, Any]) -> set[str]:
        kept = json.loads(json.dumps(dashboard.Dashboard.from_json(board), cls=JSONEncoder))
        return {re.sub(r"\d+", "N", path) for path in missing(kept, board)}

    assert lost(BOARD) == {".templating.list[N].definition"}
    assert lost(BOARD | {"refesh": "10s"}) - lost(BOARD) == {".refesh"}


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in panels()
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels()}) == len(panels())
