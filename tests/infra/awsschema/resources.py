"""What a resource becomes at plan and at apply: configured values kept, computed ones unknown, then made up.

Over values decoded from Terraform's msgpack. It knows no wire and no AWS rule (enums, conflicts).
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Any

import msgpack

from tests.infra.awsschema import values

Block = dict[str, Any]
Object = dict[str, Any]
UNKNOWN = msgpack.ExtType(0, b"\x00")
"""As Terraform writes a value not known yet; it may also send refined ones (type 12)."""


def decode(data: bytes) -> Any:
    """None for a null object. Raises msgpack's errors on other bytes."""
    return msgpack.unpackb(data, raw=False, strict_map_key=False) if data else None


def encode(value: Any) -> bytes:
    """The inverse of `decode`; unknown values stay unknown."""
    return msgpack.packb(value)


def is_unknown(value: Any) -> bool:
    """Whether the value as a whole is unknown; parts of a known one still may be."""
    return isinstance(value, msgpack.ExtType)


@dataclass(frozen=True, slots=True)
class Resources:
    """`place` and `default_tags` are as the provider block configured them."""

    place: values.Place = field(default_factory=values.Place)
    default_tags: Object = field(default_factory=dict)

    def plan(self, block: Block, prior: Object | None, proposed: Object | None) -> Object | None:
        """The planned state. `proposed` None: destroyed; `prior` None: created."""
        if proposed is None:
            return None
        planned = _without_write_only(block, proposed)
        self._fill_known(block, planned)
        return planned if planned == prior else _unknown_where_computed(block, planned)

    def _fill_known(self, block: Block, planned: Object) -> None:
        attributes = block["attributes"]
        if "region" in attributes and planned.get("region") is None:
            planned["region"] = self.place.region
        if "tags_all" in attributes:
            tags = planned.get("tags")
            planned["tags_all"] = UNKNOWN if is_unknown(tags) else {**self.default_tags, **(tags or {})}

    def apply(self, type_name: str, block: Block, planned: Object | None) -> Object | None:
        """The new state: as planned, with every unknown value made up."""
        return None if planned is None else self._completed(type_name, block, planned, secrets.token_hex(16))

    def read(self, type_name: str, block: Block, config: Object, known: Object) -> Object:
        """The state of a data source: `known` wins over what is made up, the same for the same `config`."""
        digits = hashlib.sha256(type_name.encode() + encode(config)).hexdigest()[:32]
        return self._completed(type_name, block, _unknown_where_computed(block, {**config, **known}), digits)

    def _completed(self, type_name: str, block: Block, value: Object, digits: str) -> Object:
        """`value` with no unknown left in it."""
        attributes = block["attributes"]
        wanted = {name: attributes[name]["type"] for name in attributes if is_unknown(value.get(name))}
        known = {name: one for name, one in value.items() if name not in wanted}
        made = {**value, **values.complete(type_name, known, wanted, self.place, digits)}
        for name, nested in block["block_types"].items():
            made[name] = _each(
                made.get(name), lambda one, of=nested: self._completed("", of["block"], one, digits)
            )
        return {name: _settled(one) for name, one in made.items()}


def unconfigurable(block: Block, config: Object, path: str = "") -> list[str]:
    """Attributes only AWS may set that `config` sets: "arn", "rule.id". Terraform leaves it to providers."""
    found = []
    for name, attribute in block["attributes"].items():
        ours = attribute.get("optional") or attribute.get("required")
        if not ours and config.get(name) is not None:
            found.append(path + name)
    for name, nested in block["block_types"].items():
        inside = config.get(name)
        for one in inside if isinstance(inside, list) else [inside]:
            if isinstance(one, dict):
                found += unconfigurable(nested["block"], one, f"{path}{name}.")
    return found


def _unknown_where_computed(block: Block, value: Object) -> Object:
    made = dict(value)
    for name, attribute in block["attributes"].items():
        if attribute.get("computed") and made.get(name) is None:
            made[name] = UNKNOWN
    for name, nested in block["block_types"].items():
        made[name] = _each(made.get(name), lambda one, of=nested: _unknown_where_computed(of["block"], one))
    return made


def _without_write_only(block: Block, value: Object) -> Object:
    made = dict(value)
    for name, attribute in block["attributes"].items():
        if attribute.get("write_only"):
            made[name] = None
    for name, nested in block["block_types"].items():
        made[name] = _each(made.get(name), lambda one, of=nested: _without_write_only(of["block"], one))
    return made


def _each(value: Any, change: Any) -> Any:
    """`change` for the one or the many objects of a nested block."""
    if isinstance(value, list):
        return [change(one) if isinstance(one, dict) else one for one in value]
    return change(value) if isinstance(value, dict) else value


def _settled(value: Any) -> Any:
    """Unknown values left inside collections (there is no schema to go by) become text."""
    if is_unknown(value):
        return "made-up"
    if isinstance(value, list):
        return [_settled(one) for one in value]
    return {name: _settled(one) for name, one in value.items()} if isinstance(value, dict) else value
