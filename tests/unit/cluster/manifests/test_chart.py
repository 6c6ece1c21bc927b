"""The Helm chart, as far as it can be read without helm (which `make test-chart` runs)."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from samovar.cluster.manifests.kuberay import STOP_SPARE_S
from samovar.router.ingress.app import version
from samovar.router.ingress.operations import OPERATIONS
from samovar.router.metrics import Metrics
from samovar.router.proxy.proxy_guard import CONTROL_OPEN
from tests.support.charts import (
    CHART,
    NAMESPACE,
    PRESETS,
    RENDERED,
    VALUES,
    Object,
    objects,
    ray_service,
    the,
)

TEMPLATES = sorted((CHART / "templates").iterdir())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def paths(tree: Any, *above: str) -> Iterator[tuple[str, ...]]:
    """The places of all values; what Kubernetes defines is one value."""
    for name, value in tree.items():
        if isinstance(value, dict) and value and name != "operator":
            yield from paths(value, *above, name)
        else:
            yield (*above, name)


def test_the_values_fit_their_schema_and_it_knows_no_others() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(values, SCHEMA)
    jsonschema.validate(yaml.safe_load(VALUES.read_text()), SCHEMA)
    for path in paths(values):
        place = SCHEMA
        for name in path:
            assert place["additionalProperties"] is False, path
            place = place["properties"][name]
    assert SCHEMA["properties"].keys() - values.keys() == {"global"}
    for wrong in (
        {"nvme": {"storageClas": "x"}},
        {"headroom": {"podsMax": "3"}},
        {"service": {"type": "None"}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, SCHEMA)


def test_every_value_is_used_by_a_template() -> None:
    used = "\n".join(path.read_text() for path in TEMPLATES)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert [path for path in paths(values) if ".Values." + ".".join(path) not in used] == []
    wanted = set(re.findall(r"\.Values\.([A-Za-z.]+)", used))
    places = {".".join(path[:depth]) for path in paths(values) for depth in range(1, len(path) + 1)}
    assert wanted <= places


def test_the_chart_has_the_version_of_samovar() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version()


def test_its_queries_ask_for_metrics_that_there_are() -> None:
    known = {name: labels for one in Metrics().declared() for name, labels in one.samples.items()}
    queries = re.findall(r"query: (.*)", (CHART / "templates/headroom.yaml").read_text())
    assert len(queries) == 2
    for query in queries:
        names = re.findall(r"samovar_\w+", query)
        assert names
        for name in names:
            assert set(re.findall(r"by \((\w+)\)", query)) <= set(known[name])


@pytest.mark.parametrize("preset", PRESETS)
def test_probes_ask_routes_that_need_no_key_and_the_grace_outlasts_the_drain(preset: str) -> None:
    (tree,) = objects(ray_service(preset))
    cluster = tree["spec"]["rayClusterConfig"]
    head = cluster["headGroupSpec"]["template"]["spec"]
    (worker,) = (group["template"]["spec"] for group in cluster["workerGroupSpecs"])
    ready = {"path": CONTROL_OPEN, "port": "serve"}
    for pod, asked in ((worker, ready), (head, {"path": "/api/healthz", "port": 52365})):
        (container,) = pod["containers"]
        assert container["readinessProbe"]["httpGet"] == asked
        assert container["livenessProbe"]["httpGet"]["path"] == "/api/healthz"
    command = worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["python", "-m"]
    assert importlib.util.find_spec(command[2]) is not None
    assert int(command[3]) + STOP_SPARE_S <= worker["terminationGracePeriodSeconds"]
    assert "lifecycle" not in head["containers"][0], "its drain would be refused"


def test_the_scraped_route_is_one_of_ours() -> None:
    (monitor,) = (one for one in objects(RENDERED.read_text()) if one["kind"] == "ServiceMonitor")
    assert ("GET", monitor["spec"]["endpoints"][0]["path"]) in OPERATIONS


def as_the_chart_has_it(tree: Object, values: Object) -> Object:
    """The generator's RayService with every difference that the chart makes."""
    labels = tree["metadata"]["labels"] | {
        "app.kubernetes.io/version": version(),
        "app.kubernetes.io/managed-by": "Helm",
        "helm.sh/chart": f"samovar-{version()}",
    }
    tree["metadata"] |= {"namespace": NAMESPACE, "labels": labels}
    for group in tree["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        pod |= values["worker"]["podSpec"]
        (kv,) = (one for one in pod["volumes"] if one["name"] == "kv")
        claim = {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": values["nvme"]["storageClassName"],
            "resources": {"requests": {"storage": kv.pop("emptyDir")["sizeLimit"]}},
        }
        kv["ephemeral"] = {"volumeClaimTemplate": {"spec": claim}}
    return tree


def test_the_example_in_the_docs_is_what_the_generator_says_now() -> None:
    """`make build/chart/.installed && python -m tests.support.charts` renders it again."""
    (tree,) = objects(ray_service("aws"))
    found = the("RayService", objects(RENDERED.read_text()))
    assert found == as_the_chart_has_it(tree, yaml.safe_load(VALUES.read_text()))
