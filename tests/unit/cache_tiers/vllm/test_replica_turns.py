"""What a replica says of its turns, and what it is told of them."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from samovar.cache_tiers.blocks import TAG_BYTES, Clear, Placement, kept_blocks
from samovar.cache_tiers.vllm.messages import ConnectorOptions
from samovar.cache_tiers.vllm.names.chain import chain_keys
from samovar.cache_tiers.vllm.replica_turn import (
    LEFT_MAX,
    FromConnector,
    PromptTold,
    ReplicaTurn,
    StoresTold,
    Told,
    ToReplica,
    TurnTold,
)
from samovar.cache_tiers.vllm.scheduler import Hearers
from tests.support.fake_vllm import BLOCK_TOKENS, FakeRequest, FakeVllm, prompt
from tests.unit.cache_tiers.vllm.test_connector_laws import Node, engines, node
from tests.unit.cache_tiers.vllm.test_scheduler_prices import DEAR, Clock, half

__all__ = ["engines", "node"]

TENANT, SESSION = b"t" * TAG_BYTES, b"s" * TAG_BYTES


def turn(key: int, **of: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"tenant": TENANT, "session": SESSION, "placement": Placement()} | of
    return ReplicaTurn(key, **said).params()


class Telling:
    """An engine of a replica, and what its connector tells."""

    def __init__(self, engines: Any) -> None:
        self.told: list[Told] = []
        self.engine: FakeVllm = engines(tell=self.told.append)

    def run(self, key: int, ids: list[int], **of: Any) -> int:
        return self.engine.run(self.engine.request(ids, kv_transfer_params=turn(key, **of)))

    def of(self, kind: type[Told], key: int) -> Any:
        (found,) = (one for one in self.told if isinstance(one, kind) and getattr(one, "key", key) == key)
        return found

    def until_held(self, ids: list[int], key: int, **of: Any) -> int:
        ends_s = time.monotonic() + 60
        while not (loaded := self.run(key, ids, **of)):
            assert time.monotonic() < ends_s
            self.engine.settle()
            key += 1
        return key if loaded else 0


def test_a_turn_is_told_once_where_it_came_from(engines: Any) -> None:
    telling, ids = Telling(engines), prompt(1, 10)
    assert telling.run(0, ids) == 0
    assert telling.of(PromptTold, 0) == PromptTold(0, 0, {}, 0.0, "nothing there")
    key = telling.until_held(ids, 1)
    told = telling.of(PromptTold, key)
    assert (told.tokens_by_tier, told.asked_tokens) == ({"cpu": 10 * BLOCK_TOKENS}, 10 * BLOCK_TOKENS)
    assert told.load_s > 0
    telling.engine.settle()
    assert [one for one in telling.told if isinstance(one, StoresTold)][-1] == StoresTold(0)


def test_nothing_is_told_while_a_load_runs(engines: Any) -> None:
    telling, ids = Telling(engines), prompt(1, 10)
    key, whole, asked = telling.until_held(ids, 0) + 1, telling.engine.received, list[int]()

    def received(request: FakeRequest) -> set[int]:
        assert telling.engine.scheduler.matched(request, 0) == 0  # vLLM asks again what it has asked
        asked.append(len([one for one in telling.told if isinstance(one, PromptTold) and one.key == key]))
        return whole(request)

    telling.engine.received = received  # type: ignore[method-assign]
    assert telling.run(key, ids) == 10 * BLOCK_TOKENS
    assert asked == [0]
    assert telling.of(PromptTold, key).tokens_by_tier == {"cpu": 10 * BLOCK_TOKENS}


def test_what_could_not_be_loaded_is_not_told_as_loaded(engines: Any, node: Node) -> None:
    telling, ids = Telling(engines), prompt(1, 10)
    telling.until_held(ids, 0)
    telling.engine.settle()
    assert node.process is not None
    node.process.close()
    for file in (node.folder / "kv").rglob("*"):
        if file.is_file() and file.stat().st_size > 4096:
            data = bytearray(file.read_bytes())
            data[-1] ^= 1  # the last block's
            file.write_bytes(data)
    node.start()
    ends_s = time.monotonic() + 60
    key = 1000
    while not (loaded := telling.run(key, ids)):
        assert time.monotonic() < ends_s
        key += 1
    told = telling.of(PromptTold, key)
    assert sum(told.tokens_by_tier.values()) == loaded
    assert told.asked_tokens >= loaded


def test_the_marks_of_its_chain_are_told_when_it_ends(engines: Any) -> None:
    telling, ids = Telling(engines), prompt(1, 10)
    telling.run(3, ids)
    marks = telling.of(TurnTold, 3).marks
    assert telling.engine.scheduler.namespace is not None
    keys = chain_keys(telling.engine.scheduler.namespace, ids, [], BLOCK_TOKENS)
    assert kept_blocks(marks, b"".join(keys)) == 10


def test_it_is_stored_as_its_tenant_where_its_placement_says_and_cleared_by_its_tags(
    engines: Any, node: Node
) -> None:
    telling, ids = Telling(engines), prompt(1, 10)
    telling.until_held(ids, 0, placement=Placement(write_behind=(), lowest="cpu"))
    telling.engine.settle()
    assert node.process is not None
    assert {one.name: one.blocks > 0 for one in node.process.stats().tiers} == {
        "cpu": True,
        "nvme": False,
        "s3": False,
    }
    link = telling.engine.links[0]
    assert link.clear(Clear(b"o" * TAG_BYTES), 10).extents == 0
    assert link.clear(Clear(TENANT, b"o" * TAG_BYTES), 10).extents == 0
    assert link.clear(Clear(TENANT, SESSION), 10).extents > 0


RECEIPT: dict[str, Any] = {"samovar": {"tokens_by_tier": {"cpu": 16}, "missed": ""}}


@pytest.mark.parametrize("params", [None, {}, turn(1, placement=None), RECEIPT])
def test_what_is_none_of_its_turns_or_has_no_placement_is_neither_stored_nor_told(
    engines: Any, node: Node, params: Any
) -> None:
    telling, ids = Telling(engines), prompt(1, 10)
    telling.engine.run(telling.engine.request(ids, kv_transfer_params=params))
    telling.engine.settle()
    assert telling.told == []
    assert node.process is not None
    assert not any(one.blocks for one in node.process.stats().tiers)


def test_a_replica_hears_at_a_socket_of_its_own_what_is_told(tmp_path: Path) -> None:
    hears = FromConnector(tmp_path / "made" / "told.sock")
    assert (tmp_path / "made" / "told.sock").stat().st_mode & 0o777 == 0o600
    tells = ToReplica(hears.path)
    said: list[Told] = [PromptTold(1, 32, {"cpu": 16, "n2": 16}, 0.5, "late"), StoresTold(2)]
    hears.hide()
    assert not hears.path.parent.exists(), "of a replica that is killed something is left"
    for one in said:
        tells.tell(one)
    assert list(hears.heard()) == said
    hears.close()
    tells.tell(StoresTold(0))  # nobody hears it, and nothing is raised
    tells.close()
    assert not hears.path.exists()


def test_where_no_replica_is_none_is_told(tmp_path: Path) -> None:
    tells = ToReplica(tmp_path / "told.sock")
    tells.tell(StoresTold(1))
    tells.close()


class OwnSalt(FakeRequest):
    cache_salt = "mine"


def test_a_salt_is_believed_of_a_replica_alone(engines: Any) -> None:
    for tell, believed in ((None, "mine"), (list[Told]().append, "01")):
        seen: list[str] = []

        def extra_of(request: Any, tokens: int, seen: list[str] = seen) -> list[bytes]:
            seen.append(request.cache_salt)
            return []

        engine: FakeVllm = engines(tell=tell, extra_of=extra_of)
        engine.run(OwnSalt("r", prompt(1, 4), kv_transfer_params=turn(1, salt=b"\x01")))
        assert set(seen) == {believed}


def test_how_many_turns_are_stored_is_told_once_a_step_and_the_first_at_once(engines: Any) -> None:
    telling = Telling(engines)
    scheduler, requests = telling.engine.scheduler, []
    for key in range(3):
        request = telling.engine.request(prompt(key, 4), kv_transfer_params=turn(key))
        scheduler.begin(request)
        assert telling.engine.matched(request) == 0
        requests.append((request, [telling.engine.free.pop() for _ in range(6)]))
    for request, pages in requests:
        telling.engine.compute(request, pages, 0, 5, None)
        assert scheduler.ended(request, pages, "stop")[0]

    def saving() -> list[int]:
        return [one.saving for one in telling.told if isinstance(one, StoresTold)]

    assert saving() == [1]  # before its replica hears the turn's end
    scheduler.step(0, 0)
    scheduler.step(0, 0)
    assert saving() == [1, 3]
    scheduler.stepped((), [request.request_id for request, _ in requests], (), {})
    assert saving() == [1, 3, 0]


def test_what_finds_no_room_is_not_waited_for_and_is_told_later(tmp_path: Path) -> None:
    hears = FromConnector(tmp_path / "told.sock")
    tells, began_s = ToReplica(hears.path), time.monotonic()
    said = [PromptTold(number, why="x" * 200) for number in range(5000)]
    tells.tell(StoresTold(1))
    for one in said:
        tells.tell(one)
    tells.tell(StoresTold(2))
    tells.tell(StoresTold(0))
    assert time.monotonic() - began_s < 20
    heard = list(hears.heard())
    assert 0 < len(heard) < LEFT_MAX
    assert heard == [StoresTold(1), *said[: len(heard) - 1]]
    later: list[Told] = []
    while tells.resend():
        later += hears.heard()
    later += hears.heard()
    assert later == [StoresTold(0), *said[-LEFT_MAX:]]  # the newest, and as many as are kept
    tells.close()
    hears.close()


def test_a_connector_that_has_something_left_to_tell_steps_on(tmp_path: Path) -> None:
    hears = FromConnector(tmp_path / "told.sock")
    tells, said = ToReplica(hears.path), [PromptTold(number) for number in range(100)]
    scheduler = half(DEAR, Clock(), hearers=Hearers(False, tells.tell, tells.resend))
    for one in said:
        tells.tell(one)
    heard: list[Told] = []
    while scheduler.is_waiting:  # else vLLM would not step
        assert len(heard) < 100
        heard += hears.heard()
        scheduler.step(0, 0, is_idle=True)
    assert [*heard, *hears.heard()] == said
    hears.close()
    tells.tell(StoresTold(0))
    assert not scheduler.is_waiting, "it steps for a replica that has ended"
    tells.close()


def test_the_option_is_checked() -> None:
    options = ConnectorOptions.of({"socket": "/s", "replica": "/r"})
    assert options.replica == Path("/r")
    with pytest.raises(ValueError, match="replica"):
        ConnectorOptions.of({"socket": "/s", "replica": 3})


def test_a_request_that_says_something_else_is_no_turn() -> None:
    assert ReplicaTurn.of(SimpleNamespace(kv_transfer_params={"samovar": "x"})) is None
    with pytest.raises(ValueError, match="tags"):
        ReplicaTurn.of(SimpleNamespace(kv_transfer_params=ReplicaTurn(1, b"short", SESSION).params()))
    for said in (RECEIPT, {"samovar": turn(1)["samovar"] | {"salt": 3}}, {"samovar": {}}):
        with pytest.raises(ValueError, match="no turn of a replica"):
            ReplicaTurn.of(SimpleNamespace(kv_transfer_params=said))
