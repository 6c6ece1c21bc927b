"""The Helm chart by the real helm: lint, every preset, and every object against its readers' schemas.

Kubernetes' own are those of its OpenAPI document (kubernetes-validate). Those of KEDA, the Gateway API and
Prometheus' operator are made from their CRDs (kubernetes-models), and do not see unknown fields. KubeRay's
CRD is in no package: its part is `rayservice_schema.py`, and the pods in it are Kubernetes'.
"""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.infra.needs import cannot_run, needs_infra
from tests.support.charts import (
    CHART,
    PARTS,
    PRESETS,
    RENDERED,
    VALUES,
    Object,
    example,
    helm,
    objects,
    ray_service,
    template,
    the,
)
from tests.unit.cluster.manifests.rayservice_schema import ray_service_with

pytestmark = needs_infra

KUBERNETES = "1.37"
MODELS = {
    "keda.sh/v1alpha1": "keda",
    "gateway.networking.k8s.io/v1": "gateway-api",
    "monitoring.coreos.com/v1": "prometheus-operator",
}
"""apiVersion -> package of @kubernetes-models."""

EVERYTHING = (
    *("--values", VALUES, "--set-file", f"secret.content={CHART / 'Chart.yaml'}"),
    *("--set", "httpRoute.enabled=true,httpRoute.parentRefs[0].name=public,httpRoute.hostnames[0]=a.example"),
    *("--set", "service.type=LoadBalancer,service.annotations.owner=chat,serviceMonitor.labels.release=prom"),
    *("--set", "head.podSpec.priorityClassName=high,head.podSpec.imagePullSecrets[0].name=pull"),
)
SCRIPT = """
let text = ""; for await (const part of process.stdin) text += part;
const {place, tree} = JSON.parse(text); const models = await import(place);
new models[tree.kind](tree).validate();
"""
KINDS_ALWAYS = ["NetworkPolicy", "PodDisruptionBudget", "RayService"]
KINDS_OPTIONAL = [
    "Deployment",
    "HTTPRoute",
    "Ingress",
    "PriorityClass",
    "ScaledObject",
    "Secret",
    "ServiceMonitor",
]


@pytest.fixture(scope="module", autouse=True)
def _parts() -> None:
    if not (PARTS / "helm").exists():
        cannot_run(f"{PARTS} has no helm: `make test-chart` puts it there")


def check(tree: Object) -> None:
    """Raise if whoever reads this object would refuse it."""
    group = tree["apiVersion"]
    if group == "ray.io/v1":
        check_ray_service(tree)
    elif group in MODELS:
        place = f"@kubernetes-models/{MODELS[group]}/{group}"
        done = subprocess.run(
            ["node", "--input-type=module", "-e", SCRIPT],
            input=json.dumps({"place": place, "tree": tree}),
            cwd=PARTS / "node",
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ValueError(done.stderr)
    else:
        check_kubernetes(tree)


def check_kubernetes(tree: Object) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(tree, KUBERNETES, strict=True)


def check_ray_service(tree: Object) -> None:
    """The RayService without its pods and its Service, and these as Kubernetes has them."""
    jsonschema.validate(tree, ray_service_with({"type": "object"}), cls=jsonschema.Draft202012Validator)
    cluster = tree["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
        check_kubernetes(pod | {"template": group["template"]})
    if "serveService" in tree["spec"]:
        check_kubernetes({"apiVersion": "v1", "kind": "Service", **tree["spec"]["serveService"]})


@pytest.mark.parametrize("words", [(), EVERYTHING], ids=["defaults", "everything"])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_what_kubernetes_and_the_operators_take(
    tmp_path: Path, preset: str, words: tuple[str, ...]
) -> None:
    found = objects(template(tmp_path, preset, *words))
    wanted = KINDS_ALWAYS + (KINDS_OPTIONAL if words else [])
    assert sorted(one["kind"] for one in found) == sorted(wanted)
    for one in found:
        check(one)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_chart_says_what_the_generator_says(tmp_path: Path, preset: str) -> None:
    (tree,) = yaml.safe_load_all(ray_service(preset))
    found = the("RayService", objects(template(tmp_path, preset)))
    assert found["spec"] == tree["spec"]
    assert found["metadata"]["name"] == tree["metadata"]["name"]
    assert tree["metadata"]["labels"].items() <= found["metadata"]["labels"].items()


@pytest.mark.parametrize("preset", PRESETS)
def test_helm_lints_it(tmp_path: Path, preset: str) -> None:
    file = tmp_path / "rayservice.yaml"
    file.write_text(ray_service(preset))
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART, "--set-file", f"rayService={file}")
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART)


def test_the_rayservice_may_be_an_object_of_the_values(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"rayService": yaml.safe_load(ray_service("rack"))}))
    given = helm("template", "samovar", CHART, "-n", "chat", "--values", tmp_path / "values.yaml")
    assert objects(given) == objects(template(tmp_path, "rack"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--set-file", "rayService=/dev/null"), "samovar render --kuberay"),
        (("--set", "rayService=kind: Pod"), "is no RayService"),
        (("--set", "ingress.enabled=true"), "ingress.hosts is empty"),
        (("--set", "httpRoute.enabled=true"), "httpRoute.parentRefs is empty"),
        (("--set", "serviceMonitor.enabled=true"), "serviceMonitor.adminKey.name is empty"),
        (("--set", "replicas=3"), "replicas"),
        (("--set", "worker.podSpec.containers[0].name=mine"), "containers"),
        (("--set", "headroom.podsMax=many"), "podsMax"),
    ],
)
def test_what_cannot_work_is_refused_by_name(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    file = tmp_path / "rayservice.yaml"
    file.write_text(ray_service("rack"))
    ray = ("--set-file", f"rayService={file}") if "rayService" not in words[1] else ()
    assert text in helm("template", "samovar", CHART, *ray, *words, fails=True)


def test_the_schemas_see_what_is_wrong(tmp_path: Path) -> None:
    found = objects(template(tmp_path, "aws", *EVERYTHING))

    def wrong(kind: str, change: Any) -> None:
        tree = copy.deepcopy(the(kind, found))
        change(tree["spec"])
        with pytest.raises((ValueError, jsonschema.ValidationError)):
            check(tree)

    def container(spec: Object) -> Object:
        (group,) = spec["rayClusterConfig"]["workerGroupSpecs"]
        first: Object = group["template"]["spec"]["containers"][0]
        return first

    wrong("RayService", lambda spec: spec.update(serveConfig=""))
    wrong("RayService", lambda spec: spec["rayClusterConfig"].update(autoscaling=True))
    wrong("RayService", lambda spec: container(spec).update(livenesProbe={}))
    wrong("RayService", lambda spec: container(spec)["lifecycle"]["preStop"]["exec"].update(command="true"))
    wrong("RayService", lambda spec: spec["serveService"]["spec"].update(typo="ClusterIP"))
    wrong("NetworkPolicy", lambda spec: spec["ingress"][0].update(form=[]))
    wrong("PodDisruptionBudget", lambda spec: spec.update(minAvailible=1))
    wrong("Ingress", lambda spec: spec["rules"][0]["http"]["paths"][0].pop("pathType"))
    wrong("Deployment", lambda spec: spec.pop("selector"))
    wrong("ScaledObject", lambda spec: spec.update(maxReplicaCount="3"))
    wrong("HTTPRoute", lambda spec: spec["rules"][0]["timeouts"].update(request="soon"))
    wrong("ServiceMonitor", lambda spec: spec["endpoints"][0].update(interval="often"))


def test_the_example_in_the_docs_is_helms_own(tmp_path: Path) -> None:
    assert RENDERED.read_text() == example(tmp_path)
