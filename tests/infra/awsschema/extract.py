"""The exact schema of the AWS provider for the types a Terraform tree uses, without the provider.

Finds the types with python-hcl2, reads their bindings straight from the npm package, and writes what
`terraform providers schema -json` would print. It knows no protocol and no value.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hcl2
from lark.exceptions import LarkError

from tests.infra.awsschema import bindings, package

ADDRESS = "registry.terraform.io/hashicorp/aws"
SECTIONS = {
    "": "resource_schemas",
    "data.": "data_source_schemas",
    "ephemeral.": "ephemeral_resource_schemas",
}
_LABELS = {"resource": "", "data": "data.", "ephemeral": "ephemeral."}


class UnknownType(Exception):
    """The tree names types that this version of the provider does not have."""


class BadHcl(Exception):
    """A file that is not HCL."""


def types_used(tree: Path) -> set[str]:
    """ "aws_vpc", "data.aws_region", "ephemeral.aws_x" of every .tf and .tftest.hcl below `tree`."""
    found: set[str] = set()
    for file in sorted(tree.rglob("*.tf")):
        if ".terraform" in file.parts:
            continue
        try:
            parsed = hcl2.loads(file.read_text())
        except LarkError as problem:
            raise BadHcl(f"{file}: {problem}") from problem
        for label, prefix in _LABELS.items():
            for block in parsed.get(label, []):
                names = {name.strip('"') for name in block if not name.startswith("__")}
                found |= {prefix + name for name in names if name.startswith("aws_")}
    return found


def schema(types: Iterable[str], source: Path | None = None) -> dict[str, Any]:
    """The schema of `types` and of the provider's own block. Kept by the types and this reader's text.

    `source`: the package; None = fetched, or from the cache. Raises `UnknownType` naming all of them.
    """
    wanted = sorted(set(types))
    here = Path(__file__)
    state = [*wanted, package.INTEGRITY, here.read_text(), here.with_name("bindings.py").read_text()]
    key = hashlib.sha256("\n".join(state).encode()).hexdigest()[:24]
    kept = package.CACHE / f"aws-schema-{key}.json"
    if source is None and kept.exists():
        return json.loads(kept.read_text())
    made = _read(wanted, source or package.package_file())
    if source is None:
        part = kept.with_suffix(f".{key[:6]}.part")
        part.write_text(json.dumps(made))
        part.replace(kept)
    return made


def _read(wanted: list[str], source: Path) -> dict[str, Any]:
    folders = {_folder(name): name for name in [*wanted, "provider"]}
    found: dict[str, dict[str, Any]] = {}
    with tarfile.open(source) as archive:
        for member in archive:
            parts = member.name.split("/")  # package/lib/FOLDER/index.js
            if len(parts) != 4 or parts[3] != "index.js" or parts[2] not in folders:
                continue
            content = archive.extractfile(member)
            if content is not None:
                name = folders[parts[2]]
                text = content.read().decode()
                provider = name == "provider"
                found[name] = bindings.provider_block(text) if provider else bindings.block_of(text, name)
            if len(found) == len(folders):
                break
    if missing := sorted(set(folders.values()) - set(found)):
        raise UnknownType(f"hashicorp/aws {package.PROVIDER_VERSION} has no {', '.join(missing)}")
    made: dict[str, Any] = {"provider": {"version": 0, "block": found.pop("provider")}}
    for section in SECTIONS.values():
        made[section] = {}
    for name, block in found.items():
        prefix = next((one for one in ("data.", "ephemeral.") if name.startswith(one)), "")
        made[SECTIONS[prefix]][name.removeprefix(prefix)] = {"version": 0, "block": block}
    return {"format_version": "1.0", "provider_schemas": {ADDRESS: made}}


def _folder(name: str) -> str:
    """ "data.aws_iam_policy" -> "data-aws-iam-policy", "aws_vpc" -> "vpc"."""
    kind, _, type_name = name.rpartition(".")
    plain = type_name.removeprefix("aws_").replace("_", "-")
    return f"{kind}-aws-{plain}" if kind else re.sub("^aws-", "", plain)
