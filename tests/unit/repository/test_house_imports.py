"""The laws of the house, read from the source: one-way imports, faces, sizes, no execution of data."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests import house
from tests.house import PACKAGES as ORDER
from tests.house import ROOT, dotted, imports, sources

FILE_LINES_MAX = 900
CLASS_LINES_MAX, PUBLIC_METHODS_MAX = 300, 20
LARGE = {
    "CallText": (317, 2),
    "Catalog": (415, 26),
    "DocumentShelf": (485, 11),
    "KnowledgeBase": (409, 18),
    "KnowledgeStore": (158, 31),
    "LearningLoop": (330, 10),
    "NodeStores": (374, 11),
    "NvmeTier": (392, 18),
    "PostgresStore": (434, 31),
    "Prefetcher": (313, 13),
    "PromptBuilder": (410, 12),
    "Replica": (375, 19),
    "S3Tier": (335, 18),
    "Sim": (312, 3),
    "SqliteStore": (502, 31),
    "Tier": (131, 23),  # with what a bucket marks as erased
    "TierNode": (269, 21),
}
"""Classes that are larger still: lines, public methods. This list only shrinks."""
FOLDER_FILES_MAX = 12
ONE_IMPORTER_MAX = 71
"""Files that one other imports. This only falls: a small one about its importer's noun goes into it."""
PARAMETERS_MAX = 8
WIDE = {"SimTier": 9}
"""Constructors that are wider still. This list only shrinks."""
# What executes the bytes it is given. `torch.load` counts with any argument: the rule is "never".
BANNED_CALLS = {
    *(
        f"{module}.{name}"
        for module in ("pickle", "cPickle", "marshal", "dill", "cloudpickle")
        for name in ("load", "loads")
    ),
    *("pickle.Unpickler", "torch.load", "torch.jit.load", "numpy.load", "np.load", "joblib.load"),
    *("eval", "exec", "compile", "yaml.load", "yaml.unsafe_load", "yaml.full_load"),
}
BANNED_MODULES = {"pickle", "cPickle", "marshal", "dill", "cloudpickle", "shelve", "joblib"}

SPELT = {
    "cache_tiers/blocks/tiers.py",
    "cache_tiers/media/s3_client.py",  # boto's name of the service
    "cluster/doctor/doctor.py",  # a check's
    "cluster/serve/rollout.py",  # a section's
    "cluster/serve/s3_demo.py",  # rclone's, and a section's
    "configs/extras.py",  # an extra's
    "configs/sections.py",
}
"""Files that spell a tier's name; all others ask its kind (`cache_tiers/blocks/tiers.py`). Only shrinks."""


def aliases(tree: ast.AST) -> dict[str, str]:
    """Local names of imported things: `from torch import load as x` gives x -> torch.load."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def back_arrows(path: Path, package: str) -> list[str]:
    """`file:line` and the import, for each import of a package that stands later in the order."""
    later = ORDER[ORDER.index(package) + 1 :]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        f"{path}:{line}: {package} must not import {name}"
        for line, name, _ in imports(tree)
        if name.split(".")[0] in later
    ]


def executes_data(path: Path) -> list[str]:
    """`file:line` for each call or import that can turn data into code."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = aliases(tree)
    found = [
        f"{path}:{line}: imports {name}"
        for line, name, _ in imports(tree)
        if name.split(".")[0] in BANNED_MODULES
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            head, dot, rest = dotted(node.func).partition(".")
            name = names.get(head, head) + dot + rest
            if name in BANNED_CALLS:
                found.append(f"{path}:{node.lineno}: calls {name}")
    return found


def too_long(path: Path) -> list[str]:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    return [f"{path}: {lines} lines, at most {FILE_LINES_MAX}"] if lines > FILE_LINES_MAX else []


def test_classes_hold_one_noun_each() -> None:
    found = {
        name: (lines, methods)
        for path in sources()
        for name, lines, methods in house.class_sizes(path)
        if lines > CLASS_LINES_MAX or methods > PUBLIC_METHODS_MAX
    }
    grown = {name: size for name, size in found.items() if size > LARGE.get(name, (0, 0))}
    assert not grown, "larger than they were, or new: cut them by noun"
    assert found.keys() == LARGE.keys(), "small now: take them off the list"


def spells_a_tier(path: Path) -> bool:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return any(isinstance(node, ast.Constant) and node.value in ("nvme", "s3") for node in nodes)


def test_a_tier_is_a_kind_not_a_name() -> None:
    assert {str(path.relative_to(ROOT)) for path in sources() if spells_a_tier(path)} == SPELT


def test_the_rooms_are_all_there() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in sources()} == set(ORDER)


def test_imports_go_one_way() -> None:
    found = [arrow for path in sources() for arrow in back_arrows(path, path.relative_to(ROOT).parts[0])]
    assert not found, "\n".join(found)


@pytest.mark.guarantee("F12")
def test_nothing_that_is_read_is_executed() -> None:
    found = [line for path in sources() for line in executes_data(path)]
    assert not found, "\n".join(found)


def test_folders_do_not_import_each_other_in_circles() -> None:
    assert house.circles(house.arrows()) == []


def test_others_import_from_a_folders_face() -> None:
    assert [line for path in sources() for line in house.past_faces(path)] == []


def test_every_folder_says_what_it_is_for_and_is_not_crowded() -> None:
    for folder, paths in house.folders().items():
        assert ast.get_docstring(house.tree_of(ROOT / folder / "__init__.py")), folder
        assert len(paths) <= FOLDER_FILES_MAX, folder


def test_satellites_do_not_come_back() -> None:
    assert len(house.of_one_importer()) <= ONE_IMPORTER_MAX, "`python -m tests.house` counts them"


def test_constructors_do_not_grow_wide() -> None:
    found = {
        name: count
        for path in sources()
        for name, count in house.constructors(path)
        if count > PARAMETERS_MAX
    }
    assert found == WIDE


def test_no_function_rebinds_a_global() -> None:
    found = [
        path for path in sources() for node in ast.walk(house.tree_of(path)) if isinstance(node, ast.Global)
    ]
    assert found == []


def test_a_class_name_stands_for_one_thing() -> None:
    assert house.classes_of_one_name() == {}


def test_arguments_are_written_out() -> None:
    assert {path: lines for path in sources() if (lines := house.argument_tuples(path))} == {}


@pytest.mark.parametrize(
    "name", ["replicas.messages", "cluster.plan.simulator.sim", "cluster.plan.plan", "cluster.launch.up"]
)
def test_what_a_command_imports_is_light(name: str) -> None:
    """Faces import their whole folder, so they leave out what would bring one of these."""
    heavy = ("torch", "ray", "transformers", "boto3", "matplotlib")
    code = f"import sys, {name}; print([one for one in {heavy} if one in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_planted_faults_of_the_house_are_found(tmp_path: Path) -> None:
    for name in ("router/routing/score", "router/openai/errors", "router/app"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).with_suffix(".py").write_text("")
    score, errors = tmp_path / "router/routing/score.py", tmp_path / "router/openai/errors.py"
    (errors.parent / "__init__.py").write_text("__all__ = []\n")
    score.write_text("from router.openai.errors import ApiError\nfrom router.openai import errors\n")
    errors.write_text("def f():\n    from router.routing import rank\n")
    assert len(house.past_faces(score, tmp_path)) == 1
    assert house.past_faces(errors, tmp_path) == []
    assert house.circles(house.arrows(tmp_path)) == [["router.openai", "router.routing", "router.openai"]]
    assert house.of_one_importer(tmp_path) == ["router/openai/errors.py"]  # `router.routing` is no file
    wide = tmp_path / "wide.py"
    wide.write_text("class A:\n    def __init__(self, a, b, *, c): ...\n\nf(*(1, 2), x)\n")
    assert list(house.constructors(wide)) == [("A", 3)]
    assert house.argument_tuples(wide) == [4]
    score.write_text('def f(tier):\n    return tier != "nvme"\n')
    assert spells_a_tier(score)
    assert not spells_a_tier(wide)


def test_files_stay_small() -> None:
    found = [line for path in sources() for line in too_long(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("package", "code", "line"),
    [
        ("configs", "import replicas.engine.engine\n", 1),
        ("replicas", "import os\ndef f():\n    from router.routing.score import Ring\n", 3),
        ("router", "import typing\nif typing.TYPE_CHECKING:\n    import cluster\n", 3),
        ("cache_tiers", "import importlib\nimportlib.import_module('cluster.serve.app')\n", 2),
        ("configs", "from cache_tiers import block\n", 1),
    ],
)
def test_a_planted_back_arrow_is_found(tmp_path: Path, package: str, code: str, line: int) -> None:
    path = tmp_path / "planted.py"
    path.write_text(code)
    (found,) = back_arrows(path, package)
    assert found.startswith(f"{path}:{line}: {package} must not import ")


def test_an_arrow_forward_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "fine.py"
    path.write_text(
        "import os, replicas.engine.engine\nfrom configs import settings\nfrom . import sibling\n"
    )
    assert back_arrows(path, "router") == []


@pytest.mark.guarantee("F12")
@pytest.mark.parametrize(
    "code",
    [
        "import pickle\n",
        "import torch\ntorch.load('x')\n",
        "from torch import load as fetch\nfetch('x')\n",
        "import torch as t\nt.load('x')\n",
        "def f(x):\n    return eval(x)\n",
        "from marshal import loads\n",
        "import yaml\nyaml.load(x, Loader=yaml.Loader)\n",
    ],
)
def test_planted_execution_of_data_is_found(tmp_path: Path, code: str) -> None:
    path = tmp_path / "planted.py"
    path.write_text(code)
    assert executes_data(path)


def test_a_method_named_eval_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "fine.py"
    path.write_text("model.eval()\nimport re\nre.compile('x')\ntorch.compile(f)\n")
    assert executes_data(path) == []


def test_planted_long_code_is_found(tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text("x = 1\n" * (FILE_LINES_MAX + 1))
    assert len(too_long(path)) == 1
