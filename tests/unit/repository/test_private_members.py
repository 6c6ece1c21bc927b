"""How often tests touch private members of what they test. The number only falls."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
TOUCHED_MAX = 355
NAMED_TUPLES = ("_replace", "_asdict", "_fields", "_make")


def touched(source: str) -> list[str]:
    """Return the private members that a source takes of others: not of self, of cls or of a base class."""
    own = ("self", "cls", "super()")
    return [
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in NAMED_TUPLES
        and ast.unparse(node.value) not in own
    ]


def test_tests_touch_no_more_private_members_than_they_did() -> None:
    count = sum(len(touched(path.read_text(encoding="utf-8"))) for path in TESTS.rglob("*.py"))
    assert count <= TOUCHED_MAX, "ask a public face, or tests/support/inside.py"
    assert count > TOUCHED_MAX - 10, f"lower TOUCHED_MAX to {count}"


def test_a_private_member_is_found() -> None:
    text = "self._a\ncls._b\nsuper()._c\nnode._d\nself.node._e\nmade()._f\nx.__dict__\nt._replace()"
    assert sorted(touched(text)) == ["_d", "_e", "_f"]
