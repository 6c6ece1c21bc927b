"""Settings that name tenants, by the tags that replicas and tiers know them by, and tenants' shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from cache_tiers.tags import tenant_tag
from configs.settings import AuthSettings, Settings
from configs.tier_settings import TierSettings

Value = TypeVar("Value")


def by_tag(auth: AuthSettings, of_tenant: Mapping[str, Value]) -> dict[bytes, Value]:
    """Tenant's tag -> value. Nothing without the secret that tags are made with: no tenants then."""
    if auth.server_secret is None:
        return {}
    key = auth.server_secret.get_secret_value().encode()
    return {tenant_tag(key, tenant): value for tenant, value in of_tenant.items()}


def shared_tiers(settings: Settings) -> TierSettings:
    """The tiers' settings with the share of one tenant filled in: the tiers know no keys."""
    share = settings.share_of_tenant(settings.tiers.tenant_share)
    return settings.tiers.model_copy(update={"tenant_share": share})
