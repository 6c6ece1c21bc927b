"""The JSON Schema of the part of a RayService that we write; any other field is refused.

Its source: the field reference of the custom resources ray.io/v1 (docs.ray.io, "KubeRay CRD API reference",
1.6 and 1.7), the operator's CRD `ray.io_rayservices.yaml` (enums, patterns), and for pods Kubernetes' API
reference (PodSpec v1 core). Written by hand: the CRD has a megabyte, nearly all of it other fields of pods.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer", "minimum": 0}
TRUTH: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
LABEL: Schema = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 47}
PORT_NAME: Schema = {
    "type": "string",
    "pattern": "^(?=.*[a-z])[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
    "maxLength": 15,
}
QUANTITY: Schema = {
    "type": "string",
    "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?[0-9]+))?$",
}


def one(*required: str, **optional: Schema) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": optional,
        "required": list(required),
        "additionalProperties": False,
    }


def many(item: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": item, "minItems": least}


AMOUNTS: Schema = {"type": "object", "additionalProperties": QUANTITY}
RESOURCES = one(requests=AMOUNTS, limits=AMOUNTS)
CONTAINER_SECURITY = one(
    allowPrivilegeEscalation=TRUTH,
    capabilities=one(drop=many(TEXT), add=many(TEXT)),
    readOnlyRootFilesystem=TRUTH,
)
PROBE = one(
    "httpGet",
    httpGet=one("port", path=TEXT, port={"anyOf": [PORT, PORT_NAME]}),
    periodSeconds=WHOLE,
    timeoutSeconds=WHOLE,
    failureThreshold=WHOLE,
)
CONTAINER = one(
    "name",
    "image",
    name=LABEL,
    image=TEXT,
    command=many(TEXT),
    args=many(TEXT),
    ports=many(one("containerPort", name=PORT_NAME, containerPort=PORT, protocol=TEXT)),
    env=many(one("name", name=TEXT, value=TEXT)),
    resources=RESOURCES,
    livenessProbe=PROBE,
    readinessProbe=PROBE,
    lifecycle=one(preStop=one(exec=one("command", command=many(TEXT, 1)))),
    securityContext=CONTAINER_SECURITY,
    volumeMounts=many(one("name", "mountPath", name=LABEL, mountPath=TEXT, readOnly=TRUTH, subPath=TEXT)),
)
VOLUME = one(
    "name",
    name=LABEL,
    emptyDir=one(medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
    persistentVolumeClaim=one("claimName", claimName=LABEL, readOnly=TRUTH),
    secret=one(secretName=LABEL, defaultMode={"type": "integer", "minimum": 0, "maximum": 0o777}),
)
POD = one(
    "spec",
    metadata=one(labels=TEXTS, annotations=TEXTS),
    spec=one(
        "containers",
        containers=many(CONTAINER, 1),
        initContainers=many(CONTAINER),
        volumes=many(VOLUME),
        terminationGracePeriodSeconds=WHOLE,
        automountServiceAccountToken=TRUTH,
        securityContext=one(
            runAsNonRoot=TRUTH,
            runAsUser=WHOLE,
            runAsGroup=WHOLE,
            fsGroup=WHOLE,
            seccompProfile=one("type", type={"enum": ["RuntimeDefault", "Localhost", "Unconfined"]}),
        ),
    ),
)


def ray_service_with(pod: Schema) -> Schema:
    """The schema of a RayService whose pods have this one; its Service has that of Kubernetes."""
    cluster = one(
        "headGroupSpec",
        rayVersion=TEXT,
        authOptions=one(mode={"enum": ["disabled", "token"]}, secretName=TEXT),
        enableInTreeAutoscaling=TRUTH,
        autoscalerOptions=one(
            version={"enum": ["v1", "v2"]},
            idleTimeoutSeconds=WHOLE,
            upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
            resources=RESOURCES,
            securityContext=CONTAINER_SECURITY,
        ),
        gcsFaultToleranceOptions=one(redisAddress=TEXT, externalStorageNamespace=TEXT),
        headGroupSpec=one("rayStartParams", "template", rayStartParams=TEXTS, template=pod),
        workerGroupSpecs=many(
            one(
                "groupName",
                "minReplicas",
                "maxReplicas",
                "rayStartParams",
                "template",
                groupName=TEXT,
                replicas=WHOLE,
                minReplicas=WHOLE,
                maxReplicas=WHOLE,
                idleTimeoutSeconds=WHOLE,
                rayStartParams=TEXTS,
                template=pod,
            )
        ),
    )
    return one(
        "apiVersion",
        "kind",
        "metadata",
        "spec",
        apiVersion={"const": "ray.io/v1"},
        kind={"const": "RayService"},
        metadata=one("name", name=LABEL, namespace=LABEL, labels=TEXTS, annotations=TEXTS),
        spec=one(
            serveConfigV2=TEXT,
            serveService={"type": "object"},
            upgradeStrategy=one(type={"enum": ["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]}),
            rayClusterConfig=cluster,
            excludeHeadPodFromServeSvc=TRUTH,
            rayClusterDeletionDelaySeconds=WHOLE,
        ),
    )


RAY_SERVICE = ray_service_with(POD)
