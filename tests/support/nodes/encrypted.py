"""Encrypted tiers for tests: an operator's key, a file of keys, a medium behind them."""

from __future__ import annotations

from pathlib import Path

from samovar.cache_tiers.encryption.keys import SessionKeyFile
from samovar.cache_tiers.encryption.outer import OuterKeys
from samovar.cache_tiers.encryption.tier import EncryptedTier
from samovar.cache_tiers.media.files import Syscalls
from samovar.cache_tiers.media.tier import Tier
from tests.support.nodes.nvme_harness import open_tier

OUTER = "0f" * 32
OTHER_OUTER = "a5" * 32


def outer_file(folder: Path, *lines: str) -> Path:
    """Write the operator's file: these keys, the first in use."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "outer"
    path.write_text("".join(f"{line}\n" for line in lines or (OUTER,)))
    path.chmod(0o600)
    return path


def key_file(
    folder: Path, *lines: str, slots_max: int = 1000, calls: Syscalls | None = None, now_s: float = 1e9
) -> SessionKeyFile:
    """The file of keys of a folder, under the operator's key there, which is made if it is not there."""
    outer = folder / "outer"
    if lines or not outer.exists():
        outer_file(folder, *lines)
    return SessionKeyFile(
        folder / "session-keys",
        OuterKeys(outer),
        wall_clock=lambda: now_s,
        slots_max=slots_max,
        calls=calls,
    )


def encrypted(folder: Path, keys: SessionKeyFile | None = None, inner: Tier | None = None) -> EncryptedTier:
    """Files below `folder/kv`, encrypted with the keys of `folder`."""
    return EncryptedTier(inner or open_tier(folder / "kv"), keys or key_file(folder))
