"""Records as earlier versions of the format wrote them, and headers that lie."""

from __future__ import annotations

import struct

import numpy as np
import xxhash

from samovar.cache_tiers.blocks.extent import Bytes
from samovar.cache_tiers.blocks.record import decode_header, header_bytes


def forge(record: Bytes, at: int, new: bytes) -> Bytes:
    """A liar's record: other bytes in the header, and a header checksum that is right for them."""
    forged = record.copy()
    forged[at : at + len(new)] = np.frombuffer(new, np.uint8)
    length = struct.unpack_from("<I", record, 12)[0]
    head = bytearray(forged[:length])
    head[160:176] = bytes(16)
    forged[160:176] = np.frombuffer(xxhash.xxh3_128(bytes(head)).digest(), np.uint8)
    return forged


def as_version(version: int, record: Bytes) -> Bytes:
    """The same record as the code of that version sealed it; of the present one itself.

    Each layer's checksum is its xxh3, seeded with key and layer; version 2 has the whole block's first.
    """
    header = decode_header(record)
    if version == header.version:
        return record.copy()
    shape, checksums = header.shape, []
    payload = record[header_bytes(header.blocks, shape.layers) :].reshape(-1, shape.layers, shape.layer_bytes)
    for key, block in zip(header.keys, payload, strict=True):
        seed = int.from_bytes(key[:8], "little")
        checksums += [xxhash.xxh3_64_intdigest(layer.tobytes(), seed ^ at) for at, layer in enumerate(block)]
        if version == 2:
            checksums[-shape.layers] = xxhash.xxh3_64_intdigest(block.tobytes(), seed)
    table = 176 + header.blocks * (32 + 4)
    older = forge(record, table, struct.pack(f"<{len(checksums)}Q", *checksums))
    return forge(older, 8, struct.pack("<H", version))
