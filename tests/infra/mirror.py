"""Terraform offline: a copy of a tree, the stand-in provider in a mirror, and nothing else to reach.

`python -m tests.infra.mirror [--in SUBFOLDER] plan -var-file=envs/dev.tfvars` copies terraform/ away, runs
`terraform init` and then the command in the copy. It knows no test.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.infra.awsschema import extract, package
from tests.infra.awsschema.provider import SCHEMA, SOCKET

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "terraform"
COMMAND_TIMEOUT_S = 150
_LOCAL_STATE = 'terraform {\n  backend "local" {}\n}\n'
_NOT_COPIED = (".terraform", ".terraform.lock.hcl", "*.tfstate", "*.tfstate.backup")


class TerraformFailed(AssertionError):
    """A command ended with another status than was expected; the text has its output."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A copy of a Terraform tree at `tree`, in which commands run offline with `env`."""

    tree: Path
    env: Mapping[str, str]

    def run(
        self, *args: str, expect: int | None = 0, folder: str = ".", **more: str
    ) -> subprocess.CompletedProcess[str]:
        """`terraform ARGS` in `folder` of the copy; `more`: further environment.

        Raises `TerraformFailed` if it ends with another status than `expect` (None: any).
        """
        data = self.tree.parent / "data" / folder.replace("/", "_")
        done = subprocess.run(
            ["terraform", *args],
            cwd=self.tree / folder,
            env={**self.env, "TF_DATA_DIR": str(data), **more},
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        if expect is not None and done.returncode != expect:
            raise TerraformFailed(
                f"terraform {' '.join(args)}: exit {done.returncode}, expected {expect}\n"
                f"{done.stdout}{done.stderr}"
            )
        return done

    def outputs(self, folder: str = ".") -> dict[str, object]:
        """What `terraform output -json` says."""
        return json.loads(self.run("output", "-json", folder=folder).stdout)

    def state(self, folder: str = ".") -> dict[str, object]:
        """The whole state, as kept in the backend."""
        return json.loads(self.run("state", "pull", folder=folder).stdout)


def bench(place: Path, source: Path = TREE, local_state: bool = True) -> Bench:
    """Copies `source` to `place`/tree and makes the mirror beside it. Downloads the bindings if need be.

    `local_state`: the state lies in the copy, whatever backend the tree names.
    Raises `package.PackageMissing`, `extract.UnknownType`, `extract.BadHcl`.
    """
    tree = place / "tree"
    shutil.copytree(source, tree, ignore=shutil.ignore_patterns(*_NOT_COPIED))
    if local_state:
        for root in {file.parent for file in tree.rglob("*.tf") if 'backend "' in file.read_text()}:
            (root / "local_state_override.tf").write_text(_LOCAL_STATE)
    schema = place / "schema.json"
    schema.write_text(json.dumps(extract.schema(extract.types_used(tree))))
    return Bench(tree, _environment(place, schema))


@contextmanager
def kept_running(made: Bench) -> Iterator[Bench]:
    """The same bench with one provider process for all commands: Terraform starts dozens a `test` else."""
    with tempfile.TemporaryDirectory(prefix="samovar-tf-") as folder:
        socket = f"{folder}/provider.sock"
        command = [sys.executable, "-m", "tests.infra.awsschema.provider"]
        env = {**made.env, SOCKET: socket}
        with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
            try:
                line = process.stdout.readline() if process.stdout else ""
                if not line.startswith("1|6|"):
                    raise TerraformFailed(f"the stand-in provider did not start: {line or process.poll()}")
                address = {"Network": "unix", "String": socket}
                told = {"Protocol": "grpc", "ProtocolVersion": 6, "Pid": process.pid, "Test": True}
                attach = json.dumps({extract.ADDRESS: {**told, "Addr": address}})
                yield replace(made, env={**made.env, "TF_REATTACH_PROVIDERS": attach})
            finally:
                process.terminate()


def _environment(place: Path, schema: Path) -> dict[str, str]:
    version = package.PROVIDER_VERSION
    mirror = place / "mirror"
    program = mirror / extract.ADDRESS / version / "linux_amd64" / f"terraform-provider-aws_v{version}"
    program.parent.mkdir(parents=True)
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m tests.infra.awsschema.provider\n'
    )
    program.chmod(0o755)
    settings = place / "terraformrc"
    settings.write_text(
        f'provider_installation {{\n  filesystem_mirror {{\n    path = "{mirror}"\n  }}\n}}\n'
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "AWS_"))}
    return {
        **kept,
        "TF_CLI_CONFIG_FILE": str(settings),
        "TF_CLI_ARGS": "-no-color",
        "TF_IN_AUTOMATION": "1",
        "TF_INPUT": "0",
        "TF_DISABLE_PLUGIN_TLS": "1",
        "CHECKPOINT_DISABLE": "1",
        SCHEMA: str(schema),
    }


def main() -> int:
    """Exit status of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in", dest="folder", default=".", help="folder below terraform/, as bootstrap")
    parser.add_argument("--source", type=Path, default=TREE)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="samovar-terraform-") as place,
        kept_running(bench(Path(place), given.source)) as made,
    ):
        made.run("init", folder=given.folder)
        done = made.run(*given.command, expect=None, folder=given.folder)
    print(done.stdout + done.stderr, end="")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
