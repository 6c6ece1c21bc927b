"""Clusters to render: the two examples of `cluster/launch/`, and variations of them.

`python -m tests.support.launch_examples` writes the rendered examples anew; a test compares them.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from samovar.cluster.launch.cluster_file import ClusterFile
from samovar.cluster.launch.render import header, render
from samovar.cluster.launch.terraform import CloudOutputs, parse_outputs
from samovar.configs.loader import load
from samovar.configs.settings import Settings

FOLDER = Path(str(resources.files("samovar.cluster"))) / "launch"
OUTPUTS_FILE = FOLDER / "terraform-outputs.json"
NODE_DIR = "/home/me/.samovar/example/node"
DIGEST = "sha256:" + "0123456789abcdef" * 4
IMAGE = f"123456789012.dkr.ecr.us-east-1.amazonaws.com/samovar@{DIGEST}"
KEYS = {"SAMOVAR_AUTH__API_KEYS": '{"my-team": "a-key-of-sixteen-characters"}'}

AWS_FLAGS = ("--launch.ssh.private-key=/home/me/.ssh/samovar.pem", f"--launch.image={IMAGE}")
RACK_FLAGS = (
    "--launch.rack.head=10.0.0.1",
    '--launch.rack.workers=["10.0.0.2", "10.0.0.3"]',
    "--launch.rack.gpus=1",
    "--launch.ssh.private-key=/home/me/.ssh/rack.pem",
    "--launch.venv=~/samovar-venv",
)


def outputs_tree() -> dict[str, Any]:
    """As `terraform output -json` prints it; a copy to be changed."""
    tree: dict[str, Any] = json.loads(OUTPUTS_FILE.read_text())
    return tree


def outputs(**changes: Any) -> CloudOutputs:
    """Of the example; `changes` replace whole fields of the value."""
    tree = outputs_tree()
    tree["samovar"]["value"].update(changes)
    return parse_outputs(tree, "outputs.json")


def pools_with(name: str, **changes: Any) -> dict[str, Any]:
    """The example's pools, one of them changed."""
    pools: dict[str, Any] = outputs_tree()["samovar"]["value"]["pools"]
    pools[name] |= changes
    return pools


@cache
def aws(*flags: str) -> Settings:
    return load("aws", {}, [*AWS_FLAGS, *flags]).settings


@cache
def rack(*flags: str) -> Settings:
    return load("rack", KEYS, [*RACK_FLAGS, *flags]).settings


def rendered_aws(*flags: str, given: CloudOutputs | None = None) -> ClusterFile:
    return render(aws(*flags), given or outputs(), NODE_DIR)


def rendered_rack(*flags: str) -> ClusterFile:
    return render(rack(*flags), None, NODE_DIR)


def examples() -> dict[Path, str]:
    """The text of each rendered example."""
    on_aws, on_rack = rendered_aws(), rendered_rack()
    return {
        FOLDER / "aws.yaml": on_aws.text(header(on_aws, ["the preset aws", OUTPUTS_FILE.name])),
        FOLDER / "rack.yaml": on_rack.text(header(on_rack, ["the preset rack"])),
    }


if __name__ == "__main__":
    for path, text in examples().items():
        path.write_text(text)
        print(path)
