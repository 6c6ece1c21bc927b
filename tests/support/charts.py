"""The Helm chart, a RayService to render it with for each preset, and the example of docs/kubernetes.md.

`python -m tests.support.charts` renders that example again, by the helm of `make test-chart`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from samovar.cluster.manifests.kuberay import render_kuberay
from samovar.configs.loader import load
from tests.support.launch_examples import DIGEST

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "cluster/manifests/chart"
PARTS = Path(os.environ.get("TESTS_CHART", ROOT / "build/chart"))
"""Where `make test-chart` puts helm, and the schemas."""

EXAMPLE = ROOT / "docs/kubernetes"
VALUES, RENDERED = EXAMPLE / "values.yaml", EXAMPLE / "rendered.yaml"
NAMESPACE = "chat"

SECRETS = {"auth": {"api_keys": {"my-team": "a-key-of-sixteen-characters"}, "server_secret": "5e" * 32}}
IMAGE = f"--launch.image=registry.example/samovar@{DIGEST}"
GPU = "--launch.kube.worker-gpus=1"
PRESETS = {
    "local-cpu": ("--cluster.replica-cpus=4",),
    "local-gpu": (GPU,),
    "aws": (GPU, "--tiers.s3.bucket=my-bucket"),
    "rack": ("--launch.gcs.storage=redis", "--launch.gcs.redis-address=redis:6379"),
}
"""Preset -> what it leaves open."""

Object = dict[str, Any]


def ray_service(preset: str) -> str:
    """What `samovar render --kuberay --config PRESET` prints."""
    settings = load(preset, {}, [IMAGE, *PRESETS[preset]]).settings
    return render_kuberay(settings, SECRETS, Path("secrets.yaml"))


def helm(*words: str | Path, fails: bool = False) -> str:
    """Helm's output; if it `fails`, as it must then, its complaint."""
    done = subprocess.run(
        [PARTS / "helm", *map(str, words)], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stderr if fails else done.stdout


def template(folder: Path, preset: str, *words: str | Path) -> str:
    """The chart for a preset, as `helm template` prints it. `folder`: for the RayService."""
    file = folder / f"{preset}.yaml"
    file.write_text(ray_service(preset))
    return helm("template", "samovar", CHART, "-n", NAMESPACE, "--set-file", f"rayService={file}", *words)


def objects(text: str) -> list[Object]:
    return [one for one in yaml.safe_load_all(text) if one]


def the(kind: str, found: Sequence[Object]) -> Object:
    """The only object of that kind."""
    (one,) = (one for one in found if one["kind"] == kind)
    return one


def example(folder: Path) -> str:
    """The text of the example in the docs."""
    return template(folder, "aws", "--values", VALUES)


if __name__ == "__main__":
    RENDERED.write_text(example(PARTS))
