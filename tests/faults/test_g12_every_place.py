"""G12: a deletion asks every place, whatever the others answer, names what is left, and goes on by itself."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from samovar.cache_tiers.blocks import tenant_tag
from samovar.cache_tiers.messages import Cleared as NodeCleared
from samovar.configs.settings import ModelSettings
from samovar.replicas.messages import Forgotten
from samovar.router.context.compaction import Summary
from samovar.router.context.knowledge import KnowledgeError
from samovar.router.erasure import (
    Cleared,
    Erasure,
    ErasureKind,
    Erasures,
    Left,
    NotNoted,
    UnfinishedFile,
    erasures,
)
from samovar.router.ingress.places import forget_here, unfinished_dir
from samovar.router.ingresses import IngressesCleared
from samovar.router.openai import ApiError, Unavailable
from tests.faults.test_nvme_full import small_disk
from tests.support.router.fake_directory import FakeLink
from tests.support.router.router_harness import House, chat, error_of, keeper, make_settings, spoken, until

FAULTS: list[Exception] = [
    Left("it did not answer"),
    Unavailable("the disk is full.", 1.0),
    KnowledgeError("the knowledge base is busy"),
    OSError(errno.ENOSPC, "no room"),
    sqlite3.OperationalError("database is locked"),
    RuntimeError("planted"),
]
KINDS: dict[ErasureKind, tuple[str, ...]] = {
    "sessions": ("00" * 16,),
    "entries": ("kb_1",),
    "made": ("kb_1",),
    "response": ("resp_1",),
    "document": ("doc-1",),
}


class Neighbours:
    """Another ingress, which answers."""

    def __init__(self) -> None:
        self.told = IngressesCleared(0)

    async def forget(self, tenant: str, sessions: Sequence[bytes] | None) -> IngressesCleared:
        return self.told

    async def forget_entries(self, tenant: str, entries: Sequence[str] | None) -> int:
        return self.told.silent

    async def discard(self, tenant: str, response_id: str) -> int:
        return self.told.silent

    async def metrics(self) -> dict[str, bytes]:
        return {}


def house(folder: Path) -> House:
    settings = make_settings(
        compaction={"enabled": True, "dir": folder / "compaction"},
        knowledge={"enabled": True, "dir": folder / "kb", "embedder": "none", "busy_s": 0.05},
    )
    settings = settings.model_copy(update={"model": ModelSettings(cache_dir=folder)})
    link = FakeLink()
    link.nodes = {"n1": NodeCleared(0, 0)}
    return House(lambda _: spoken("Fine."), settings=settings, link=link, ingresses=Neighbours())


def close(made: House) -> None:
    made.service.stage("documents").close()  # type: ignore[union-attr]
    keeper(made).fitter.summaries.close()
    made.service.stage("knowledge").close()  # type: ignore[union-attr]


class Places:
    """Stands in for all places of an ingress; `broken` fail."""

    def __init__(self, clears: Erasures, fault: Exception) -> None:
        self.broken: set[str] = set()
        self.asked: list[str] = []
        self.fault = fault
        for places in clears.places.values():
            for name in places:
                places[name] = self._place(name)

    def _place(self, name: str) -> Any:
        async def erase(what: Erasure) -> Cleared:
            self.asked.append(name)
            if name in self.broken:
                raise self.fault
            return Cleared(pages=1)

        return erase


@pytest.mark.guarantee("G12")
@pytest.mark.parametrize("kind", KINDS)
async def test_each_place_and_each_pair_may_fail_and_no_other_is_left_out(
    tmp_path: Path, kind: ErasureKind
) -> None:
    made = house(tmp_path)
    async with made.client():
        clears = made.service.clears
        names = list(clears.places[kind])
        faults = itertools.cycle(FAULTS)
        choices = [*itertools.combinations(names, 1), *itertools.combinations(names, 2)]
        assert choices
        for number, broken in enumerate(choices):
            what = Erasure(kind, f"tenant-{number}", KINDS[kind])
            places = Places(clears, next(faults))
            places.broken = set(broken)
            with pytest.raises(ApiError) as refused:
                await clears.erase(what)
            assert (refused.value.status, refused.value.code) == (503, "clear_incomplete")
            assert places.asked == names, "every place is asked, in its order"
            assert clears.unfinished[what] == broken
            places.asked.clear()
            await clears.go_on_with(what)
            assert places.asked == list(broken), "what is done is not done again"
            assert clears.unfinished[what] == broken
            places.broken.clear()
            await clears.go_on_with(what)
            assert what not in clears.unfinished
    close(made)


def test_every_way_to_delete_has_its_places(tmp_path: Path) -> None:
    """Who adds a store adds its place: this list, and the one of docs/guarantees.md, are all there is."""
    made = house(tmp_path)
    front, summaries = "front doors", "summaries of conversations"
    assert {kind: list(places) for kind, places in made.service.clears.places.items()} == {
        "sessions": [
            "replies", summaries, "the session directory", front, "replicas", "tiers",
            "knowledge of conversations",
        ],
        "entries": ["the knowledge base", summaries, front],
        "made": [summaries, front],
        "response": ["stored responses", front],
        "document": ["the document"],
    }  # fmt: skip
    close(made)


@pytest.mark.guarantee("G12")
async def test_what_is_left_is_named_once_and_repeating_tells_when_it_is_done(tmp_path: Path) -> None:
    made = house(tmp_path)
    link, peers = made.directory.link, made.service.ingresses
    assert isinstance(link, FakeLink)
    assert isinstance(peers, Neighbours)
    async with made.client() as client:
        link.is_lost, peers.told = True, IngressesCleared(0, silent=1)
        made.replicas.clear_answers = [OSError("gone")]
        refused = await client.delete("/v1/sessions/s")
        assert (refused.status_code, error_of(refused)["code"]) == (503, "clear_incomplete")
        said = error_of(refused)["message"]
        for part in ("replicas did not answer", "an ingress", "tiers of some nodes", "ingresses keep"):
            assert said.count(part) == 1, said
        (places,) = made.service.clears.unfinished.values()
        assert places == ("the session directory", "front doors", "replicas", "tiers")
        link.is_lost, peers.told = False, IngressesCleared(0)
        made.replicas.clear_answers = [Forgotten(1, 1, 1)]
        assert (await client.delete("/v1/sessions/s")).status_code == 200
        assert not made.service.clears.unfinished
        # What goes on by itself there is told, and not asked for again.
        made.replicas.clear_answers = [Forgotten(1, 1, 1, ("s3",))]
        peers.told = IngressesCleared(0, unfinished=1)
        refused = await client.delete("/v1/sessions/s")
        assert (refused.status_code, error_of(refused)["code"]) == (503, "clear_incomplete")
        assert not made.service.clears.unfinished
    close(made)


async def test_a_client_that_goes_away_ends_no_deletion(tmp_path: Path) -> None:
    made = house(tmp_path)
    async with made.client():
        clears, gate = made.service.clears, asyncio.Event()
        places = Places(clears, FAULTS[0])

        async def slow(what: Erasure) -> Cleared:
            await gate.wait()
            return Cleared()

        first = next(iter(clears.places["sessions"]))
        clears.places["sessions"][first] = slow
        asked = asyncio.create_task(clears.erase(Erasure("sessions", "t", None)))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        gate.set()
        await until(lambda: places.asked == list(clears.places["sessions"])[1:])
    close(made)


# -- what is written down ------------------------------------------------------------------------


def clears_in(folder: Path, *names: str) -> tuple[Erasures, Places]:
    clears = Erasures(UnfinishedFile(folder), 1.0)
    for name in names:
        clears.places["sessions"][name] = None  # type: ignore[assignment]
    return clears, Places(clears, FAULTS[0])


@pytest.mark.guarantee("G12")
async def test_what_is_left_goes_on_after_a_restart(tmp_path: Path) -> None:
    first, places = clears_in(tmp_path, "one", "two", "three")
    await first.start()
    places.broken = {"one", "three"}
    what = Erasure("sessions", "tenant", ("ab" * 16,))
    with pytest.raises(ApiError, match="also after a restart"):
        await first.erase(what)
    await first.stop()
    second, places = clears_in(tmp_path, "one", "two", "three")
    await second.start()
    await until(lambda: not second.unfinished and places.asked == ["one", "three"])
    await second.stop()
    third, _ = clears_in(tmp_path, "one")
    await third.start()
    assert not third.unfinished
    await third.stop()


@pytest.mark.guarantee("G12")
async def test_a_kill_in_the_middle_of_a_deletion_is_gone_on_with(tmp_path: Path) -> None:
    """It is written down before the first place is asked."""
    first, _ = clears_in(tmp_path, "one", "two")
    hangs = asyncio.Event()

    async def hang(what: Erasure) -> Cleared:
        hangs.set()
        await asyncio.Event().wait()
        raise AssertionError

    first.places["sessions"]["one"] = hang
    await first.start()
    asked = asyncio.create_task(first.erase(Erasure("sessions", "tenant", None)))
    await hangs.wait()
    await first.stop()  # as the end of a process does, it gives back the file
    second, places = clears_in(tmp_path, "one", "two")
    await second.start()
    await until(lambda: not second.unfinished and places.asked == ["one", "two"])
    await second.stop()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


async def test_what_goes_on_keeps_the_time_of_the_wish(tmp_path: Path) -> None:
    first, places = clears_in(tmp_path, "one")
    await first.start()
    places.broken = {"one"}
    what = Erasure("sessions", "tenant", None, at_s=1234.5)
    with pytest.raises(ApiError):
        await first.erase(what)
    await first.stop()
    second, _ = clears_in(tmp_path, "one")
    seen = list[Erasure]()

    async def erase(what: Erasure) -> Cleared:
        seen.append(what)
        return Cleared()

    second.places["sessions"]["one"] = erase
    await second.start()
    await until(lambda: bool(seen))
    assert (seen[0].at_s, seen[0].is_late, seen[0].names) == (1234.5, True, None)
    await second.stop()


async def test_what_a_process_that_is_gone_has_left_is_taken_over(tmp_path: Path) -> None:
    """Two ingresses of a machine have a file each; one of them does not come back."""
    ingresses = [clears_in(tmp_path, "one") for _ in range(2)]
    for number, (clears, places) in enumerate(ingresses):
        await clears.start()
        places.broken = {"one"}
        with pytest.raises(ApiError):
            await clears.erase(Erasure("sessions", f"tenant-{number}", None))
    assert len(files_of(tmp_path, "0.unfinished", "1.unfinished")) == 2
    for clears, _ in ingresses:
        await clears.stop()
    alone, places = clears_in(tmp_path, "one")
    await alone.start()
    await until(lambda: not alone.unfinished and len(places.asked) == 2)
    assert len(files_of(tmp_path, "0.unfinished", "1.unfinished")) == 1
    await alone.stop()


@pytest.mark.guarantee("G12")
async def test_what_an_ingress_leaves_whose_successor_runs_already_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout starts the next ingress, and ends the last one then: its file was nobody's until a start."""
    monkeypatch.setattr(erasures, "TAKE_OVER_S", 0.05)
    (last, places), (following, its_places) = (clears_in(tmp_path, "one") for _ in range(2))
    await last.start()
    await following.start()
    places.broken = {"one"}
    what = Erasure("sessions", "tenant", None)
    with pytest.raises(ApiError):
        await last.erase(what)
    await asyncio.sleep(0.2)
    assert not following.unfinished, "it is not gone yet"
    its_places.broken = {"one"}
    await last.stop()
    await until(lambda: following.unfinished == {what: ("one",)})
    assert len(files_of(tmp_path, "0.unfinished", "1.unfinished")) == 1
    await following.stop()  # what it has taken over is its own, also for the one behind it
    third, places = clears_in(tmp_path, "one")
    await third.start()
    await until(lambda: places.asked == ["one"] and not third.unfinished)
    await third.stop()


@pytest.mark.guarantee("G12")
async def test_a_place_that_is_switched_off_is_asked_when_it_is_back(tmp_path: Path) -> None:
    first, places = clears_in(tmp_path, "one", "two")
    await first.start()
    places.broken = {"one", "two"}
    what = Erasure("sessions", "tenant", ("ab" * 16,))
    with pytest.raises(ApiError):
        await first.erase(what)
    await first.stop()
    without, places = clears_in(tmp_path, "two")
    await without.start()
    await until(lambda: places.asked == ["two"] and without.unfinished == {what: ("one",)})
    await without.erase(what)  # who repeats it ends no more of it
    assert without.unfinished == {what: ("one",)}
    await without.stop()
    again, places = clears_in(tmp_path, "one", "two")
    await again.start()
    await until(lambda: not again.unfinished)
    assert places.asked == ["one"]
    await again.stop()


@pytest.mark.guarantee("G12")
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_of_equal_deletions_at_once_the_last_wish_says_what_is_left(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    """The first one succeeds, the second one does not: whoever ends last."""
    clears, _ = clears_in(tmp_path, "one")
    answers = [asyncio.get_running_loop().create_future() for _ in range(2)]
    seen = list[float]()

    async def erase(what: Erasure) -> Cleared:
        seen.append(what.at_s)
        if await answers[int(what.at_s) - 1]:
            return Cleared()
        raise OSError("full")

    clears.places["sessions"]["one"] = erase
    asked = [asyncio.create_task(clears.erase(Erasure("sessions", "t", None, at_s))) for at_s in (1.0, 2.0)]
    await until(lambda: len(seen) == 2)
    for number in order:
        answers[number].set_result(number == 0)
        await asyncio.gather(asked[number], return_exceptions=True)
    assert [one.at_s for one in clears.unfinished] == [2.0]
    await clears.stop()


async def test_two_processes_that_left_parts_of_the_same_leave_both(tmp_path: Path) -> None:
    ingresses = [clears_in(tmp_path, "one", "two") for _ in range(2)]
    for (clears, places), name in zip(ingresses, ("one", "two"), strict=True):
        await clears.start()
        places.broken = {name}
        with pytest.raises(ApiError):
            await clears.erase(Erasure("sessions", "t", None))
    for clears, _ in ingresses:
        await clears.stop()
    alone, places = clears_in(tmp_path, "one", "two")
    await alone.start()
    await until(lambda: not alone.unfinished)
    assert sorted(places.asked) == ["one", "two"]
    await alone.stop()


def test_a_state_that_is_torn_leaves_the_one_before(tmp_path: Path) -> None:
    file = UnfinishedFile(tmp_path)
    assert file.open() == []
    assert file.save([1])
    assert file.save([1, 2])
    assert not file.save(["x" * 2**20]), "it has no room for that"
    file.close()
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    raw = bytearray(path.read_bytes())
    at = raw.index(b"[1, 2]")
    raw[at] ^= 1
    path.write_bytes(raw)
    again = UnfinishedFile(tmp_path)
    assert again.open() == [1]
    assert again.save([3])
    again.close()
    last = UnfinishedFile(tmp_path)
    assert last.open() == [3]
    last.close()


async def test_a_folder_that_cannot_be_written_is_told_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    clears, places = clears_in(tmp_path / "file", "one", "two")
    await clears.start()
    places.broken = {"one"}
    with pytest.raises(ApiError, match="could not be written down"):
        await clears.erase(Erasure("sessions", "t", None))
    assert places.asked == ["one", "two"]
    places.broken.clear()
    await until(lambda: not clears.unfinished)
    await clears.stop()


@pytest.mark.guarantee("G12")
async def test_a_deletion_ends_though_the_ingress_asks_itself_with_all_others(tmp_path: Path) -> None:
    """Each was repeated every two seconds for ever, and what came of the session since was deleted, too."""
    clears, places = clears_in(tmp_path, "one", "front doors")
    clears.places["sessions"]["front doors"] = partial(asked_by_all, clears)
    what = Erasure("sessions", "t", None)
    await clears.start()
    await clears.erase(what)
    assert not clears.unfinished
    assert places.asked == ["one", "one"], "by itself, and as all are asked"
    places.broken = {"one"}
    with pytest.raises(ApiError):
        await clears.erase(what)
    assert "one" in clears.unfinished[what]
    places.broken.clear()
    await until(lambda: not clears.unfinished)
    await clears.stop()


async def asked_by_all(clears: Erasures, what: Erasure) -> Cleared:
    try:
        return await clears.erase_here(Erasure(what.kind, what.tenant, what.names), ["one"])
    except ApiError as left:
        raise Left("an ingress has not forgotten all yet", is_known_there=True) from left


async def test_an_ingress_that_cannot_write_down_what_is_left_says_so_to_who_asked(tmp_path: Path) -> None:
    made = house(tmp_path)
    async with made.client():
        clears = made.service.clears
        places = Places(clears, OSError(errno.ENOSPC, "no room"))
        places.broken = {"summaries of conversations"}
        assert places.broken <= set(clears.places["sessions"])
        with pytest.raises(NotNoted):
            await forget_here(made.service, "t", None)
        (tmp_path / "noted").mkdir()
        noted = Erasures(UnfinishedFile(tmp_path / "noted"), 1.0)
        noted.places |= clears.places
        await noted.start()
        assert await forget_here(replace(made.service, clears=noted), "t", None) == (0, False)
        await noted.stop()
    close(made)


# -- a full disk, and a busy file -------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    with small_disk(tmp_path / "disk", "size=4m,mode=700") as disk:
        yield disk


def fill(folder: Path) -> Path:
    path = folder / "ballast"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    assert shutil.disk_usage(folder).free == 0
    return path


def files_of(folder: Path, *names: str) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name in names]


async def asks_with_knowledge(client: Any) -> None:
    sent = await client.post(
        "/v1/knowledge", json={"kind": "gotcha", "title": "tap", "text": "Turn it left."}
    )
    assert sent.status_code == 201
    body = chat("Where is the tap?", knowledge={}, session_id="s")
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.guarantee("G12")
async def test_a_full_disk_leaves_its_own_part_of_a_deletion_only(small: Path) -> None:
    """The summaries' log cannot be emptied: KV, replies, other ingresses and tiers are cleared."""
    made = house(small)
    link = made.directory.link
    assert isinstance(link, FakeLink)
    await made.service.clears.start()
    async with made.client() as client:
        await asks_with_knowledge(client)
        keeper(made).fitter.summaries.put(("local", bytes(16)), b"link", Summary(1, "x" * 2000, ()))
        ballast = fill(small)
        refused = await client.delete("/v1/sessions/s")
        assert (refused.status_code, error_of(refused)["code"]) == (503, "clear_incomplete"), refused.text
        said = error_of(refused)["message"]
        assert "summaries of conversations" in said
        assert "also after a restart" in said, "written down on a full disk"
        assert "replicas" not in said
        assert len(made.replicas.clears) == 1
        assert [clear.tenant for clear in link.clears] == [tenant_tag(b"secret", "local")]
        (places,) = made.service.clears.unfinished.values()
        assert set(places) <= {"summaries of conversations", "knowledge of conversations"}
        ballast.unlink()
        await until(lambda: not made.service.clears.unfinished, timeout_s=60)
        assert len(made.replicas.clears) == 1, "what is done is not done again"
        assert (await client.delete("/v1/sessions/s")).status_code == 200
    await made.service.clears.stop()
    close(made)


@pytest.mark.guarantee("G12")
async def test_a_busy_file_leaves_its_own_part_of_a_deletion_only(tmp_path: Path) -> None:
    """Another process writes into both files: the entry stays, and all else is done; later it goes, too."""
    made = house(tmp_path)
    await made.service.clears.start()
    async with made.client() as client:
        await asks_with_knowledge(client)
        (entry,) = [one["id"] for one in (await client.get("/v1/knowledge")).json()["data"]]
        files = files_of(tmp_path, "knowledge.sqlite", "compaction.sqlite")
        assert len(files) == 2, files
        with _held(files):
            for path in ("/v1/sessions/s", f"/v1/knowledge/{entry}"):
                refused = await client.delete(path)
                assert (refused.status_code, error_of(refused)["code"]) == (503, "clear_incomplete")
        assert len(made.replicas.clears) == 1
        await until(lambda: not made.service.clears.unfinished, timeout_s=60)
        assert (await client.get(f"/v1/knowledge/{entry}")).status_code == 404
    await made.service.clears.stop()
    close(made)


class _held:
    """Files in which another connection writes."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._held = [sqlite3.connect(path, isolation_level=None) for path in files]

    def __enter__(self) -> None:
        for one in self._held:
            one.execute("BEGIN IMMEDIATE")

    def __exit__(self, *_: object) -> None:
        for one in self._held:
            one.execute("ROLLBACK")
            one.close()


async def test_all_entries_that_are_erased_late_are_those_of_before_the_wish(tmp_path: Path) -> None:
    made = house(tmp_path)
    async with made.client() as client:
        entry = {"kind": "gotcha", "text": "old"}
        assert (await client.post("/v1/knowledge", json=entry)).status_code == 201
        base = made.service.stage("knowledge")
        now_s = base.store.head("local", (await client.get("/v1/knowledge")).json()["data"][0]["id"]).at_s  # type: ignore[union-attr]
        base.store._clock = lambda: now_s + 10  # type: ignore[union-attr]
        assert (await client.post("/v1/knowledge", json={**entry, "text": "new"})).status_code == 201
        erase = made.service.clears.places["entries"]["the knowledge base"]
        assert await erase(Erasure("entries", "local", None, now_s + 5, is_late=True)) == Cleared(entries=1)
        assert [one["text"] for one in (await client.get("/v1/knowledge")).json()["data"]] == ["new"]
        assert await erase(Erasure("entries", "local", None, now_s + 5)) == Cleared(entries=1)
    close(made)


def test_a_service_goes_on_with_its_own_deletions_only(tmp_path: Path) -> None:
    """One that has another knowledge base in the same folder of models must not erase from that."""
    settings = make_settings(knowledge={"enabled": True, "dir": tmp_path / "kb"})
    other = make_settings(knowledge={"enabled": True, "dir": tmp_path / "another"})
    folders = {
        unfinished_dir(settings, b"secret"),
        unfinished_dir(other, b"secret"),
        unfinished_dir(settings, b"another"),
    }
    assert len(folders) == 3
    assert unfinished_dir(make_settings(knowledge={"dir": tmp_path / "kb"}), b"secret") in folders


def test_no_file_is_made_where_nothing_is_started(tmp_path: Path) -> None:
    made = house(tmp_path)
    close(made)
    assert not os.path.exists(tmp_path / "clears")
