"""A stand-in for terraform-provider-aws: the exact schema, no cloud. A test double: never install it.

Terraform starts it through the script of `tests.infra.mirror` and talks plugin protocol 6 over a unix
socket, or is told of one that runs already (TF_REATTACH_PROVIDERS): then one configuration holds at a time.
The schema is the JSON file SAMOVAR_TF_SCHEMA names.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from tests.infra.awsschema import data_sources, messages, resources, values
from tests.infra.awsschema.messages import message
from tests.infra.awsschema.resources import decode, encode, is_unknown

COOKIE = "TF_PLUGIN_MAGIC_COOKIE"
SCHEMA = "SAMOVAR_TF_SCHEMA"
SOCKET = "SAMOVAR_TF_SOCKET"
"""Set: serve there until the parent is gone, for one Terraform after the other."""
PARENT_CHECK_S = 1.0

Reply = Any
_SECTIONS = ("resource_schemas", "data_source_schemas", "ephemeral_resource_schemas")
_QUIET = (
    "ValidateProviderConfig",
    "GetResourceIdentitySchemas",
    "CloseEphemeralResource",
    "GetFunctions",
    "StopProvider",
)
"""Calls answered with an empty message: nothing to object to. Terraform itself checks the schema."""

_VALIDATED = {
    "ValidateResourceConfig": "resource_schemas",
    "ValidateDataResourceConfig": "data_source_schemas",
    "ValidateEphemeralResourceConfig": "ephemeral_resource_schemas",
}


class Provider:
    """One method a call of the protocol, named as it; `request` in, response out."""

    def __init__(self, schema: dict[str, Any]) -> None:
        (self._schema,) = schema["provider_schemas"].values()
        self._resources = resources.Resources()

    def _block(self, section: str, type_name: str) -> dict[str, Any]:
        return self._schema[section][type_name]["block"]

    def GetProviderSchema(self, request: Any) -> Reply:
        sections = {
            section: [
                message("Entry", key=name, value=_schema(one)) for name, one in self._schema[section].items()
            ]
            for section in _SECTIONS
        }
        provider = _schema(self._schema["provider"])
        quick = message("ServerCapabilities", get_provider_schema_optional=True)
        return message("GetProviderSchema.Response", provider=provider, server_capabilities=quick, **sections)

    def ConfigureProvider(self, request: Any) -> Reply:
        config = decode(request.config.msgpack) or {}
        region = config.get("region")
        place = values.Place() if region is None or is_unknown(region) else values.Place(region)
        tags: dict[str, Any] = {}
        for block in config.get("default_tags") or []:
            tags |= {} if is_unknown(block.get("tags")) else block.get("tags") or {}
        self._resources = resources.Resources(place, tags)
        return message("ConfigureProvider.Response")

    def validate(self, call: str, request: Any) -> Reply:
        """Refuses what only AWS may set; the rest of the schema Terraform checks itself."""
        block = self._block(_VALIDATED[call], request.type_name)
        wrong = [
            message(
                "Diagnostic",
                severity=messages.ERROR,
                summary="Value for unconfigurable attribute",
                detail=f"Can't configure a value for {name!r} of {request.type_name}: AWS decides it.",
            )
            for name in resources.unconfigurable(block, decode(request.config.msgpack) or {})
        ]
        return message(f"{call}.Response", diagnostics=wrong)

    def UpgradeResourceState(self, request: Any) -> Reply:
        """The state is of this very schema, so it is only read from JSON."""
        state = _value(encode(json.loads(request.raw_state.json)))
        return message("UpgradeResourceState.Response", upgraded_state=state)

    def ReadResource(self, request: Any) -> Reply:
        """Nothing changes outside Terraform in this world."""
        return message("ReadResource.Response", new_state=request.current_state)

    def PlanResourceChange(self, request: Any) -> Reply:
        block = self._block("resource_schemas", request.type_name)
        prior, proposed = decode(request.prior_state.msgpack), decode(request.proposed_new_state.msgpack)
        planned = self._resources.plan(block, prior, proposed)
        return message("PlanResourceChange.Response", planned_state=_value(encode(planned)))

    def ApplyResourceChange(self, request: Any) -> Reply:
        block = self._block("resource_schemas", request.type_name)
        planned = decode(request.planned_state.msgpack)
        state = self._resources.apply(request.type_name, block, planned)
        return message("ApplyResourceChange.Response", new_state=_value(encode(state)))

    def ReadDataSource(self, request: Any) -> Reply:
        state = self._read("data_source_schemas", request)
        return message("ReadDataSource.Response", state=state)

    def OpenEphemeralResource(self, request: Any) -> Reply:
        result = self._read("ephemeral_resource_schemas", request)
        return message("OpenEphemeralResource.Response", result=result)

    def _read(self, section: str, request: Any) -> Any:
        name = request.type_name
        config = decode(request.config.msgpack)
        known = data_sources.answer(name, config, self._resources.place)
        block = self._block(section, name)
        given = {key: value for key, value in known.items() if key in block["attributes"]}
        return _value(encode(self._resources.read(name, block, config, given)))


def _value(data: bytes) -> Any:
    return message("DynamicValue", msgpack=data)


def _schema(schema: dict[str, Any]) -> Any:
    return message("Schema", version=schema["version"], block=_block(schema["block"]))


def _block(block: dict[str, Any]) -> Any:
    attributes = [
        message("Schema.Attribute", **{**one, "name": name, "type": json.dumps(one["type"]).encode()})
        for name, one in block["attributes"].items()
    ]
    nested = [
        message(
            "Schema.NestedBlock",
            type_name=name,
            block=_block(one["block"]),
            nesting=messages.NESTING[one["nesting_mode"]],
            min_items=one.get("min_items", 0),
            max_items=one.get("max_items", 0),
        )
        for name, one in block["block_types"].items()
    ]
    return message("Schema.Block", attributes=attributes, block_types=nested)


def _handlers(provider: Provider) -> dict[str, grpc.RpcMethodHandler]:
    def handler(name: str) -> grpc.RpcMethodHandler:
        method = getattr(provider, name, None)

        def call(request: Any, context: grpc.ServicerContext) -> Any:
            if name in _QUIET:
                return message(f"{name}.Response")
            return provider.validate(name, request) if name in _VALIDATED else method(request)

        return grpc.unary_unary_rpc_method_handler(
            call,
            request_deserializer=messages.MESSAGES[f"{name}.Request"].FromString,
            response_serializer=messages.MESSAGES[f"{name}.Response"].SerializeToString,
        )

    return {name: handler(name) for name in messages.CALLS}


def serve(provider: Provider, socket: Path, stays: bool = False) -> None:
    """Answers on `socket` until Terraform says goodbye (unless it `stays`), or the parent is gone."""
    done = threading.Event()

    def goodbye(request: bytes, context: grpc.ServicerContext) -> bytes:
        if not stays:
            done.set()
        return b""

    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    end = grpc.unary_unary_rpc_method_handler(goodbye)
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(messages.SERVICE, _handlers(provider)),
            grpc.method_handlers_generic_handler("plugin.GRPCController", {"Shutdown": end}),
        )
    )
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    parent = os.getppid()
    print(f"1|6|unix|{socket}|grpc|", flush=True)
    while not done.wait(PARENT_CHECK_S) and os.getppid() == parent:
        pass
    server.stop(grace=0.2).wait()


def main() -> int:
    """0; 2 where it was not started as it should."""
    if SCHEMA not in os.environ or not {COOKIE, SOCKET} & set(os.environ):
        print("This is the stand-in provider of tests/infra: Terraform starts it, see tests/infra/mirror.py")
        return 2
    schema = json.loads(Path(os.environ[SCHEMA]).read_text())
    if SOCKET in os.environ:
        serve(Provider(schema), Path(os.environ[SOCKET]), stays=True)
        return 0
    with tempfile.TemporaryDirectory(prefix="samovar-tf-") as folder:
        serve(Provider(schema), Path(folder) / "provider.sock")
    return 0


if __name__ == "__main__":
    sys.exit(main())
