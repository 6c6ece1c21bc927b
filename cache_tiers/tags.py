"""Tags: how the tiers name tenants, without knowing their names."""

from __future__ import annotations

import hmac

from cache_tiers.extent import TAG_BYTES


def tenant_tag(server_secret: bytes, tenant: str) -> bytes:
    """`TAG_BYTES` that stand for a tenant in records, quotas and clears."""
    digest = hmac.digest(server_secret, b"samovar tenant tag\0" + tenant.encode(), "sha256")
    return digest[:TAG_BYTES]
