"""Names of tests say what they state: codes are those of guarantees and faults, which `make prove` reads."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
CODE = re.compile(r"(?:^|_)(?:[psd]\d+)(?:_|$)|^Test[A-Z]\d+")
OF_S3 = "s3"  # a tier's name, too


def coded(source: str) -> list[str]:
    """Return the names of tests and test classes with a code of an audit."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, Definition)]
    names = [node.name for node in found if node.name.startswith(("test_", "Test"))]
    return [name for name in names if CODE.search(name.removeprefix("test_").replace(OF_S3, "bucket"))]


Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def test_tests_and_their_files_have_no_codes_of_audits() -> None:
    files = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")}
    found = {str(path.relative_to(TESTS)): coded(text) for path, text in files.items()}
    found |= {path.name: coded(f"def {path.stem}(): ...") for path in files if CODE.search(path.stem[5:])}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_code_is_found() -> None:
    text = (
        "def test_s15_small(): ...\nclass TestF37: ...\ndef test_g13_s10_bad(): ...\ndef test_s3_is_on(): ..."
    )
    assert coded(text + "\ndef test_f18_a_mover(): ...") == ["test_s15_small", "TestF37", "test_g13_s10_bad"]
