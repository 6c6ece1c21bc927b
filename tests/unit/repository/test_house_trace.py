"""Roads do not grow: what a reader of a request passes is at most `BOUNDS`, which only fall."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import threading
from pathlib import Path

from samovar.configs.model_reference import hub_model
from tests.house_trace import BOUNDS, ROADS, Size, imports_of, passed, size, too_long

ROOT = Path(__file__).resolve().parents[3]


def test_no_road_grows() -> None:
    """In a process of its own, whose caches and imports no other test has filled."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.house_trace", "--json"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TESTS_OTHER_CPU"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = {name: Size(*one) for name, one in json.loads(done.stdout).items()}
    assert sizes.keys() == ROADS.keys() == BOUNDS.keys()
    assert too_long(sizes) == [], "shorten it: `python -m tests.house_trace`"
    assert all(one.files > 30 for one in sizes.values()), "a road that is not run is short"


def test_one_more_file_or_function_is_too_long() -> None:
    name, bound = "a pool hit, to the first token", BOUNDS["a pool hit, to the first token"]
    assert too_long(BOUNDS) == []
    for longer in (bound._replace(files=bound.files + 1), bound._replace(functions=bound.functions + 1)):
        (complaint,) = too_long({**BOUNDS, name: longer})
        assert complaint.startswith(f"{name}: {longer.files} files and {longer.functions} functions")


def test_a_call_and_an_import_are_counted_in_every_thread() -> None:
    with passed() as seen:
        hub_model(None)
        thread = threading.Thread(target=runpy.run_path, args=(str(ROOT / "samovar/configs/imports.py"),))
        thread.start()
        thread.join()
    names = {(Path(file).name, name) for file, name in seen}
    assert {("model_reference.py", "hub_model"), ("imports.py", "<module>")} <= names
    assert size(seen).files == 2


def test_an_import_within_a_function_counts_also_where_it_was_made_before() -> None:
    made = compile("def f():\n    import json\n    from samovar.configs.loader import load\n", "f.py", "exec")
    inner = next(const for const in made.co_consts if hasattr(const, "co_name"))
    assert imports_of(inner) == ["samovar.configs.loader"]
    assert imports_of(compile("import samovar.configs.fields\n", "f.py", "exec")) == []
