"""The minors of vLLM that the connector is tested with. Its contract moves from one to the next."""

from __future__ import annotations

TESTED = ("0.32",)


def check_version(version: str) -> None:
    """Raise `ValueError` for a minor that is not tested, naming those that are."""
    minor = ".".join(version.split(".")[:2])
    if minor not in TESTED:
        known = ", ".join(TESTED)
        raise ValueError(f"SamovarConnector is tested with vLLM {known}, not {version}: install one of these")
