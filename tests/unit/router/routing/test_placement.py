"""Where a request's blocks may go: profiles, tenants, retention and time to live."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.blocks.extent import TAG_BYTES, Placement, session_of, tenant_tag
from samovar.cache_tiers.blocks.tiers import TIERS
from samovar.configs.sections import ProfileSettings, ProfilesSettings, TierSettings
from samovar.replicas.messages import GenerateRequest
from samovar.router.openai.errors import InvalidValue
from samovar.router.openai.parse import CacheWish
from samovar.router.routing.session import DAY_S, HOUR_S, PROFILES, TTL_S_MAX, placement
from tests.support.router.router_harness import KEY, OTHER_KEY, House, chat, error_of, make_settings

CHAT = "/v1/chat/completions"
TIER_SETTINGS = TierSettings(profiles=ProfilesSettings(of_tenant={"library": "documents"}))


def placed(wish: CacheWish | None = None, tenant: str = "team", **headers: str) -> Placement | None:
    return placement(
        TIER_SETTINGS,
        tenant,
        {name.replace("_", "-"): text for name, text in headers.items()},
        wish or CacheWish(),
    )


def test_the_request_names_the_profile_or_its_tenant_or_the_default() -> None:
    assert placed() == Placement("cpu", ("nvme",), "s3", 1800.0, 86400.0)
    assert placed(tenant="library") == Placement("cpu", ("nvme", "s3"), "s3", 1800.0, 86400.0)
    code = Placement("nvme", ("cpu",), "s3", 1800.0, 86400.0)
    assert placed(tenant="library", x_cache_profile="code") == code
    batch = Placement("nvme", (), "s3", 0.0, 86400.0)
    assert placed(CacheWish(profile="batch"), tenant="library", x_cache_profile="code") == batch


def test_a_profile_that_does_not_exist_is_refused_used_or_not() -> None:
    for wish in (CacheWish(), CacheWish(profile="chat")):
        with pytest.raises(InvalidValue) as refused:
            placed(wish, x_cache_profile="chats")
        assert refused.value.param == "x-cache-profile"
        assert "chat, documents, code, batch" in refused.value.message
    with pytest.raises(InvalidValue):
        placement(TierSettings(enabled=False), "t", {"x-cache-profile": "x"}, CacheWish())


@pytest.mark.parametrize("profile", PROFILES)
def test_in_memory_never_leaves_memory(profile: str) -> None:
    wish = CacheWish(profile=profile, retention="in_memory")  # type: ignore[arg-type]
    assert placed(wish) == Placement("cpu", (), "cpu", min(1800.0, placed_keep_s(profile)), HOUR_S)


def placed_keep_s(profile: str) -> float:
    settings: ProfileSettings = getattr(ProfilesSettings(), profile)
    return settings.min_ttl_s


def test_24h_may_sink_to_s3_even_where_the_profile_may_not() -> None:
    in_memory = ProfileSettings(write_behind=("nvme",), lowest="cpu", ttl_s=60, min_ttl_s=60)
    tiers = TierSettings(profiles=ProfilesSettings(chat=in_memory))
    assert placement(tiers, "t", {}, CacheWish()) == Placement("cpu", (), "cpu", 60, 60)
    wish = CacheWish(retention="24h")
    assert placement(tiers, "t", {}, wish) == Placement("cpu", ("nvme",), "s3", 60, DAY_S)


@pytest.mark.parametrize(
    ("retention", "wish_s", "min_ttl_s", "ttl_s"),
    [
        (None, 60.0, 60.0, DAY_S),
        (None, 0.0, 0.0, DAY_S),
        (None, 2 * DAY_S, 2 * DAY_S, 2 * DAY_S),
        (None, 1e300, TTL_S_MAX, TTL_S_MAX),
        ("in_memory", 2 * HOUR_S, 2 * HOUR_S, 2 * HOUR_S),
        ("in_memory", 60.0, 60.0, HOUR_S),
        ("24h", 60.0, 60.0, DAY_S),
    ],
)
def test_g11_time_to_live_is_kept_within_bounds(
    retention: str | None, wish_s: float, min_ttl_s: float, ttl_s: float
) -> None:
    made = placed(CacheWish(retention=retention, ttl_s=wish_s))  # type: ignore[arg-type]
    assert made is not None
    assert (made.min_ttl_s, made.ttl_s) == (min_ttl_s, ttl_s)


@pytest.mark.parametrize(
    ("profile", "wish_s", "marked_s", "min_ttl_s", "ttl_s"),
    [
        (None, None, 300.0, 1800.0, DAY_S),  # the profile keeps it longer
        (None, None, HOUR_S, HOUR_S, DAY_S),
        ("batch", None, 300.0, 300.0, DAY_S),
        (None, 60.0, HOUR_S, 60.0, DAY_S),  # the request's own wish is its last word
        (None, None, 1e300, TTL_S_MAX, TTL_S_MAX),
    ],
)
def test_marked_parts_only_lengthen(
    profile: Any, wish_s: float | None, marked_s: float, min_ttl_s: float, ttl_s: float
) -> None:
    made = placed(CacheWish(profile=profile, ttl_s=wish_s, marked_ttl_s=marked_s))
    assert made is not None
    assert (made.min_ttl_s, made.ttl_s) == (min_ttl_s, ttl_s)


def test_without_tiers_there_is_no_placement() -> None:
    assert placement(TierSettings(enabled=False), "t", {}, CacheWish(retention="24h", ttl_s=9)) is None


TIER = st.sampled_from(TIERS)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    profile=st.builds(
        ProfileSettings, first=TIER, write_behind=st.lists(TIER, max_size=2).map(tuple), lowest=TIER
    ),
    retention=st.sampled_from([None, "in_memory", "24h"]),
    ttl_s=st.none() | st.floats(0, allow_infinity=False),
)
def test_whatever_is_configured_nothing_is_placed_below_the_lowest(
    profile: ProfileSettings, retention: str | None, ttl_s: float | None
) -> None:
    tiers = TierSettings(profiles=ProfilesSettings(chat=profile))
    wish = CacheWish(retention=retention, ttl_s=ttl_s)  # type: ignore[arg-type]
    made = placement(tiers, "t", {}, wish)
    assert made is not None
    assert all(made.allows(tier) for tier in (made.first, *made.write_behind))
    assert len({made.first, *made.write_behind}) == 1 + len(made.write_behind)
    assert 0 <= made.min_ttl_s <= made.ttl_s <= TTL_S_MAX


# In the house -----------------------------------------------------------------------------------


async def asked_for(house: House, key: str = "", body: dict[str, Any] | None = None) -> GenerateRequest:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with house.client(**headers) as client:
        response = await client.post(CHAT, json=chat(**(body or {})))
    assert response.status_code == 200, response.text
    return house.replicas.calls[-1]


async def test_requests_carry_placement_and_tags() -> None:
    house = House(settings=make_settings(keys={"a": KEY, "b": OTHER_KEY}))
    of_a = await asked_for(house, KEY, {"cache_profile": "batch", "session_id": "s"})
    assert of_a.placement == Placement("nvme", (), "s3", 0.0, 86400.0)
    assert of_a.tenant == tenant_tag(b"secret", "a")
    assert session_of(of_a.session) == session_of(bytes.fromhex(house.replicas.session_keys[0])[:TAG_BYTES])
    of_b = await asked_for(house, OTHER_KEY, {"session_id": "s"})
    assert len({of_a.tenant, of_b.tenant, of_a.session, of_b.session}) == 4
    assert {len(tag) for tag in (of_a.tenant, of_b.tenant, of_a.session, of_b.session)} == {TAG_BYTES}
    off = House(settings=make_settings(tiers=TierSettings(enabled=False)))
    assert (await asked_for(off)).placement is None


async def test_a_bad_profile_is_a_400_that_names_the_field() -> None:
    house = House()
    async with house.client() as client:
        in_body = await client.post(CHAT, json=chat(cache_profile="chats"))
        in_header = await client.post(CHAT, json=chat(), headers={"x-cache-profile": "chats"})
    assert (in_body.status_code, error_of(in_body)["param"]) == (400, "cache_profile")
    assert (in_header.status_code, error_of(in_header)["param"]) == (400, "x-cache-profile")
    assert house.replicas.calls == []
