"""The part of kustomize that deploy/kubernetes uses: `resources`, and `patches` that are strategic merges by kind and
name.

Anything else in a kustomization is an error here. test_kubernetes.py compares the results with kubectl's where that is
installed.
"""

from pathlib import Path
from typing import Any

import yaml

KUSTOMIZATION = "kustomization.yaml"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's takes a tenth of the time
ALLOWED = {"apiVersion", "kind", "resources", "patches"}
# Lists whose items are merged, by this field; other lists are replaced.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "ports": "containerPort",
    "volumes": "name",
    "volumeMounts": "mountPath",
}


def read(path: Path) -> list[dict[str, Any]]:
    return list(yaml.load_all(path.read_text(), LOADER))


def render(directory: Path) -> list[dict[str, Any]]:
    """The objects that `kubectl kustomize DIRECTORY` prints."""
    (kustomization,) = read(directory / KUSTOMIZATION)
    unknown = set(kustomization) - ALLOWED
    assert not unknown, f"{directory}: {unknown} is not in the subset"
    objects: list[dict[str, Any]] = []
    for name in kustomization["resources"]:
        path = directory / name
        objects += render(path) if path.is_dir() else read(path)
    for patch in kustomization.get("patches", ()):
        assert set(patch) == {"path"}, f"{directory}: {patch} is not in the subset"
        for change in read(directory / patch["path"]):
            (position,) = [at for at, one in enumerate(objects) if identity(one) == identity(change)]
            objects[position] = merged(objects[position], change)
    names = [identity(one) for one in objects]
    assert len(set(names)) == len(names), f"{directory}: an object is there twice"
    return objects


def identity(one: dict[str, Any]) -> tuple[str, str]:
    """Kind and name."""
    return one["kind"], one["metadata"]["name"]


def merged(base: Any, change: Any, field: str = "") -> Any:
    """`base` with the changes. A null removes a field."""
    if isinstance(base, dict) and isinstance(change, dict):
        result = dict(base)
        for name, value in change.items():
            result[name] = merged(base.get(name), value, name)
        return {name: value for name, value in result.items() if value is not None}
    key = MERGE_KEYS.get(field)
    if isinstance(base, list) and isinstance(change, list) and key:
        items = {item[key]: item for item in base}
        for item in change:
            items[item[key]] = merged(items.get(item[key]), item)
        return list(items.values())
    return change


def normalized(value: Any, field: str = "") -> Any:
    """The same with merged lists in the order of their keys: kustomize puts new items first, `merged` last."""
    if isinstance(value, dict):
        return {name: normalized(item, name) for name, item in value.items()}
    if isinstance(value, list):
        items = [normalized(item) for item in value]
        key = MERGE_KEYS.get(field)
        return sorted(items, key=lambda item: str(item[key])) if key and all(key in item for item in items) else items
    return value
