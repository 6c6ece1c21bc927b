"""One generated binding (index.js) -> one block of a provider schema. Pure.

The bindings are generated from the provider's own schema, so the shape is regular: one class a block,
a comment `// name - computed: x, optional: y, required: z` before each member, and a table of the HCL
types. Lost on the way, because the generator dropped it: max_items above 1, deprecations, and what is
sensitive (the few that matter to us are in SENSITIVE).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Json = dict[str, Any]

_CLASS = re.compile(r"^class (\w+) extends cdktn\.(\w+)", re.M)
_MEMBER = re.compile(
    r"^ *// (\w+) - computed: (true|false), optional: (true|false), required: (true|false)$", re.M
)
_NESTED = re.compile(r'= new (cdktn\.)?(\w+)\(this, "\w+"(?:, (true|false))?\)')
_GETTER = re.compile(r"(Fn\.tolist\()?this\.get(\w+)Attribute\('")
_HCL = re.compile(
    r"^ +(\w+): \{\n +value: (.*),\n +isBlock: (true|false),\n"
    r" +type: \"(\w+)\",\n +storageClassType: \"(\w+)\"",
    re.M,
)
_FUNCTION = re.compile(r"^function (\w+)ToHclTerraform\(", re.M)

_SCALARS = {"String": "string", "Number": "number", "Boolean": "bool"}

SENSITIVE = {
    ("aws_ssm_parameter", "value"),
    ("aws_ssm_parameter", "value_wo"),
    ("data.aws_ssm_parameter", "value"),
    ("data.aws_secretsmanager_secret_version", "secret_string"),
    ("aws_secretsmanager_secret_version", "secret_string"),
    ("aws_secretsmanager_secret_version", "secret_string_wo"),
    ("aws_iam_access_key", "secret"),
}
"""(type, attribute) the real provider marks sensitive; the bindings do not say."""


class UnknownShape(Exception):
    """The binding does not look as this reader expects: the package must have changed."""


class _Row(NamedTuple):
    """A line of the table of HCL types."""

    kind: str  # simple, list, set, map, struct
    storage: str  # string, stringMap, SubnetTimeouts, ...
    is_block: bool
    write_only: bool


_NO_ROW = _Row("", "", False, False)


@dataclass(slots=True)
class _Class:
    """A class of the binding: what it extends, the arguments to `super`, its members in order."""

    name: str
    kind: str
    text: str
    hcl: dict[str, _Row] = field(default_factory=dict)


def block_of(source: str, type_name: str) -> Json:
    """The schema block of `type_name` ("aws_vpc", "data.aws_region", "ephemeral.aws_x").

    `source`: the binding's index.js. Returns what `terraform providers schema -json` has under "block".
    Raises `UnknownShape` with the member that could not be read.
    """
    classes = _classes(source)
    mains = [one for one in classes.values() if one.kind.startswith("Terraform")]
    if len(mains) != 1:
        raise UnknownShape(f"{type_name}: {len(mains)} main classes")
    block = _block(mains[0], classes)
    for name, attribute in block["attributes"].items():
        if (type_name, name) in SENSITIVE:
            attribute["sensitive"] = True
    return block


def provider_block(source: str) -> Json:
    """The block of `provider "aws" {}`. Its binding has no classes for what is nested, only the tables,
    so nothing is known to be required there.
    """
    tables = _tables(source)

    def block(table: dict[str, _Row]) -> Json:
        made: Json = {"attributes": {}, "block_types": {}}
        for name, row in table.items():
            if row.is_block:
                inner = block(tables[row.storage.removesuffix("List")])
                made["block_types"][name] = {"nesting_mode": row.kind, "block": inner}
            elif shape := re.fullmatch(r"(string|number|boolean)(List|Map)?", row.storage):
                scalar = _SCALARS[shape[1].capitalize()]
                kind: Any = [row.kind, scalar] if shape[2] else scalar
                made["attributes"][name] = {"type": kind, "optional": True}
            else:
                raise UnknownShape(f"provider.{name}: {row.kind} of {row.storage}")
        return made

    main = block(_own_table(source))
    main["attributes"].pop("alias", None)  # Terraform's own, not of the schema
    return main


def _classes(source: str) -> dict[str, _Class]:
    starts = [*_CLASS.finditer(source)]
    ends = [one.start() for one in starts[1:]] + [len(source)]
    found = {
        one[1]: _Class(one[1], one[2], source[one.start() : end])
        for one, end in zip(starts, ends, strict=True)
    }
    for name, table in _tables(source).items():
        if f"{name}OutputReference" in found:
            found[f"{name}OutputReference"].hcl = table
    for one_class in found.values():
        if one_class.kind.startswith("Terraform"):
            one_class.hcl = _own_table(one_class.text)
    return found


def _tables(source: str) -> dict[str, dict[str, _Row]]:
    """The table of each nested block, by the name of its structure."""
    return {
        one[1][0].upper() + one[1][1:]: _table(source[one.start() : source.index("\n}\n", one.start())])
        for one in _FUNCTION.finditer(source)
    }


def _own_table(text: str) -> dict[str, _Row]:
    return _table(text[text.index("synthesizeHclAttributes()") :])


def _table(text: str) -> dict[str, _Row]:
    return {
        one[1]: _Row(one[4], one[5], one[3] == "true", "markWriteOnlyAttribute" in one[2])
        for one in _HCL.finditer(text)
    }


def _block(one: _Class, classes: dict[str, _Class]) -> Json:
    block: Json = {"attributes": {}, "block_types": {}}
    for name, flags, text in _members(one):
        nested = _NESTED.search(text)
        if nested and not nested[1] and not flags["computed"]:
            block["block_types"][name] = _block_type(one, name, nested, flags, classes)
            continue
        attribute: Json = {"type": _type(name, text, classes)}
        attribute.update({flag: True for flag, value in flags.items() if value})
        if one.hcl.get(name, _NO_ROW).write_only:
            attribute["write_only"] = True
        block["attributes"][name] = attribute
    return block


def _members(one: _Class) -> list[tuple[str, dict[str, bool], str]]:
    found = [*_MEMBER.finditer(one.text)]
    ends = [member.start() for member in found[1:]] + [len(one.text)] * bool(found)
    return [
        (
            member[1],
            {
                "computed": member[2] == "true",
                "optional": member[3] == "true",
                "required": member[4] == "true",
            },
            one.text[member.end() : end],
        )
        for member, end in zip(found, ends, strict=True)
    ]


def _block_type(
    one: _Class, name: str, nested: re.Match[str], flags: dict[str, bool], classes: dict[str, _Class]
) -> Json:
    inner, many = _inner(nested[2], classes)
    kind = one.hcl.get(name, _NO_ROW).kind or ("set" if nested[3] == "true" else "list")
    if kind == "struct":
        mode: Json = {"nesting_mode": "single"}
    elif kind in ("list", "set"):
        mode = {"nesting_mode": kind}
    else:
        raise UnknownShape(f"{one.name}.{name}: a block of type {kind}")
    if kind != "struct":
        if flags["required"]:
            mode["min_items"] = 1
        if not many:
            mode["max_items"] = 1
    return {**mode, "block": _block(inner, classes)}


def _inner(name: str, classes: dict[str, _Class]) -> tuple[_Class, bool]:
    """The class of the elements, and whether there may be many."""
    many = name.endswith("List")
    inner = f"{name.removesuffix('List')}OutputReference" if many else name
    if inner not in classes:
        raise UnknownShape(f"no class {inner}")
    return classes[inner], many


def _type(name: str, text: str, classes: dict[str, _Class]) -> Any:
    """A type as Terraform's JSON writes it: "string", ["list", ["object", {...}]]."""
    if nested := _NESTED.search(text):
        if nested[1]:
            plain = re.fullmatch(r"(String|Number|Boolean)Map(List)?", nested[2])
            if not plain:
                raise UnknownShape(f"{name}: cdktn.{nested[2]}")
            mapped = ["map", _SCALARS[plain[1]]]
            return ["set" if nested[3] == "true" else "list", mapped] if plain[2] else mapped
        inner, _ = _inner(nested[2], classes)
        members = {member: _type(member, body, classes) for member, _, body in _members(inner)}
        return ["set" if nested[3] == "true" else "list", ["object", members]]
    getter = _GETTER.search(text)
    if not getter:
        raise UnknownShape(f"{name}: no getter")
    kind = getter[2]
    if kind in _SCALARS:
        return _SCALARS[kind]
    if kind == "List":
        return ["set" if getter[1] else "list", "string"]
    if shape := re.fullmatch(r"(String|Number|Boolean)(List|Map)", kind):
        outer = "map" if shape[2] == "Map" else ("set" if getter[1] else "list")
        return [outer, _SCALARS[shape[1]]]
    raise UnknownShape(f"{name}: get{kind}Attribute")
