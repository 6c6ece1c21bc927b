"""The console script: makes sure that our packages are ours, then hands over to `cluster.cli.main`.

Samovar's packages have common names (configs, cache_tiers, replicas, router, cluster). Another
distribution, or a folder on the path, may have one of them too, and Python would silently mix
the two. So before anything of ours is imported, `shadowed` looks where each name leads. This
module imports nothing of Samovar and nothing that is slow; it does not know what the commands do.
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
    """One sentence for each package that does not come from `home`; empty when all is well.

    `home` is the directory this file lies in: the checkout (also when it is installed editable)
    or site-packages, where a wheel puts this module beside its packages.
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
    """One sentence for each package with a `.py` file that is not the one that our wheel brought.

    In site-packages a foreign distribution with the same package name lands in the very same
    directory, on top of ours. The wheel's record of checksums tells, and every file has to be looked
    at: an empty `__init__.py` is the same everywhere. A checkout has no record.
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
            continue  # the record is that of another installation
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
    """The file or directory that `import name` would take, or None."""
    try:
        spec: ModuleSpec | None = importlib.util.find_spec(name)
    except ValueError:  # it is imported already, but without saying from where
        return None
    if spec is None:
        return None
    if spec.origin is not None and spec.has_location:
        origin = Path(spec.origin).resolve()
        return origin.parent if origin.name == "__init__.py" else origin
    # A directory without `__init__.py`: a namespace package, made of one directory or more.
    return next((Path(part).resolve() for part in spec.submodule_search_locations or ()), None)


def main() -> None:
    """Run the `samovar` command. Exits with 2 when a foreign package shadows one of ours."""
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

    from cluster.cli.main import app

    app(prog_name="samovar")


if __name__ == "__main__":
    main()
