"""The console script: checks where our packages are imported from, then calls `samovar.cluster.cli.main`.

Samovar's packages have common names (configs, cache_tiers, replicas, router, cluster). If another
distribution, or a folder on the path, has one of them too, Python silently mixes the two. So `shadowed`
checks the origin of each name before any of our packages is imported. This module imports nothing of
Samovar and nothing slow.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path

PACKAGES = ("configs", "cache_tiers", "replicas", "router", "cluster")
EXIT_LAYOUT = 2


def shadowed(home: Path, packages: Iterable[str] = PACKAGES) -> list[str]:
    """Return one sentence for each package that does not come from `home`; empty if all do.

    `home` is the directory of this file: the checkout (also for an editable install) or site-packages,
    where a wheel puts this module beside its packages.
    """
    found = []
    for name in packages:
        ours = home / name
        place = _place(name)
        if place is None:
            found.append(f"package `{name}` is missing, it should be at {ours}")
        elif place != ours.resolve():
            found.append(f"package `{name}` comes from {place}, ours is at {ours}")
    return found


def overwritten(home: Path, packages: Iterable[str] = PACKAGES) -> list[str]:
    """Return one sentence for each package with a `.py` file that differs from the one in our wheel.

    In site-packages a foreign distribution with the same package name is installed into the same directory,
    over our files. The wheel's checksum record shows this. Every file is checked, because an empty
    `__init__.py` is the same everywhere. A checkout has no record.
    """
    try:
        files = metadata.distribution("samovar").files or []
    except metadata.PackageNotFoundError:
        return []
    wanted, site = set(packages), home.resolve()
    found: dict[str, str] = {}
    for file in files:
        name = file.parts[0]
        if name not in wanted or name in found or file.suffix != ".py" or file.hash is None:
            continue
        path = Path(str(file.locate()))
        if path.parents[len(file.parts) - 1].resolve() != site:
            continue  # the record belongs to another installation
        digest = hashlib.new(file.hash.mode, path.read_bytes()).digest() if path.is_file() else b""
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            owners = metadata.packages_distributions().get(name, [])
            others = ", ".join(sorted(set(owners) - {"samovar"})) or "another program"
            found[name] = (
                f"package `{name}` at {site / name} was overwritten by {others}: "
                f"{file} is {'not ours' if path.is_file() else 'missing'}"
            )
    return list(found.values())


def _place(name: str) -> Path | None:
    """Return the file or directory that `import name` would use, or None."""
    try:
        spec: ModuleSpec | None = importlib.util.find_spec(name)
    except ValueError:  # already imported, without a known origin
        return None
    if spec is None:
        return None
    if spec.origin is not None and spec.has_location:
        origin = Path(spec.origin).resolve()
        return origin.parent if origin.name == "__init__.py" else origin
    # A directory without `__init__.py` is a namespace package of one or more directories.
    return next((Path(part).resolve() for part in spec.submodule_search_locations or ()), None)


def main() -> None:
    """Run the `samovar` command. Exits with 2 if a foreign package shadows one of ours."""
    home = Path(__file__).resolve().parent
    if problems := shadowed(home) + overwritten(home):
        lines = [f"samovar: {problem}" for problem in problems]
        lines += [
            "Python would mix two programs, so Samovar does not start. To fix it: leave the foreign folder",
            "out of PYTHONPATH (and do not start from inside it), or uninstall the package that brought it",
            "and install Samovar again, best into a virtual environment of its own: `make setup`.",
        ]
        print("\n".join(lines), file=sys.stderr)
        raise SystemExit(EXIT_LAYOUT)

    from samovar.cluster.cli.main import app

    app(prog_name="samovar")


if __name__ == "__main__":
    main()
