"""Measure the house: `python -m tests.house [ROOT]` prints its folders, their sizes and arrows.

`tests/unit/repository/test_house_imports.py` holds the laws, by the same functions. ROOT: another checkout.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("configs", "cache_tiers", "replicas", "router", "cluster")
"""In the order in which they may import each other."""
WINGS = ("router.context", "router.observe", "cluster.plan")
"""Folders of rooms: optional parts of the product."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def sources(root: Path = ROOT) -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((root / package).rglob("*.py"))


def module_of(path: Path, root: Path) -> str:
    """`cache_tiers.node.store`; of a face the folder's own name."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str, root: Path) -> str:
    """The folder a module lies in, or the module itself where it lies in a package's top folder.

    What lies deeper is of the same room, but for the rooms that a `WINGS` folder has.
    """
    parts = module.split(".")
    wing = ".".join(parts[:2])
    if wing in WINGS and (root / "/".join(parts[:3])).is_dir():
        return ".".join(parts[:3])
    return wing if len(parts) > 1 else module


def has_face(room: str, root: Path) -> bool:
    """Whether a room says what others may import; else its modules are imported one by one."""
    face = root / room.replace(".", "/") / "__init__.py"
    return face.exists() and "__all__" in face.read_text(encoding="utf-8")


def imports(tree: ast.AST) -> Iterator[tuple[int, str, list[str]]]:
    """Line, module and the names taken from it, of every import, those inside functions included.

    Ours are named as their folders are, without `samovar.`.
    """
    for line, module, names in _imports(tree):
        if module == "samovar":  # `from samovar import configs`
            yield from ((line, name, []) for name in names if name in PACKAGES)
        else:
            yield line, module.removeprefix("samovar."), names


def _imports(tree: ast.AST) -> Iterator[tuple[int, str, list[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and dotted(node.func) in {"importlib.import_module", "__import__"}:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value, []


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imported(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Line and name of every module of ours that a file imports."""
    for line, module, names in imports(tree_of(path)):
        if module.split(".")[0] in PACKAGES:
            for name in names or [""]:
                place = root / f"{module}.{name}".replace(".", "/")
                is_module = name and (place.with_suffix(".py").exists() or place.is_dir())
                yield line, f"{module}.{name}" if is_module else module


def arrows(root: Path = ROOT) -> dict[str, set[str]]:
    """Room -> the rooms of the same package that it imports from."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sources(root):
        if path.name == "__init__.py" and path.parent.parent == root:
            continue
        here = room_of(module_of(path, root), root)
        for _, name in imported(path, root):
            there = room_of(name, root)
            if there != here and there.split(".")[0] == here.split(".")[0] and "." in there:
                found[here].add(there)
    return dict(found)


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Rooms that import each other, whatever way round; one path for each circle that is met."""
    done: set[str] = set()
    found: list[list[str]] = []

    def visit(room: str, path: list[str]) -> None:
        if room in path:
            found.append([*path[path.index(room) :], room])
        elif room not in done:
            for other in sorted(graph.get(room, ())):
                visit(other, [*path, room])
            done.add(room)

    for room in sorted(graph):
        visit(room, [])
    return found


def past_faces(path: Path, root: Path = ROOT) -> list[str]:
    """`file:line` of each import from a module in another folder, past its face; `cluster` has no faces.

    A module that is used as a whole stands for itself: `from cache_tiers.media import files`.
    """
    here = room_of(module_of(path, root), root)
    found = []
    for line, name, _ in imports(tree_of(path)):
        is_ours = name.split(".")[0] in PACKAGES and not name.startswith("cluster.")
        there = room_of(name, root)
        if is_ours and name.count(".") > there.count(".") and there != here and has_face(there, root):
            found.append(f"{path.name}:{line}: imports {name}, not {there}")
    return found


def constructors(path: Path) -> Iterator[tuple[str, int]]:
    """Classes and how many parameters their `__init__` has."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    given = method.args
                    yield node.name, len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1


def class_sizes(path: Path) -> Iterator[tuple[str, int, int]]:
    """Classes, their lines, and how many public methods and properties they have."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef):
            methods = [
                one.name for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))
            ]
            public = sum(not name.startswith("_") for name in set(methods))
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1, public


def argument_tuples(path: Path) -> list[int]:
    """Lines of calls with `*(a, b)` among their arguments."""
    return [
        call.lineno
        for call in ast.walk(tree_of(path))
        if isinstance(call, ast.Call)
        for argument in call.args
        if isinstance(argument, ast.Starred) and isinstance(argument.value, (ast.Tuple, ast.List))
    ]


def classes_of_one_name(root: Path = ROOT) -> dict[str, list[str]]:
    """Public class names that stand for several things, and where."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources(root):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(root)))
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def importers(root: Path = ROOT) -> dict[str, set[str]]:
    """Module -> the modules that import it, itself or by its folder's face."""
    home: dict[tuple[str, str], str] = {}
    for path in sources(root):
        if path.name == "__init__.py":
            for _, module, names in imports(tree_of(path)):
                home |= {(module_of(path, root), name): module for name in names}
    found: dict[str, set[str]] = defaultdict(set)
    for path in sources(root):
        if path.name == "__init__.py":
            continue
        here = module_of(path, root)
        for _, module, names in imports(tree_of(path)):
            for name in names:
                found[home.get((module, name), module)].add(here)
        for _, name in imported(path, root):
            found[name].add(here)
    return found


def of_one_importer(root: Path = ROOT) -> list[str]:
    """Files that one other imports: satellites, leaves of a composition root, what is imported lazily."""
    known = importers(root)
    return [
        str(path.relative_to(root))
        for path in sources(root)
        if path.name != "__init__.py" and len(known.get(module_of(path, root), ())) == 1
    ]


def diagram(package: str, root: Path = ROOT) -> str:
    """The arrows between a package's folders, as Mermaid; files of its top folder are left out."""
    graph = {
        here: {there for there in others if (root / there.replace(".", "/")).is_dir()}
        for here, others in arrows(root).items()
        if here.startswith(f"{package}.") and (root / here.replace(".", "/")).is_dir()
    }
    lines = [
        f"    {here.partition('.')[2]} --> {there.partition('.')[2]}"
        for here in sorted(graph)
        for there in sorted(graph[here])
    ]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])


def folders(root: Path = ROOT) -> dict[str, list[Path]]:
    """Folder -> its modules, faces left out."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sources(root):
        if path.name != "__init__.py":
            found[str(path.parent.relative_to(root))].append(path)
    return dict(found)


def main(root: Path) -> None:
    console = Console(width=110)
    modules = [path for path in sources(root) if path.name != "__init__.py"]
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(root)}
    wide = [name for path in modules for name, count in constructors(path) if count > 8]
    rows = {
        "files": len(modules),
        "lines": sum(lines.values()),
        "folders": len(folders(root)),
        "files in the largest folder": max(Counter(path.parent for path in modules).values()),
        "files with one importer": len(of_one_importer(root)),
        "class names used twice": len(classes_of_one_name(root)),
        "constructors with more than 8 parameters": len(wide),
        "argument tuples": sum(len(argument_tuples(path)) for path in modules),
        "circles between folders": len(circles(arrows(root))),
    }
    table = Table("the house", "", title=str(root))
    for what, count in rows.items():
        table.add_row(what, f"{count:,}")
    console.print(table)
    table = Table("folder", "files", "lines", "largest file")
    for folder, paths in folders(root).items():
        largest = max(paths, key=lambda path: lines[path])
        total = sum(lines[path] for path in paths)
        table.add_row(folder, str(len(paths)), f"{total:,}", f"{largest.name} {lines[largest]}")
    console.print(table)
    for package in PACKAGES[1:]:
        console.print(f"{package}\n{diagram(package, root)}", markup=False, highlight=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)
