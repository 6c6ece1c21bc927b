"""A service whose records on disk are encrypted: it finds them after a restart, and not what was erased."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest

from samovar.cache_tiers.blocks import ENCRYPTED_MAGIC, SEALED_MAGIC
from tests.support.services.guests import Conversation
from tests.support.services.tier_service import tier_service

# The gate has the tier's laws, and the actor of the keys on a real Ray: test_l14_encrypted, test_key_actor.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_an_erased_session_is_unreadable_and_the_others_return(tmp_path: Path) -> None:
    key = tmp_path / "outer.key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    flags = {"tiers.encryption-key-file": key}
    erased, kept = Conversation(1), Conversation(2)
    folder = tmp_path / "service"
    with tier_service(folder, {**flags, "limits.reply-memory-bytes-max": 1 << 22}) as service:
        for _ in range(2):
            service.turn(erased)
            service.turn(kept)
        service.settle()
    files = [path for path in service.nvme_dir.rglob("*.kv") if path.is_file()]
    assert files
    assert all(path.read_bytes().startswith(ENCRYPTED_MAGIC) for path in files)
    kept_there = b"".join(path.read_bytes() for path in service.nvme_dir.glob("replies.sqlite*"))
    assert SEALED_MAGIC in kept_there, "tokens of replies"
    with tier_service(folder, flags) as service:
        for one in (erased, kept):
            truth = service.uncached(one.next_messages())
            reply = service.turn(one)
            assert reply.by_tier["nvme"] > reply.prompt_tokens // 2, reply.receipt
            assert reply.text == truth.text
        service.settle()
        with service.http() as http:
            answer = http.delete(f"/v1/sessions/{erased.session}")
        assert answer.status_code == 200, answer.text
        assert answer.json()["cleared"]["keys"] == 1
    (line,) = (service.nvme_dir / "session-keys.log").read_text().splitlines()
    assert json.loads(line)["destroyed"] == "session"
    with tier_service(folder, flags) as service:
        assert service.turn(kept).by_tier["nvme"] > 0
        assert service.turn(erased).cached <= 16, "no more than the template that all begin with"
