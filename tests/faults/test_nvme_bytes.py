"""Files that are not what they were: F01 flipped bits, F02 wrong sizes, F03 misplaced, F12 malicious."""

from __future__ import annotations

import random
import shutil
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from samovar.cache_tiers.blocks.extent import Bytes
from samovar.cache_tiers.blocks.record import BadRecord, TierMiss, decode_header, good_blocks
from samovar.cache_tiers.media import files
from samovar.cache_tiers.media.tier import Deadline
from tests.support.nodes.nvme_harness import (
    DEADLINE_S,
    Sealed,
    check,
    check_as_replica,
    make,
    open_tier,
    path_of,
    read_all,
    why_bad,
)

FIELDS = {
    **{"magic": (0, 8), "version": (8, 12), "length": (12, 16), "counts": (16, 36), "namespace": (36, 68)},
    **{"tenant": (68, 84), "session": (84, 100), "parent": (100, 132), "created": (132, 140)},
    **{
        "placement": (140, 160),
        "header checksum": (160, 176),
        "keys": (176, 304),
        "counts of tokens": (304, 320),
    },
    **{"checksums": (320, 416), "padding": (416, 4096), "payload": (4096, 4096 + 4 * 1500)},
}


def test_f01_flipped_bits_are_found_wherever_they_are(tmp_path: Path) -> None:
    """1,600 flips of one bit in the file: none is served."""
    tier, sealed, rng = open_tier(tmp_path), make(1), random.Random(1)
    tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    assert why_bad(tier, sealed) is None
    found: Counter[str | None] = Counter()
    with path_of(tier, sealed.address).open("r+b", buffering=0) as file:
        for low, high in FIELDS.values():
            for _ in range(400 if low == 4096 else 80):
                at = rng.randrange(low, high)
                file.seek(at)
                flipped = bytes([file.read(1)[0] ^ 1 << rng.randrange(8)])
                file.seek(at)
                file.write(flipped)
                found[why_bad(tier, sealed)] += 1
                file.seek(at)
                file.write(sealed.data[at : at + 1].tobytes())
    assert None not in found
    assert sum(found.values()) == 1600
    assert found["checksum"] == 400
    assert why_bad(tier, sealed) is None


def test_f01_a_flipped_header_is_quarantined_by_the_scan(tmp_path: Path) -> None:
    rng = random.Random(2)
    for number, (low, high) in enumerate(list(FIELDS.values())[:-1]):
        tier, sealed, other = open_tier(tmp_path / str(number)), make(1), make(2)
        for each in (sealed, other):
            tier.put(each.address, each.record, deadline=Deadline(DEADLINE_S))
        path = path_of(tier, sealed.address)
        content = bytearray(path.read_bytes())
        content[rng.randrange(low, high)] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        tier.close()
        tier = open_tier(tmp_path / str(number))
        assert [scanned.header.address for scanned in tier.scan()] == [other.address]
        assert path.with_suffix(".bad").read_bytes() == content
        with pytest.raises(TierMiss):
            read_all(tier, sealed)
        check(tier)
        tier.close()


def sizes(sealed: Sealed) -> dict[str, bytes]:
    whole = sealed.data.tobytes()
    return {
        "empty": b"",
        "one byte": whole[:1],
        "half a prefix": whole[:40],
        "half a header": whole[:2048],
        "header only": whole[:4096],
        "a block less": whole[:-1500],
        "a byte less": whole[:-1],
        "a byte more": whole + b"\0",
        "twice": whole + whole,
        "zeros": bytes(len(whole)),
        "all ones": b"\xff" * len(whole),
        "zeros at the end": whole[:5000] + bytes(len(whole) - 5000),
        "a page of zeros": whole[:4096] + bytes(4096) + whole[8192:],
    }


@pytest.mark.parametrize("name", sizes(make(1)))
@pytest.mark.parametrize("direct_io", [False, True])
def test_f02_wrong_sizes_are_found(
    tmp_path: Path, name: str, direct_io: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the tier that wrote the file, by one that never scanned, and by one that does; nothing is leaked."""
    stale(monkeypatch)
    sealed = make(1)
    content = sizes(sealed)[name]
    tier = open_tier(tmp_path, direct_io=direct_io)
    tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    path = path_of(tier, sealed.address)
    path.write_bytes(content)
    difference = len(content) - len(sealed.data)
    kind = why_bad(tier, sealed)
    if difference:
        assert kind == ("truncated" if difference < 0 else "oversized")
        with pytest.raises(BadRecord):  # also where the bytes that are asked for are all there
            tier.read(sealed.address, 0, 1, deadline=Deadline(DEADLINE_S))
    assert kind is not None
    tier.close()

    tier = open_tier(tmp_path)
    if difference < 0:
        assert why_bad(tier, sealed) == "truncated"
    elif difference > 0:
        data = tier.read(sealed.address, 0, len(content), deadline=Deadline(DEADLINE_S))
        with pytest.raises(BadRecord, match="oversized"):
            check_as_replica(sealed, data)
    else:
        assert why_bad(tier, sealed) == kind
    header_is_good = content[:4096] == sealed.data[:4096].tobytes() and not difference
    assert [s.header.address for s in tier.scan()] == ([sealed.address] if header_is_good else [])
    assert path.exists() == header_is_good
    check(tier)
    tier.close()


def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is full of 0xAA, as if another request had used it."""
    empty = files.aligned_empty

    def filled(nbytes: int, align: int) -> Bytes:
        buffer = empty(nbytes, align)
        buffer[:] = 0xAA
        return buffer

    monkeypatch.setattr(files, "aligned_empty", filled)


@pytest.mark.parametrize("direct_io", [False, True])
def test_f02_no_stale_byte_is_ever_returned(
    tmp_path: Path, direct_io: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every range of a file that was cut anywhere is either exactly what was written, or refused."""
    stale(monkeypatch)
    sealed, rng = make(1), random.Random(3)
    writer = open_tier(tmp_path)
    writer.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    path, total = path_of(writer, sealed.address), len(sealed.data)
    writer.close()
    tier = open_tier(tmp_path, direct_io=direct_io)  # has not scanned: does not know the length
    for _ in range(200):
        length = rng.randrange(total + 1)
        path.write_bytes(sealed.data[:length].tobytes())
        start = rng.randrange(total)
        nbytes = rng.randrange(total - start + 1)
        if start + nbytes <= length:
            data = tier.read(sealed.address, start, nbytes, deadline=Deadline(DEADLINE_S))
            assert np.array_equal(data, sealed.data[start : start + nbytes])
        else:
            with pytest.raises(BadRecord, match="truncated"):
                tier.read(sealed.address, start, nbytes, deadline=Deadline(DEADLINE_S))


def test_f03_a_file_at_another_place_is_found(tmp_path: Path) -> None:
    """By its key, by the seed of its checksums, and by the scan."""
    one, other, foreign = make(1), make(2), make(1, tenant=2)
    tier = open_tier(tmp_path)
    for sealed in (one, other, foreign):
        tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    shutil.copy(path_of(tier, one.address), path_of(tier, other.address))
    shutil.copy(path_of(tier, one.address), path_of(tier, foreign.address))
    assert why_bad(tier, other) == "key"
    assert why_bad(tier, foreign) == "namespace"
    mixed = np.concatenate([other.data[:4096], one.data[4096:]])  # only the payload went astray
    assert good_blocks(decode_header(mixed), mixed[4096:], 0) == 0
    assert [scanned.header.address for scanned in tier.scan()] == [one.address]
    for sealed in (other, foreign):
        assert path_of(tier, sealed.address).with_suffix(".bad").exists()
        with pytest.raises(TierMiss):
            read_all(tier, sealed)
    assert why_bad(tier, one) is None
    check(tier)


def test_f03_a_file_in_another_tenants_or_namespaces_folder_is_found(tmp_path: Path) -> None:
    tier, sealed = open_tier(tmp_path), make(1)
    tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    path = path_of(tier, sealed.address)
    root, tenant, namespace = tmp_path / "v1", sealed.address.tenant.hex(), sealed.address.namespace.hex()
    name = Path(path.name[:2]) / path.name
    wrong = [
        root / ("ab" * 16) / namespace / name,
        root / tenant / ("cd" * 32) / name,
        root / tenant / namespace / "00" / path.name,
    ]
    for copy in wrong:
        copy.parent.mkdir(parents=True)
        shutil.copy(path, copy)
    assert [scanned.header.address for scanned in tier.scan()] == [sealed.address]
    assert not any(copy.exists() for copy in wrong)
    assert all(copy.with_suffix(".bad").exists() for copy in wrong)
    check(tier)


def test_f12_malicious_files_are_no_records_and_nothing_is_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    command = f"touch {marker}"
    archive = tmp_path / "archive.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("archive/data.pkl", f"cposix\nsystem\n(S'{command}'\ntR.")
        zipped.writestr("archive/version", "3\n")
    payloads = {
        "pickle protocol 0": f"cposix\nsystem\n(S'{command}'\ntR.".encode(),
        "pickle protocol 4": b"\x80\x04\x95\x30\0\0\0\0\0\0\0\x8c\x05posix\x8c\x06system\x93"
        + b"\x8c"
        + bytes([len(command)])
        + command.encode()
        + b"\x85R.",
        "torch zip": archive.read_bytes(),
        "numpy object array": b"\x93NUMPY\x01\0v\0{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n",
        "python": f"__import__('os').system('{command}')\n".encode(),
        "safetensors": (2**60).to_bytes(8, "little") + b"{",
        "elf": Path("/bin/true").read_bytes(),
    }
    tier, sealed = open_tier(tmp_path / "kv"), make(1)
    path = path_of(tier, sealed.address)
    for name, payload in payloads.items():
        for content in (payload, payload + bytes(max(len(sealed.data) - len(payload), 0))):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            data = tier.read(sealed.address, 0, len(content), deadline=Deadline(DEADLINE_S))
            with pytest.raises(BadRecord, match="magic"):
                decode_header(data)
            assert list(tier.scan()) == [], name
            assert not path.exists()
    assert not marker.exists()
    check(tier)
