"""Ten erasures of sessions' texts, and of a tenant's, with a crash between every two steps: none is readable.

As `test_key_erasures.py` of records: replies, kept turns, summaries, knowledge and documents, each in its
real file. What an attacker has: the disk as it was before (a backup), as it was when the process died, and
as it is, write-ahead logs and free pages included; the operator's key; and this very code.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from samovar.cache_tiers.blocks import Clear
from samovar.cache_tiers.encryption import LeasedKeys, OuterKeys, OuterWrapper, Sealing, SessionSealer
from samovar.cache_tiers.sessions import Item, ItemBounds, ItemStore
from samovar.configs.optional_sections import KnowledgeSettings
from samovar.router.context.compaction import Summary, SummaryStore
from samovar.router.context.documents import Document, DocumentStore, Quota
from samovar.router.context.documents.store import FILE_NAME, SCHEMAS
from samovar.router.context.knowledge import Change, KnowledgeError, LoopRecord, RecordBounds, SqliteStore
from samovar.router.context.sealed import SealedSummaries, open_sealed
from tests.support.clock import Clock
from tests.support.nodes.encrypted import key_file
from tests.support.nodes.nvme_harness import Killed, SickCalls, die, halfway
from tests.support.router.knowledge_desks import LIMITS, ME, content
from tests.support.router.sealed_desks import tag_of

MARKER = "the eagle lands at noon: 0123456789abcde"
assert len(MARKER) == 40
ERASURES = 10
STEPS = ["keys:1", "keys:2", "replies", "turns", "summaries", "over"]
"""At which call of the file of keys (write, flush), or before which place's step, the process dies."""
TENANT, KEPT = "tea", b"k" * 8 + bytes(8)
BOUNDS = RecordBounds(99, 2**22)


class Service:
    """All that has texts of a service, over the files of a folder. `die_before`: a step of an erasure."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls, self.die_before = folder, SickCalls(), ""
        self.keys = key_file(folder, calls=self.calls, now_s=1e6)
        sealing = Sealing(LeasedKeys(self.keys, Clock()), OuterWrapper(OuterKeys(folder / "outer")))
        self.sealing, sealer = sealing, SessionSealer(sealing.sessions)
        bounds = ItemBounds(1 << 20, 4, folder / "replies.sqlite")
        self.items = ItemStore(bounds, lambda tenant, session: 0.0, lambda: 2e6, sealer)
        inner = SqliteStore(folder / "knowledge.sqlite")
        self.base = open_sealed(inner, KnowledgeSettings(), "", sealing=sealing, tag_of=tag_of)
        self.documents = DocumentStore(self.base.beside(FILE_NAME, SCHEMAS))
        self.summaries = SummaryStore(
            folder / "compaction.sqlite",
            of_session_max=4,
            rows_max=99,
            busy_s=5.0,
            seal=SealedSummaries(sealing, tag_of),
            wall_clock=lambda: 2e6,
        )

    def say(self, session: bytes) -> None:
        """Leave the marker in each place that keeps what sessions say."""
        tag, name = tag_of(TENANT), session.hex()
        self.items.put([Item(tag, session, "reply", session, MARKER.encode(), 2e6, 3e6, is_durable=True)])
        self.base.records.put(
            TENANT, LoopRecord("turn", name, f'"{MARKER}"', name, session, at_s=2e6), BOUNDS
        )
        self.summaries.put((TENANT, session), b"1", Summary(1, MARKER))

    def heard(self, session: bytes) -> list[str]:
        """What of a session is still to be read, with the keys that are left."""
        said = [one.body.decode() for one in self.items.replies(tag_of(TENANT), session)]
        said += [one.body for one in self.base.records.find(TENANT, "turn", session=session)]
        summary = self.summaries.latest((TENANT, session), [b"0", b"1", b"2"])
        return said + ([] if summary is None else [summary.text])

    def teach(self, tenant: str) -> None:
        self.base.write(tenant, [Change(content(MARKER, title=MARKER), ME)], LIMITS)
        document = Document(f"doc-{tenant}", tenant, MARKER, "text", "processing", "auto", 40, 1.0)
        self.documents.add(document, MARKER.encode(), Quota(99, 2**20))
        self.documents.put_text(tenant, document.id, MARKER, Quota(99, 2**20))

    def learned(self, tenant: str) -> list[str]:
        found = [one.content.text for one in self.base.heads(tenant)]
        return found + [self.documents.text(tenant, one.id) or "" for one in self.documents.all(tenant, 9)]

    def erase(self, session: bytes) -> None:
        """As `router/ingress/places.py` orders it."""
        steps: dict[str, Callable[[], object]] = {
            "keys": lambda: self.sealing.sessions.destroy([Clear(tag_of(TENANT), session)]),
            "replies": lambda: self.items.clear(tag_of(TENANT), session, 2e6),
            "turns": lambda: self.base.forget_sessions(TENANT, [session]),
            "summaries": lambda: self.summaries.forget(TENANT, [session]),
            "over": lambda: None,
        }
        for name, step in steps.items():
            if name == self.die_before:
                raise Killed
            step()

    def close(self) -> None:
        for one in (self.items, self.summaries, self.documents, self.base, self.keys):
            one.close()


def readable(folder: Path) -> list[Path]:
    """The files in which the marker, or half of it, is."""
    halves = (MARKER[:20].encode(), MARKER[20:].encode())
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if any(half in path.read_bytes() for half in halves)]


def with_keys_of(now: Path, before: Path, target: Path) -> Service:
    """What this code makes of the files of `before` with the keys that are there `now`."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(before, target)
    for name in ("session-keys", "outer"):
        shutil.copy(now / name, target / name)
    return Service(target)


@pytest.mark.guarantee("G12")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", [die, halfway])
def test_g12_what_a_session_said_is_readable_nowhere_wherever_the_process_died(
    tmp_path: Path, fault: Any
) -> None:
    service, dead = Service(tmp_path / "disk-0"), list[Service]()
    service.say(KEPT)
    for number in range(ERASURES):
        session = number.to_bytes(8, "big") + bytes(8)
        service.say(session)
        assert len(service.heard(session)) == 3
        before = shutil.copytree(service.folder, tmp_path / f"backup-{number}")
        place, _, call = STEPS[number % len(STEPS)].partition(":")
        service.die_before = "" if call else place
        if call:
            service.calls.arm(fault, int(call))
        with pytest.raises(Killed):
            service.erase(session)
        dead.append(service)  # its connections close no log, as those of a process that is gone
        crashed = shutil.copytree(service.folder, tmp_path / f"disk-{number + 1}")
        if not call and place != "keys":  # the key is gone: also what no place has deleted yet says nothing
            attacker = with_keys_of(crashed, before, tmp_path / "attacker")
            assert attacker.heard(session) == []
            attacker.close()
        service = Service(crashed)
        service.erase(session)  # it is gone on with
        assert service.heard(session) == []
        for folder in (before, crashed):
            assert readable(folder) == []
        attacker = with_keys_of(crashed, before, tmp_path / "attacker")
        assert attacker.heard(session) == []
        assert len(attacker.heard(KEPT)) == 3, "the search finds what is there"
        attacker.close()
    assert len(service.heard(KEPT)) == 3
    for one in (*dead, service):
        with suppress(BaseException):
            one.close()


@pytest.mark.guarantee("G12")
@pytest.mark.timeout(300)
def test_g12_what_a_tenant_taught_goes_with_its_key_wherever_the_process_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(tmp_path / "disk")
    service.teach("other")
    for number in range(ERASURES):
        service.teach(TENANT)
        assert service.learned(TENANT) == [MARKER] * 2
        wrapped = {one.state: wrapped_of(one) for one in service.base.records.find(TENANT, "key")}
        assert held(service.folder, wrapped) == ["documents.sqlite", "knowledge"]
        before = shutil.copytree(service.folder, tmp_path / f"backup-{number}")
        if number % 2:
            with monkeypatch.context() as patch:  # dies behind its key's end, before any row is deleted
                patch.setattr(SqliteStore, "erase_before", lambda *_: die(service.calls, "", ()))
                with pytest.raises(Killed):
                    service.base.erase(TENANT, None)
            left = Service(shutil.copytree(service.folder, tmp_path / f"disk-{number}"))
            assert held(left.folder, wrapped) == ["documents.sqlite"]
            assert left.learned(TENANT) == [MARKER], "the document's"
            left.close()
        service.base.erase(TENANT, None)
        assert service.learned(TENANT) == [MARKER], "a document is no entry"
        service.documents.erase(TENANT, f"doc-{TENANT}")
        assert service.learned(TENANT) == []
        assert held(service.folder, wrapped) == []
        assert readable(service.folder) == readable(before) == []
    assert service.learned("other") == [MARKER] * 2
    with pytest.raises(KnowledgeError):
        service.documents.get(TENANT, f"doc-{TENANT}")
    service.close()


def wrapped_of(record: LoopRecord) -> bytes:
    """A key as it is wrapped, in the letters in which it is stored."""
    return record.body.split('"')[1].encode()


def held(folder: Path, keys: dict[str, bytes]) -> list[str]:
    """Which of these keys are in any file, free pages and logs included."""
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return sorted(name for name, key in keys.items() if any(key in data for data in files))
