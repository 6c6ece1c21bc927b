"""L14 between nodes: a turn whose blocks come from another node is the turn without a cache, bit for bit.

Where the probe says that this CPU is not exact, within the bound (`tests/support/engines/exactness.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from samovar.cache_tiers.blocks.extent import Bytes, Placement
from samovar.cache_tiers.blocks.record import decode_header
from samovar.cache_tiers.blocks.tiers import TierName
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.s3 import S3Tier
from samovar.cache_tiers.media.tier import Tier
from samovar.cache_tiers.transport.link import Export, LinkLate
from samovar.cache_tiers.transport.peers import LazyLink, PeerLate
from samovar.cache_tiers.transport.tls_link import TlsLink
from samovar.cluster.launch.authority import certify, new_authority
from samovar.configs.tls import NodeTls, tls_in
from samovar.replicas.messages import GenerateRequest, Route
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import MIB, Prefilled, Tiered, receipt_of, same, tiered
from tests.support.inside import join_scans, link_of, records_in
from tests.support.nodes.damages import one_bit, wrong_blocks
from tests.support.nodes.peer_harness import FakeLink, World
from tests.support.services.rclone import s3_server

NEW_TURN = 21
pytestmark = pytest.mark.timeout(300)


def engine_of(
    world: World,
    name: str,
    model: Path,
    folder: Path,
    *,
    tls: NodeTls | None = None,
    tiers: dict[TierName, Tier] | None = None,
    **engine_settings: object,
) -> Tiered:
    """An engine on a node of its own; its requests name both nodes as peers. `tls`: they speak it."""
    way = LazyLink(lambda: FakeLink(f"{name}:link", world, 16 * MIB))
    if tls is not None:
        made = partial(TlsLink, f"{name}:link", tls, "127.0.0.1", bytes_max=16 * MIB, lease_s=60.0)
        way = LazyLink(made, way="tls")
    link: dict[str, Any] = {"peer_calls": world, "link": way}
    tiers = tiers or {"cpu": HeapTier(64 * MIB)}
    engine = tiered(model, folder / name, tiers=tiers, node=link, **engine_settings)
    engine.node.peers._node_id = name
    engine.node.peers.exports._agent = f"{name}:link"
    engine.placement = Placement(first="cpu", write_behind=())
    world.nodes[name] = engine.node
    return engine


def prefill(engine: Tiered, prompt: list[int], peers: tuple[str, ...] = ("a", "b")) -> Prefilled:
    """As `Tiered.prefill`, with a route."""
    real = engine.driver.engine.requests.add

    def add(key: int, request: GenerateRequest) -> object:
        return real(key, replace(request, route=Route(peers=peers)))

    engine.driver.engine.requests.add = add  # type: ignore[method-assign, assignment]
    try:
        return engine.prefill(prompt, logprobs=5)
    finally:
        engine.driver.engine.requests.add = real  # type: ignore[method-assign]


def first_turn(engine: Tiered, length: int) -> list[int]:
    prompt = prompt_of(length, seed=length)
    answer = engine.run(prompt)
    return [*prompt, *answer.ids, *prompt_of(NEW_TURN, seed=length + 1)]


def truth(model: Path, folder: Path, prompt: list[int], kv_dtype: str = "auto") -> Prefilled:
    bare = tiered(model, folder / "none", tiers={}, prefix_reuse=False, kv_dtype=kv_dtype)
    return bare.prefill(prompt, logprobs=5)


@pytest.mark.parametrize(
    ("length", "kv_dtype"), [(15, "auto"), (16, "auto"), (41, "auto"), (90, "auto"), (90, "int8")]
)
@pytest.mark.parametrize("way", ["nixl", "ray"])
def test_l14_a_turn_that_went_to_another_node_is_the_same(
    tiny_llama: Path, tmp_path: Path, length: int, kv_dtype: str, way: str
) -> None:
    world = World()
    a, b = (engine_of(world, name, tiny_llama, tmp_path, kv_dtype=kv_dtype) for name in "ab")
    prompt = first_turn(a, length)
    if way == "ray":
        link_of(b.node.peers).get()
        world.links["b:link"].fault = LinkLate("slow")
    returned = prefill(b, prompt)
    same(returned, truth(tiny_llama, tmp_path, prompt, kv_dtype))
    receipt = receipt_of(returned[0])
    assert receipt.tokens["peer"] == length + 8 - 1
    assert receipt.tokens["compute"] == NEW_TURN + 1
    assert b.node.stats().peers["a"].pulls == {way: 1}
    b.forget_pool()
    again = prefill(b, prompt)  # it lives here now
    same(again, truth(tiny_llama, tmp_path, prompt, kv_dtype))
    assert receipt_of(again[0]).tokens.get("peer", 0) == 0
    assert receipt_of(again[0]).tokens["cpu"] >= length + 7


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_l14_a_turn_that_came_over_tls_is_the_same(tiny_llama: Path, tmp_path: Path, kv_dtype: str) -> None:
    certify(new_authority("tea"), ("127.0.0.1",), tmp_path / "tls")
    world, tls = World(), tls_in(tmp_path / "tls")
    a, b = (engine_of(world, name, tiny_llama, tmp_path, tls=tls, kv_dtype=kv_dtype) for name in "ab")
    prompt = first_turn(a, 90)
    returned = prefill(b, prompt)
    same(returned, truth(tiny_llama, tmp_path, prompt, kv_dtype))
    assert receipt_of(returned[0]).tokens["peer"] == 90 + 8 - 1
    assert b.node.stats().peers["a"].pulls == {"tls": 1}
    for one in (a, b):
        one.node.peers.close()


@pytest.mark.parametrize("is_checked", [True, False])
def test_l14_fires_when_other_bytes_come_over_tls_and_nobody_checks(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_checked: bool
) -> None:
    """The planted bug, with the checks (it comes by Ray, and is the same) and without."""
    certify(new_authority("tea"), ("127.0.0.1",), tmp_path / "tls")
    world, tls = World(), tls_in(tmp_path / "tls")
    a, b = (engine_of(world, name, tiny_llama, tmp_path, tls=tls) for name in "ab")
    prompt = first_turn(a, 60)
    real = TlsLink.bring

    def spoilt(self: TlsLink, export: Export, deadline_s: float) -> Bytes | None:
        data = real(self, export, deadline_s)
        assert data is not None
        wrong_blocks(data)
        return data

    monkeypatch.setattr(TlsLink, "bring", spoilt)
    if not is_checked:
        monkeypatch.setattr(
            "samovar.replicas.offload.load.good_blocks", lambda header, payload, first: header.blocks - first
        )
        monkeypatch.setattr(
            "samovar.cache_tiers.node.peers.verified", lambda data, address, nbytes: decode_header(data)
        )
    returned, wanted = prefill(b, prompt), truth(tiny_llama, tmp_path, prompt)
    assert receipt_of(returned[0]).tokens["peer"] > 0
    if is_checked:
        same(returned, wanted)
        assert b.node.stats().peers["a"].pulls == {"ray": 1}
    else:
        with pytest.raises(AssertionError, match="the KV differs"):
            same(returned, wanted)
    for one in (a, b):
        one.node.peers.close()


def test_l14_what_came_is_not_stored_again_and_what_did_not_come_is(tiny_llama: Path, tmp_path: Path) -> None:
    world = World()
    a, b = (engine_of(world, name, tiny_llama, tmp_path) for name in "ab")
    prompt = first_turn(a, 90)
    returned = prefill(b, prompt)
    same(returned, truth(tiny_llama, tmp_path, prompt))
    rows = b.node.stats()
    assert rows.moves["peer>cpu:committed"] == 1
    assert rows.moves["replica>cpu:committed"] == 1  # the new turn
    records = [decode_header(data) for data in records_in(b.tiers["cpu"]).values()]
    keys = [key for header in records for key in header.keys]
    assert len(set(keys)) == len(keys), "a block was stored twice"

    world2 = World()
    c, d = (engine_of(world2, name, tiny_llama, tmp_path) for name in "ab")
    prompt = first_turn(c, 90)
    world2.faults["a", "export"] = world2.faults["a", "read"] = PeerLate("slow")
    same(prefill(d, prompt), truth(tiny_llama, tmp_path, prompt))
    headers = [decode_header(data) for data in records_in(d.tiers["cpu"]).values()]
    assert min(header.first_block for header in headers) == 0  # what nobody gave it is here from now on


@pytest.mark.parametrize(("spoil", "is_exact"), [(one_bit, True), (wrong_blocks, False)])
def test_l14_fires_when_a_peer_gives_other_bytes_and_nobody_checks(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Bytes], None],
    is_exact: bool,
) -> None:
    """The planted bug, both branches of the law on any CPU: with all checks off, wrong bytes are seen.

    Equality is shown against what came whole: the same chunks, so the same bits on every CPU.
    """
    monkeypatch.setattr(
        "samovar.replicas.offload.load.good_blocks", lambda header, payload, first: header.blocks - first
    )
    monkeypatch.setattr(
        "samovar.cache_tiers.node.peers.verified", lambda data, address, nbytes: decode_header(data)
    )

    def pulled(spoil: Callable[[Bytes], None] | None) -> Prefilled:
        world = World()
        a, b = (engine_of(world, name, tiny_llama, tmp_path) for name in "ab")
        prompt = first_turn(a, 60)
        link_of(b.node.peers).get()
        if spoil is not None:
            world.links["b:link"].spoil = spoil
        returned = prefill(b, prompt)
        assert receipt_of(returned.answer).tokens["peer"] > 0
        if spoil is None:
            same(returned, truth(tiny_llama, tmp_path, prompt))
        return returned

    good = pulled(None)
    same(pulled(None), good, is_exact)
    with pytest.raises(AssertionError, match="the KV differs"):
        same(pulled(spoil), good, is_exact)


def test_l14_many_turns_between_two_nodes_never_drift(tiny_llama: Path, tmp_path: Path) -> None:
    """Eight turns, each on the other node than the last one."""
    world = World()
    engines = [engine_of(world, name, tiny_llama, tmp_path) for name in "ab"]
    prompt = prompt_of(40, seed=1)
    for turn in range(8):
        engine = engines[turn % 2]
        returned = prefill(engine, prompt)
        same(returned, truth(tiny_llama, tmp_path, prompt))
        if turn:
            receipt = receipt_of(returned[0])
            assert receipt.tokens["compute"] == 1 + 7
            assert receipt.tokens["peer"] > 0
        prompt = [*prompt, *returned[0].ids, *prompt_of(7, seed=turn)]
        engine.forget_pool()


def test_l14_what_a_named_node_has_put_into_s3_is_a_hit_before_this_one_has_looked_there(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """As a prefilled document's: all of it is in S3 only, and the chat names where it was computed."""
    world = World()
    with s3_server(tmp_path / "s3") as settings:
        nodes = []
        for name in "abc":
            s3 = S3Tier(settings, wall_clock=lambda: 1_700_000_000.0)
            tiers: dict[TierName, Tier] = {"cpu": HeapTier(64 * MIB), "s3": s3}
            nodes.append(engine_of(world, name, tiny_llama, tmp_path, tiers=tiers))
            join_scans(nodes[-1].node, 30)
        a, b, c = nodes
        a.placement = Placement("s3", (), "s3")
        document = prompt_of(96, seed=7)
        a.run(document, max_tokens=1)
        held = {row.name: row.extents for row in a.node.stats().tiers}
        assert (held["cpu"], held["s3"] > 0) == (0, True), "nothing is kept in the other node's memory"
        prompt = [*document, *prompt_of(NEW_TURN, seed=8)]
        expected = truth(tiny_llama, tmp_path, prompt)
        unnamed = prefill(c, prompt, peers=())
        same(unnamed, expected)
        assert receipt_of(unnamed[0]).tokens["compute"] == len(prompt), "the check can see it"
        named = prefill(b, prompt, peers=("a",))
        same(named, expected)
        receipt = receipt_of(named[0])
        assert receipt.tokens["peer"] >= len(document) - 16
        assert receipt.tokens["compute"] <= NEW_TURN + 16
        for one in nodes:
            for tier in one.tiers.values():
                tier.close()
