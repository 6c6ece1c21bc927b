"""What the scheduler's half of the connector hands to the worker's half, and their options. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samovar.cache_tiers.blocks import SESSION_BYTES, TAG_BYTES, Placement, tenant_tag
from samovar.cache_tiers.messages import BlockRange

EXTENT_BYTES_MAX = 16 * 1024 * 1024
"""As `tiers.extent_bytes_max` is by default: an extent is what is loaded, checked and evicted at once."""


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """`kv_connector_extra_config`, checked.

    `socket`: the tiers'. `tenant`: whose blocks these are, for quotas and clears. `trusts_clients`: the
    `tenant` and `session` in a request's `kv_transfer_params` are believed. `lookup_s_max`: a request waits
    so long for an answer of the tiers at most, `load_s_max` for its blocks. `secret`: of the tags. `replica`:
    where a replica of Samovar hears what becomes of its turns; requests that are none of them are not stored.
    """

    socket: Path
    tenant: str = "vllm"
    trusts_clients: bool = False
    lookup_s_max: float = 4.0
    load_s_max: float = 10.0
    secret: str = ""
    replica: Path | None = None

    @staticmethod
    def of(extra: Mapping[str, Any]) -> ConnectorOptions:
        """Return the options. Raises `ValueError` naming the key, its value and the fix."""
        known = {"socket": str, "tenant": str, "trusts_clients": bool, "secret": str, "replica": str}
        numbers = ("lookup_s_max", "load_s_max")
        for key, value in extra.items():
            if key in numbers:
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 600:
                    raise ValueError(
                        f"kv_connector_extra_config.{key} is {value!r}: seconds, above 0 up to 600"
                    )
            elif key not in known:
                names = ", ".join((*known, *numbers))
                raise ValueError(f"kv_connector_extra_config.{key} is not known; there are {names}")
            elif not isinstance(value, known[key]):
                raise ValueError(
                    f"kv_connector_extra_config.{key} is {value!r}: give a {known[key].__name__}"
                )
        if not extra.get("socket"):
            raise ValueError(
                "kv_connector_extra_config.socket is missing: as in `samovar tiers --socket PATH`"
            )
        paths = {name: Path(extra[name]).expanduser() for name in ("socket", "replica") if extra.get(name)}
        return ConnectorOptions(**{**extra, **paths})

    def owner_of(self, request: Any) -> tuple[bytes, bytes]:
        """Return the tags of tenant and session. What a client says of itself counts only where it may."""
        said = getattr(request, "kv_transfer_params", None) or {}
        trusts = self.trusts_clients and isinstance(said, dict)
        tenant = said.get("tenant") if trusts else None
        session = (said.get("session") if trusts else None) or getattr(request, "session_id", None)
        tag = self.tag_of(tenant if isinstance(tenant, str) and tenant else self.tenant)
        if not isinstance(session, str) or not session:
            session = request.request_id
        return tag, tenant_tag(tag, session)[:SESSION_BYTES].ljust(TAG_BYTES, b"\0")

    def tag_of(self, tenant: str) -> bytes:
        """Return what stands for a tenant on disk."""
        return tenant_tag(self.secret.encode() or b"samovar vllm", tenant)


@dataclass(frozen=True, slots=True)
class PageLayout:
    """What the bytes of a page mean: of each layer in the order of the model. Part of the namespace.

    `layers`: shape without the pages, strides and dtype of each, in words; `layer_bytes`: of a page.
    """

    layers: tuple[str, ...]
    layer_bytes: int


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks `[first, first + len(keys))` of a request into `pages`, of each rank from its own records.

    `ranks`: the spans of each rank, one behind the other. `namespace`, `keys`: see `chain.rank_name`.
    """

    request_id: str
    namespace: bytes
    ranks: tuple[tuple[BlockRange, ...], ...]
    first: int
    keys: tuple[bytes, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """Blocks `[first, first + len(pages))` of a request, which are complete: each rank stores its own.

    `namespace`, `parent` (key of the block before): see `chain.rank_name`. `token_ids`: of the blocks;
    `extra`: see `chain.chain_keys`.
    """

    request_id: str
    namespace: bytes
    tenant: bytes
    session: bytes
    parent: bytes
    first: int
    token_ids: tuple[int, ...]
    extra: tuple[bytes, ...]
    pages: tuple[int, ...]
    incarnation: str
    clear_seq: int
    recompute_s: float
    placement: Placement = field(default_factory=Placement)


@dataclass(slots=True)
class Jobs:
    """Of one step. `may_wait`: it computes nothing, and no one else has waited in it (see `IdleWait`)."""

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    may_wait: bool = False


StoresTaken = Mapping[str, Mapping[int, int]]
"""Request -> rank -> blocks of its store that the tiers have now."""
