"""How the two ends of a connection prove to each other that they know its secret. Pure.

The listener says a number; the caller says one of its own, and its proof; the listener checks that, and says
its proof. A proof is an HMAC, by the secret, of the end's role and both numbers. So the secret never travels,
no proof is right a second time or said back, and a caller that waits for the listener's has told nothing to
who has taken a dead process' port. See docs/adr/015.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Literal

from samovar.replicas.links.wire import LinkLost

PROOF_WAIT_S = 5.0
"""A connection whose other end has not proved itself by then is closed, at both ends."""
NUMBER_BYTES = PROOF_BYTES = 32
DIGEST = "sha256"

Role = Literal["listener", "caller"]


def proof_of(role: Role, secret: str, listener: bytes, caller: bytes) -> bytes:
    """Return what an end says to prove itself; `listener`, `caller`: the numbers of this connection."""
    return hmac.digest(secret.encode(), f"samovar link 2, {role}\0".encode() + listener + caller, DIGEST)


class Handshake:
    """One end's part. Send what `begin` returns at once, and what `take` returns, until `is_proven`."""

    def __init__(self, role: Role, secret: str) -> None:
        self._role = role
        self._secret = secret
        self._own = secrets.token_bytes(NUMBER_BYTES)
        self._other = b""  # the other end's number
        self._heard = b""
        self.is_proven = False

    def begin(self) -> bytes:
        """Return what this end says before it has heard anything."""
        return self._own if self._role == "listener" else b""

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """Take in what has come. Return what is to be said now, and what came behind the other's proof.

        Raises `LinkLost` at a wrong proof. A listener says its answer only if it has room for the connection.
        """
        said = b""
        while not self.is_proven and data:
            missing = NUMBER_BYTES - len(self._heard)
            self._heard, data = self._heard + data[:missing], data[missing:]
            if len(self._heard) < NUMBER_BYTES:
                break
            part, self._heard = self._heard, b""
            if not self._other:
                self._other = part
                said = self._own + self._proof("caller") if self._role == "caller" else b""
                continue
            if not hmac.compare_digest(part, self._proof(_other_than(self._role))):
                raise LinkLost("the other end has not proved that it knows the secret")
            self.is_proven = True
            said = self._proof("listener") if self._role == "listener" else b""
        return said, data

    def _proof(self, role: Role) -> bytes:
        is_listener = self._role == "listener"
        listener, caller = (self._own, self._other) if is_listener else (self._other, self._own)
        return proof_of(role, self._secret, listener, caller)


def _other_than(role: Role) -> Role:
    return "caller" if role == "listener" else "listener"
