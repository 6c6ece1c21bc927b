"""Processes that we start, and threads that end with theirs: Python says nothing of its own about them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.house import ROOT, dotted, imports, module_of, sources, tree_of

STREAMS = {"stdin", "stdout", "stderr"}


def is_run_by_name(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body)


def imported_with(package: str, root: Path = ROOT) -> set[str]:
    """All modules of ours that come with the import of a package, its parents included."""
    known = {module_of(path, root): path for path in sources(root)}
    parts = package.split(".")
    waiting = [".".join(parts[: end + 1]) for end in range(len(parts))]
    found: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module in found or module not in known:
            continue
        found.add(module)
        for node in tree_of(known[module]).body:  # not what functions import later
            for _, name, taken in (
                imports(node) if not isinstance(node, ast.FunctionDef | ast.ClassDef) else ()
            ):
                parts = name.split(".")
                waiting += [".".join(parts[: end + 1]) for end in range(len(parts))]
                waiting += [f"{name}.{one}" for one in taken]
    return found


def twice_there(root: Path = ROOT) -> Iterator[str]:
    """Modules that `python -m` would run a second time: their package imports them."""
    for path in sources(root):
        module = module_of(path, root)
        if is_run_by_name(tree_of(path)) and module in imported_with(module.rpartition(".")[0], root):
            yield module


def daemon_targets(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """The functions of a file that run on its daemon threads, and those of the file that they call."""
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    waiting = [
        keyword.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and dotted(node.func).endswith("Thread")
        for keyword in node.keywords
        if keyword.arg == "target"
        and any(one.arg == "daemon" and ast.unparse(one.value) == "True" for one in node.keywords)
    ]
    seen: set[str] = set()
    while waiting:
        name = dotted(waiting.pop()).rpartition(".")[2]
        if name not in seen and name in functions:
            seen.add(name)
            yield functions[name]
            waiting += [node.func for node in ast.walk(functions[name]) if isinstance(node, ast.Call)]


def buffered(tree: ast.Module) -> Iterator[str]:
    """Streams that a daemon thread uses through a buffer, whose lock Python needs when it ends."""
    opened = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and dotted(node.func).endswith("Popen")
    ]
    has_buffers = any("bufsize=0" not in ast.unparse(node) for node in opened)
    for function in daemon_targets(tree):
        for node in ast.walk(function):
            is_stream = isinstance(node, ast.Attribute) and node.attr in STREAMS
            if is_stream and (has_buffers or dotted(node).startswith("sys.")):
                yield f"{function.name}: {dotted(node)}"


def test_no_module_that_its_package_imports_is_run_by_name() -> None:
    """Python warns of it, and it is there twice. `python -c` runs a function of it."""
    assert not list(twice_there())


def test_no_daemon_thread_sits_in_a_buffer_when_python_ends() -> None:
    """`Fatal Python error: _enter_buffered_busy`. Use `os.read`, or `Popen(bufsize=0)`."""
    found = {module_of(path, ROOT): list(buffered(tree_of(path))) for path in sources()}
    assert not {module: where for module, where in found.items() if where}


def test_the_laws_see_what_they_are_for(tmp_path: Path) -> None:
    folder = tmp_path / "replicas"
    folder.mkdir()
    (folder / "__init__.py").write_text("from replicas.start import main\n")
    (folder / "start.py").write_text("def main(): ...\nif __name__ == '__main__':\n    main()\n")
    assert list(twice_there(tmp_path)) == ["replicas.start"]
    waits = ast.parse(
        "def wait():\n    sys.stdin.buffer.read()\nthreading.Thread(target=wait, daemon=True).start()\n"
    )
    assert list(buffered(waits)) == ["wait: sys.stdin"]
    log = (
        "class A:\n    def start(self):\n        self.p = subprocess.Popen([], stderr=PIPE{})\n"
        "        threading.Thread(target=self.read, daemon=True).start()\n"
        "    def read(self):\n        for line in self.p.stderr: pass\n"
    )
    assert list(buffered(ast.parse(log.format("")))) == ["read: self.p.stderr"]
    assert not list(buffered(ast.parse(log.format(", bufsize=0"))))
