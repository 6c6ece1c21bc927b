"""The messages of Terraform's plugin protocol 6 that a provider needs, as protobuf classes made at run time.

Field numbers are those of tfplugin6.proto in Terraform's documentation; what we neither read nor write is
left out, as protobuf allows. No protoc is needed.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_DIAGNOSTICS = "*Diagnostic diagnostics"
_VALIDATE = ("string type_name=1; DynamicValue config=2", f"{_DIAGNOSTICS}=1")

_TYPES = {
    "DynamicValue": "bytes msgpack=1; bytes json=2",
    "Diagnostic": "int64 severity=1; string summary=2; string detail=3",
    "AttributePath": "*AttributePath.Step steps=1",
    "AttributePath.Step": "string attribute_name=1",
    "RawState": "bytes json=1",
    "Schema": "int64 version=1; Schema.Block block=2",
    "Schema.Block": "int64 version=1; *Schema.Attribute attributes=2; *Schema.NestedBlock block_types=3",
    "Schema.Attribute": "string name=1; bytes type=2; bool required=4; bool optional=5; bool computed=6; "
    "bool sensitive=7; bool write_only=11",
    "Schema.NestedBlock": "string type_name=1; Schema.Block block=2; int64 nesting=3; int64 min_items=4; "
    "int64 max_items=5",
    "ServerCapabilities": "bool plan_destroy=1; bool get_provider_schema_optional=2",
    "Entry": "string key=1; Schema value=2",  # of a map<string, Schema>: the same bytes
}

_CALLS: dict[str, tuple[str, str]] = {
    "GetProviderSchema": (
        "",
        f"Schema provider=1; *Entry resource_schemas=2; *Entry data_source_schemas=3; {_DIAGNOSTICS}=4; "
        "ServerCapabilities server_capabilities=6; *Entry ephemeral_resource_schemas=8",
    ),
    "ValidateProviderConfig": ("DynamicValue config=1", f"{_DIAGNOSTICS}=2"),
    "ValidateResourceConfig": _VALIDATE,
    "ValidateDataResourceConfig": _VALIDATE,
    "ValidateEphemeralResourceConfig": _VALIDATE,
    "UpgradeResourceState": (
        "string type_name=1; int64 version=2; RawState raw_state=3",
        f"DynamicValue upgraded_state=1; {_DIAGNOSTICS}=2",
    ),
    "GetResourceIdentitySchemas": ("", f"{_DIAGNOSTICS}=2"),
    "ConfigureProvider": ("string terraform_version=1; DynamicValue config=2", f"{_DIAGNOSTICS}=1"),
    "ReadResource": (
        "string type_name=1; DynamicValue current_state=2; bytes private=3",
        f"DynamicValue new_state=1; {_DIAGNOSTICS}=2; bytes private=3",
    ),
    "PlanResourceChange": (
        "string type_name=1; DynamicValue prior_state=2; DynamicValue proposed_new_state=3; "
        "DynamicValue config=4; bytes prior_private=5",
        f"DynamicValue planned_state=1; *AttributePath requires_replace=2; bytes planned_private=3; "
        f"{_DIAGNOSTICS}=4; bool legacy_type_system=5",
    ),
    "ApplyResourceChange": (
        "string type_name=1; DynamicValue prior_state=2; DynamicValue planned_state=3; "
        "DynamicValue config=4; bytes planned_private=5",
        f"DynamicValue new_state=1; bytes private=2; {_DIAGNOSTICS}=3; bool legacy_type_system=4",
    ),
    "ReadDataSource": (
        "string type_name=1; DynamicValue config=2",
        f"DynamicValue state=1; {_DIAGNOSTICS}=2",
    ),
    "OpenEphemeralResource": (
        "string type_name=1; DynamicValue config=2",
        f"{_DIAGNOSTICS}=1; DynamicValue result=3; bytes private=4",
    ),
    "CloseEphemeralResource": ("string type_name=1; bytes private=2", f"{_DIAGNOSTICS}=1"),
    "GetFunctions": ("", f"{_DIAGNOSTICS}=2"),
    "StopProvider": ("", "string Error=1"),
}

CALLS = tuple(_CALLS)
_PACKAGE = "tfplugin6"
SERVICE = f"{_PACKAGE}.Provider"
NESTING = {"single": 1, "list": 2, "set": 3, "map": 4, "group": 5}
ERROR = 1
_SCALARS = {
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
}


def _flat(name: str) -> str:
    return name.replace(".", "_")  # nested names are only names: they are not on the wire


def _classes() -> dict[str, Any]:
    """Name in the .proto ("Schema.Block", "ReadResource.Request") -> message class."""
    texts = dict(_TYPES)
    for call, (request, response) in _CALLS.items():
        texts |= {f"{call}.Request": request, f"{call}.Response": response}
    file = descriptor_pb2.FileDescriptorProto(name="tfplugin6.proto", package=_PACKAGE, syntax="proto3")
    for name, text in texts.items():
        message = file.message_type.add(name=_flat(name))
        for line in filter(None, (part.strip() for part in text.split(";"))):
            kind, _, rest = line.partition(" ")
            field_name, _, number = rest.partition("=")
            made = message.field.add(name=field_name, number=int(number))
            made.label = made.LABEL_REPEATED if kind.startswith("*") else made.LABEL_OPTIONAL
            kind = kind.removeprefix("*")
            made.type = _SCALARS.get(kind, made.TYPE_MESSAGE)
            if kind not in _SCALARS:
                made.type_name = f".{_PACKAGE}.{_flat(kind)}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"{_PACKAGE}.{_flat(name)}")) for name in texts}


MESSAGES = _classes()


def message(name: str, /, **fields: Any) -> Any:
    """A message; raises ValueError on a field it does not have, KeyError on an unknown name."""
    return MESSAGES[name](**fields)
