"""`SamovarTier` under vLLM's own tiering, with its real manager and main memory; no GPU and no model."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.servers import MIB, Tiers

DRIVER = Path(__file__).with_name("drive_offloading.py")
ALL = {"found": 12, "right": 12, "window": 3, "window_right": 3}
NOTHING = {"found": 0, "right": 0, "window": 0, "window_right": 0}


def run(bin_dir: Path, tiers: Tiers, what: str) -> dict[str, Any]:
    """Return what an engine of its own says, which ends afterwards."""
    done = subprocess.run(
        [bin_dir / "python", DRIVER, tiers.socket, what],
        env={"PATH": str(bin_dir), "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture
def stored(bin_dir: Path, tiers: Tiers) -> Tiers:
    tiers.start()
    assert run(bin_dir, tiers, "load") == NOTHING
    assert run(bin_dir, tiers, "store") == {}
    tiers.until_held(15)
    return tiers


def test_chunks_of_both_groups_return_after_restarts(bin_dir: Path, stored: Tiers) -> None:
    assert run(bin_dir, stored, "load") == ALL
    stored.end()
    stored.start({"tiers.cpu.bytes-max": 64 * MIB})
    assert run(bin_dir, stored, "load") == ALL


def test_a_flipped_bit_is_computed_and_what_is_before_it_used(bin_dir: Path, stored: Tiers) -> None:
    stored.end()
    (file,) = (one for one in stored.kv.rglob("*.kv") if one.stat().st_size > 12 * 8192)
    data = bytearray(file.read_bytes())
    data[4096 + 5 * 8192 + 100] ^= 1
    file.write_bytes(data)
    stored.start()
    assert run(bin_dir, stored, "load") == ALL | {"found": 5, "right": 5}


def test_tiers_that_are_frozen_or_dead_have_nothing(bin_dir: Path, stored: Tiers) -> None:
    stored.send(signal.SIGSTOP)
    assert run(bin_dir, stored, "load") == NOTHING
    stored.send(signal.SIGCONT)
    assert run(bin_dir, stored, "load") == ALL
    stored.end(signal.SIGKILL)
    assert run(bin_dir, stored, "load") == NOTHING
    assert run(bin_dir, stored, "store") == {}


def test_a_clear_reaches_the_tiers(bin_dir: Path, stored: Tiers) -> None:
    assert run(bin_dir, stored, "clear") == {"cleared": True}
    assert run(bin_dir, stored, "load") == NOTHING


NAMES = """
from types import SimpleNamespace as Of
from samovar.cache_tiers.vllm.offloading.tier import check_names, name_tiers
extra = {"secondary_tiers": [{"type": "fs"}, {"type": "SamovarTier"}]}
name_tiers(extra, bytes(32))
assert [tier.get("namespace") for tier in extra["secondary_tiers"]] == [None, "00" * 32]
name_tiers({}, bytes(32))
def said(**wrong):
    cache = Of(prefix_caching_hash_algo="sha256", cache_dtype="auto")
    cache.__dict__.update({name: wrong.pop(name) for name in list(wrong) if name in cache.__dict__})
    try:
        check_names(Of(**{"lora_config": None, "cache_config": cache} | wrong))
    except ValueError as error:
        return str(error)
    return ""
assert said() == ""
assert "use SamovarConnector" in said(lora_config=object())
assert "use sha256" in said(prefix_caching_hash_algo="xxhash_cbor")
assert "use 'auto'" in said(cache_dtype="fp8_e4m3")
"""


def test_what_vllms_keys_do_not_name_by_content_is_refused(bin_dir: Path) -> None:
    done = subprocess.run([bin_dir / "python", "-c", NAMES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_it_is_refused_without_the_connector_that_names_the_model(bin_dir: Path) -> None:
    code = (
        "from samovar.cache_tiers.vllm.offloading.tier import SamovarTier\n"
        "SamovarTier(None, None, 'SamovarTier', socket='/t')"
    )
    done = subprocess.run([bin_dir / "python", "-c", code], capture_output=True, text=True, check=False)
    assert "use the kv_connector SamovarOffloadingConnector" in done.stderr
