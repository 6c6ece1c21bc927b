"""What an audience is shown: where blocks are, whose they are, and that a message has a size."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from samovar.cache_tiers.messages import LineageGlance, NodeGlance, NodeStats, ResumptionStats, TierStats
from samovar.cache_tiers.sessions.session_table import SessionRow, SessionView
from samovar.configs.optional_sections import LiveSettings
from samovar.replicas.messages import EngineStats, ReplicaGlance
from samovar.router.generation import TenantUsage
from samovar.router.observe.live.feed import Audience, Json, encoded
from samovar.router.observe.live.state import LEFT_OUT, Seen, Shown, fitted, owner_of, state_of
from tests.support.router.fake_replica import INFO

TENANT = b"t" * 16
ALL, ONE = Audience(None, True), Audience("a", False)
LIVE = LiveSettings()


def row(number: int = 1, lineage: int = 1, **more: object) -> SessionRow:
    tag = bytes([number]) * 8 + bytes([lineage]) * 8
    fields = {
        "home": "replica-1",
        "nodes": ("n1", "n2"),
        "tokens": 64,
        "turns": 2,
        "used_unix_s": 50.0,
        **more,
    }
    return SessionRow(TENANT, tag, 1, **fields)  # type: ignore[arg-type]


def shown(*rows: SessionRow, audience: Audience = ALL) -> Shown:
    return Shown(audience, [SessionView((one,)) for one in rows], False, TenantUsage(), 0.0)


def seen(nodes: dict[str, dict[bytes, LineageGlance]] | None, pooled: dict[bytes, int] | None = None) -> Seen:
    stats = EngineStats("replica-1", running=1)
    return Seen(
        100.0,
        infos=[INFO],
        replicas=[ReplicaGlance(stats, pooled or {})],
        nodes=None if nodes is None else {name: NodeGlance(of, node(name)) for name, of in nodes.items()},
        homes={"replica-1": "n1"},
        names={TENANT: "a"},
    )


def node(name: str, **returns: object) -> NodeStats:
    tier = TierStats("cpu", "up", bytes_held=5, bytes_max=10)
    return NodeStats(name, "1", 0, (tier,), returns=ResumptionStats(**returns))  # type: ignore[arg-type]


def built(of: Shown, at: Seen, before: Json | None = None) -> Json:
    return state_of(of, at, "tiny", LIVE, before)


def lineage(state: Json) -> Json:
    (session,) = state["sessions"].values()
    (one,) = session["lineages"].values()
    found: Json = one
    return found


def test_blocks_are_counted_where_they_are_seen_from_the_lineage_s_home() -> None:
    one = row()
    home = LineageGlance({"cpu": 10, "s3": 30}, {"cpu": 1, "s3": 3}, (("cpu", 1), ("s3", 2)))
    other = LineageGlance({"nvme": 20, "s3": 40}, {"nvme": 2, "s3": 4}, (("nvme", 1),))
    state = built(
        shown(one), seen({"n2": {owner_of(one): other}, "n1": {owner_of(one): home}}, {owner_of(one): 4})
    )
    told = lineage(state)
    assert told["blocks"] == {"gpu": 4, "cpu": 1, "nvme": 0, "s3": 4, "peer": 2}
    assert told["bytes"] == {"gpu": 4 * 16, "cpu": 10, "nvme": 0, "s3": 40, "peer": 20}
    assert told["runs"] == [["cpu", 1], ["s3", 2]]


def test_what_a_pool_holds_of_it_is_none_where_an_engine_does_not_say() -> None:
    one = row()
    home = LineageGlance({"cpu": 10}, {"cpu": 1}, (("cpu", 1),))
    silent = ReplicaGlance(EngineStats("replica-2"), None)
    at = seen({"n1": {owner_of(one): home}}, {owner_of(one): 4})
    told = lineage(built(shown(one), replace(at, replicas=[*at.replicas, silent])))
    assert (told["blocks"]["gpu"], told["bytes"]["gpu"], told["blocks"]["cpu"]) == (None, None, 1)
    assert lineage(built(shown(one), replace(at, replicas=[])))["blocks"]["gpu"] == 0


def test_bytes_in_pools_are_those_of_each_replica_s_own_model() -> None:
    one, other = row(), row(2)
    infos = [INFO, replace(INFO, replica_id="replica-2", block_tokens=32, bytes_per_token=3)]
    pools = [
        ReplicaGlance(EngineStats("replica-1"), {owner_of(other): 1}),
        ReplicaGlance(EngineStats("replica-2"), {owner_of(one): 4, owner_of(other): 2}),
    ]
    at = replace(seen({"n1": {}}), infos=infos, replicas=pools)
    told = lineage(built(shown(one), at))
    assert (told["blocks"]["gpu"], told["bytes"]["gpu"]) == (4, 4 * 32 * 3)
    assert lineage(built(shown(other), at))["bytes"]["gpu"] == 16 + 2 * 32 * 3
    unknown = replace(at, infos=infos[:1])
    assert lineage(built(shown(one), unknown))["bytes"]["gpu"] == 4 * 16


def test_what_only_another_node_holds_is_a_peer_s() -> None:
    one = row()
    far = LineageGlance({"cpu": 10}, {"cpu": 1}, (("none", 1), ("cpu", 1)))
    told = lineage(built(shown(one), seen({"n1": {}, "n2": {owner_of(one): far}})))
    assert (told["blocks"]["cpu"], told["blocks"]["peer"]) == (0, 1)
    assert told["runs"] == [["none", 1], ["peer", 1]]


def test_without_the_directory_places_are_unknown_and_the_rest_is_told() -> None:
    told = lineage(built(shown(row()), seen(None)))
    assert "blocks" not in told
    assert (told["tokens"], told["running"]) == (64, False)


def test_the_start_of_an_idle_time_does_not_flicker_between_two_clocks() -> None:
    one = row()
    before: Json | None = None
    starts = []
    for at, ago in ((100.0, 5.0), (100.5, 5.9), (101.0, 4.2)):
        glance = LineageGlance(survival=(0.5,), since_ago_s=ago)
        before = built(shown(one), replace(seen({"n1": {owner_of(one): glance}}), unix_s=at), before)
        starts.append(lineage(before)["forecast"]["since_unix_s"])
    assert starts == [95.0, 95.0, 96.8]


def test_of_a_session_the_conversation_stays_whatever_is_asked_beside_it() -> None:
    main = row(turns=5, used_unix_s=1.0)
    aside = [row(1, number, turns=1, used_unix_s=float(number)) for number in range(20, 2, -1)]
    view = Shown(ALL, [SessionView((*aside, main))], False, TenantUsage(), 0.0)
    (session,) = built(view, seen({}))["sessions"].values()
    assert len(session["lineages"]) == LIVE.lineages_max
    assert [one["turns"] for one in session["lineages"].values() if one["main"]] == [5]


def test_a_tenant_s_state_tells_of_no_one_else_and_a_cluster_s_of_all() -> None:
    at = seen({"n1": {}})
    own, every = built(shown(row(), audience=ONE), at), built(shown(row()), at)
    assert own.keys() == {"t", "scope", "tenant", "totals", "sessions", "forecast_at_s", "model"}
    assert (own["scope"], own["tenant"]) == ("tenant", "a")
    assert every["scope"] == "cluster"
    assert "tenant" not in every
    assert every["replicas"]["replica-1"]["node"] == "n1"
    tiers = every["nodes"]["n1"]["tiers"]
    assert tiers["cpu"] == {"state": "up", "used_bytes": 5, "limit_bytes": 10, "tokens": 0, "hit_blocks": 0}
    assert [[one.get("tenant") for one in state["sessions"].values()] for state in (own, every)] == [
        [None],
        ["a"],
    ]


@pytest.mark.parametrize("loss", [math.inf, math.nan, 0.5])
def test_a_state_holds_no_null_and_only_numbers_that_json_has(loss: float) -> None:
    of = {"model_loss": loss, "calibration": ((0.1, 0.2, 3),)}
    at = replace(seen({}), nodes={"n1": NodeGlance({}, node("n1", **of))})
    state = built(shown(row(home="", nodes=())), at)
    assert b"null" not in encoded(state)
    predictor = state["nodes"]["n1"]["predictor"]
    assert ("log_loss" in predictor) == math.isfinite(loss)
    assert predictor["calibration"] == {"horizon_s": 600.0, "points": [[0.1, 0.2, 3]]}


def test_a_message_has_a_size_and_what_does_not_fit_is_named() -> None:
    state = built(shown(*(row(number) for number in range(50))), seen({}))
    whole = len(encoded(state))
    assert fitted(state, whole) == state
    cut = fitted(state, whole // 3)
    assert len(encoded(cut)) <= whole // 3
    names = list(state["sessions"])
    assert list(cut["sessions"]) == names[: len(cut["sessions"])], "the latest used stay"
    assert cut["sessions"]
    assert cut[LEFT_OUT] == ["sessions"]
    assert fitted(state, 10)[LEFT_OUT] == ["replicas", "sessions"]
