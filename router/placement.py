"""Where the blocks of a request's turn may go: its use-case profile, and what the client wishes.

The profile is the request's own, else its tenant's, else the default one. OpenAI's retention and time
to live then narrow or lengthen it. Pure; knows nothing of tiers beyond their names and order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from cache_tiers.extent import Placement, TierName
from configs.tier_settings import ProfileName, ProfileSettings, TierSettings
from router.errors import InvalidValue, shown
from router.parsed_request import CacheWish

PROFILE_HEADER = "x-cache-profile"
PROFILES: tuple[ProfileName, ...] = get_args(ProfileName)

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
TTL_S_MAX = 30 * DAY_S
"""No client keeps blocks for longer; an operator's own profile may."""


def placement(
    settings: TierSettings, tenant: str, headers: Mapping[str, str], wish: CacheWish
) -> Placement | None:
    """The placement of one request's blocks; None when there are no tiers.

    `headers`: lower-case names. Raises `InvalidValue` for a profile that does not exist, used or not.
    """
    name = profile_name(settings, tenant, headers, wish)
    if not settings.enabled:
        return None
    profile: ProfileSettings = getattr(settings.profiles, name)
    lowest, expire_s = profile.lowest, profile.expire_s
    if wish.retention == "in_memory":
        lowest, expire_s = "cpu", HOUR_S
    elif wish.retention == "24h":
        lowest, expire_s = "s3", DAY_S
    keep_s = profile.keep_s
    if wish.ttl_s is not None:
        expire_s = max(expire_s, min(wish.ttl_s, TTL_S_MAX))
        keep_s = wish.ttl_s
    return _within(lowest, profile, min(max(0.0, keep_s), expire_s), expire_s)


def profile_name(
    settings: TierSettings, tenant: str, headers: Mapping[str, str], wish: CacheWish
) -> ProfileName:
    """The use case of one request. Arguments and errors: see `placement`."""
    named, profiles = _profile_of(headers), settings.profiles
    return wish.profile or named or profiles.of_tenant.get(tenant) or profiles.default


def _within(lowest: TierName, profile: ProfileSettings, keep_s: float, expire_s: float) -> Placement:
    """`profile` with nothing below `lowest`, and no tier named twice."""
    whole = Placement(profile.first, profile.behind, lowest, keep_s, expire_s)
    first = profile.first if whole.allows(profile.first) else lowest
    behind = tuple(tier for tier in dict.fromkeys(profile.behind) if whole.allows(tier) and tier != first)
    return Placement(first, behind, lowest, keep_s, expire_s)


def _profile_of(headers: Mapping[str, str]) -> ProfileName | None:
    name = headers.get(PROFILE_HEADER)
    if not name:
        return None
    if name not in PROFILES:
        known = ", ".join(PROFILES)
        raise InvalidValue(PROFILE_HEADER, f"{PROFILE_HEADER}={shown(name)} is none of {known}.")
    return name
