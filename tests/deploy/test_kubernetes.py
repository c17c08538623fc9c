"""deploy/kubernetes: valid objects that agree with each other and with the program."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml

from tests.deploy.kustomize import LOADER, identity, normalized, render
from tests.deploy.shapes import (
    DEPLOY,
    KUBERNETES,
    PROGRAMS,
    SHAPES,
    command_of,
    containers,
    environment_of,
    objects,
    pod_specs,
    settings_of,
)
from tgi.microkernel.observability.metrics import OWN_SERIES, TGI_SERIES
from tgi.microkernel.processes.supervisor import ROLE_GRACE_SECONDS
from tgi.microkernel.settings.table import OPTIONS
from tgi.server import ROLES

# The first release with sidecars (docs/deployment.md names it), and the latest that the package has.
OLDEST, LATEST = "1.29", kubernetes_validate.latest_version()
# Kinds of the Prometheus operator, whose schemas the package does not have.
OTHERS_KINDS = {"PodMonitor"}
VARIABLES = {variable for name, option in OPTIONS.items() for variable in option.over + option.variables(name)}
MORE_VARIABLES = {"TGI_RUN", "HF_HOME", "XDG_CACHE_HOME", "HF_TOKEN"}  # docs/configuration.md, "Further"
SERVERS = [shape for shape in SHAPES if any(True for _ in pod_specs(shape))]


def programs(shape: str) -> list[dict[str, Any]]:
    """The containers that run the server or one of its roles."""
    return [one for one in containers(shape) if command_of(one)[0] in PROGRAMS]


def test_every_directory_is_a_shape() -> None:
    assert sorted(path.name for path in KUBERNETES.iterdir()) == SHAPES
    assert {"base", "front-ends", "one-gpu", "tensor-parallel"} <= set(SERVERS)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="compares with kubectl, which is not installed")
@pytest.mark.parametrize("shape", SHAPES)
def test_kubectl_renders_the_same(shape: str) -> None:
    done = subprocess.run(["kubectl", "kustomize", KUBERNETES / shape], capture_output=True, text=True, check=True)
    theirs = {identity(one): normalized(one) for one in yaml.load_all(done.stdout, LOADER)}
    assert theirs == {identity(one): normalized(one) for one in render(KUBERNETES / shape)}


@pytest.mark.parametrize("version", [OLDEST, LATEST])
@pytest.mark.parametrize("shape", SHAPES)
def test_objects_are_valid(shape: str, version: str) -> None:
    for one in render(KUBERNETES / shape):
        if one["kind"] not in OTHERS_KINDS:
            kubernetes_validate.validate(one, version, strict=True)


def test_an_invalid_object_is_found() -> None:
    (service,) = objects("Service", "base")
    service["spec"]["ports"][0]["targetPrt"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, LATEST, strict=True)


@pytest.mark.parametrize("shape", SERVERS)
def test_the_program_accepts_its_settings(shape: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key\n")
    for container in programs(shape):
        names = {one["name"] for one in container["env"]}
        assert names <= VARIABLES | MORE_VARIABLES, container["name"]
        environment = environment_of(container)
        if "TGI_API_KEY_FILE" in environment:
            environment["TGI_API_KEY_FILE"] = str(keys)
        settings = settings_of(command_of(container), environment)
        ports = {one["name"]: one["containerPort"] for one in container.get("ports", ())}
        if "http" in ports:
            assert settings.port == ports["http"]
            assert settings.api_key_file
        assert (settings.listen is not None) == ("link" in ports)
        assert settings.listen is None or settings.listen.endswith(f":{ports['link']}")
        gpus = container["resources"].get("limits", {}).get("nvidia.com/gpu")
        assert gpus is None or int(gpus) == settings.num_shard
        assert (gpus is None) != container["image"].endswith(":cuda")


@pytest.mark.parametrize("shape", SERVERS)
def test_probes_ask_for_what_there_is(shape: str) -> None:
    """Readiness by /health. Startup and liveness connect only: no request is answered during a download, and while a
    worker is replaced /health is 503, but the pod must go on."""
    serving = [one for one in containers(shape) if "readinessProbe" in one]
    assert len(serving) == len(list(pod_specs(shape)))
    for container in serving:
        assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
        assert container["startupProbe"]["tcpSocket"] == container["livenessProbe"]["tcpSocket"] == {"port": "http"}


@pytest.mark.parametrize("shape", SERVERS)
def test_a_pod_has_the_time_to_drain(shape: str) -> None:
    for pod in pod_specs(shape):
        (container,) = [one for one in pod["containers"] if "readinessProbe" in one]
        drain = float(environment_of(container)["GRACEFUL_TERMINATION_TIMEOUT"])
        hook = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
        roles_below = len(ROLES) - 1
        assert pod["terminationGracePeriodSeconds"] >= hook + drain + roles_below * ROLE_GRACE_SECONDS


@pytest.mark.parametrize("shape", SERVERS)
def test_containers_have_no_rights_and_write_to_volumes_only(shape: str) -> None:
    for pod in pod_specs(shape):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
            environment = environment_of(container)
            for name in ("TGI_RUN", "TGI_API_KEY_FILE", "TGI_KEYS", "HF_HOME", "XDG_CACHE_HOME"):
                if name in environment:
                    assert any(environment[name] == path or environment[name].startswith(f"{path}/") for path in mounts)
            for path, volume in mounts.items():
                assert "emptyDir" in volume or "secret" in volume, path


@pytest.mark.parametrize("shape", SERVERS)
def test_selectors_find_pods_and_ports(shape: str) -> None:
    templates = [one["spec"]["template"] for one in objects("Deployment", shape)]

    def selected(labels: dict[str, str]) -> list[dict[str, Any]]:
        found = [one["spec"] for one in templates if labels.items() <= one["metadata"]["labels"].items()]
        assert found, labels
        return found

    def ports(pod: dict[str, Any]) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for one in pod["containers"] for port in one.get("ports", ())}

    for service in objects("Service", shape):
        (pod,) = selected(service["spec"]["selector"])
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(ports(pod))
    for budget in objects("PodDisruptionBudget", shape):
        assert len(selected(budget["spec"]["selector"]["matchLabels"])) == 1
    for policy in objects("NetworkPolicy", shape):
        for pod in selected(policy["spec"]["podSelector"]["matchLabels"]):
            for rule in policy["spec"].get("ingress", ()):
                assert {port["port"] for port in rule["ports"]} <= set(ports(pod).values())
    for scaler in objects("HorizontalPodAutoscaler", shape):
        target = (scaler["spec"]["scaleTargetRef"]["kind"], scaler["spec"]["scaleTargetRef"]["name"])
        (scaled,) = [one for one in render(KUBERNETES / shape) if identity(one) == target]
        assert "replicas" not in scaled["spec"], "the autoscaler sets it"
    for template in templates:
        annotations = template["metadata"]["annotations"]
        assert int(annotations["prometheus.io/port"]) == ports(template["spec"])["http"]
        assert annotations["prometheus.io/path"] == "/metrics"


def test_front_ends_connect_to_all_schedulers() -> None:
    (tokenizer,) = [one for one in containers("front-ends") if command_of(one) == ["tgi", "tokenizer"]]
    host, port = environment_of(tokenizer)["TGI_CONNECT"].removeprefix("tcp://").split(":")
    (service,) = [one for one in objects("Service", "front-ends") if one["metadata"]["name"] == host]
    assert [one["port"] for one in service["spec"]["ports"]] == [int(port)]
    assert tokenizer["restartPolicy"] == "Always"  # a sidecar, which ends after the front end
    (server,) = [one for one in containers("front-ends") if "TGI_LISTEN" in environment_of(one)]
    # The name of a headless Service has the addresses of the pods, and translates no ports.
    assert service["spec"]["clusterIP"] == "None"
    assert environment_of(server)["TGI_LISTEN"].endswith(f":{port}")
    same = {"MODEL_ID", "MAX_CONCURRENT_REQUESTS", "GRACEFUL_TERMINATION_TIMEOUT"}
    theirs = {name: value for one in programs("front-ends") for name, value in environment_of(one).items()}
    assert {name: theirs[name] for name in same} == {name: environment_of(server)[name] for name in same}


def test_key_files_are_copied_to_where_the_programs_look_for_them() -> None:
    for pod in pod_specs("front-ends"):
        (copy,) = [one for one in pod["initContainers"] if one["name"] == "key"]
        program, *mode, source, target = command_of(copy)
        assert (program, mode) == ("install", ["-m", "0600"])
        assert source.startswith(copy["volumeMounts"][0]["mountPath"])
        users = [environment_of(one).get("TGI_KEYS") for one in (*pod["initContainers"], *pod["containers"])]
        assert [one for one in users if one] == [target]


def test_the_autoscaler_observes_a_metric_that_the_adapter_serves() -> None:
    (scaler,) = objects("HorizontalPodAutoscaler", "autoscaling")
    (metric,) = [one["pods"]["metric"]["name"] for one in scaler["spec"]["metrics"]]
    (rule,) = yaml.safe_load((KUBERNETES / "autoscaling" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert rule["name"]["as"] == metric
    assert promql_parser.parse(rule["seriesQuery"]).name == metric
    assert (TGI_SERIES | OWN_SERIES)[metric].kind == "gauge"
    query = rule["metricsQuery"]
    for template, text in {"Series": metric, "LabelMatchers": 'pod="a"', "GroupBy": "pod"}.items():
        assert f"<<.{template}>>" in query
        query = query.replace(f"<<.{template}>>", text)
    promql_parser.parse(query)


def test_the_monitor_selects_every_pod() -> None:
    (monitor,) = objects("PodMonitor", "monitoring")
    labels = monitor["spec"]["selector"]["matchLabels"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] == "/metrics"
    for shape in SERVERS:
        for one in objects("Deployment", shape):
            template = one["spec"]["template"]
            assert labels.items() <= template["metadata"]["labels"].items()
            names = [port["name"] for container in template["spec"]["containers"] for port in container["ports"]]
            assert endpoint["port"] in names


def test_no_secret_is_in_the_files() -> None:
    for path in DEPLOY.rglob("*"):
        assert path.is_dir() or not re.search(r"kind: Secret$|hf_[A-Za-z0-9]{10}|PRIVATE KEY", path.read_text(), re.M)
