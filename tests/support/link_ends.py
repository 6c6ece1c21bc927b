"""The listening end of a link, which a test plays by hand once it has proved itself."""

from __future__ import annotations

import asyncio

from samovar.replicas.links.handshake import NUMBER_BYTES, PROOF_BYTES, Handshake


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str) -> None:
    """Prove ourselves as the listener of a connection that has just come."""
    end = Handshake("listener", secret)
    writer.write(end.begin())
    said, _ = end.take(await reader.readexactly(NUMBER_BYTES + PROOF_BYTES))
    writer.write(said)
