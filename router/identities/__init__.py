"""Who may call, where that changes while the service runs, and the record of who did what."""

from samovar.router.identities.audit import AuditLog, AuditQueue, AuditTrail
from samovar.router.identities.identities import FollowedKeys, Identities
from samovar.router.identities.key_file import (
    LASTS_S_MAX,
    KeyFile,
    KeyRecord,
    KeysRefused,
    KeyStore,
    has_one_owner,
    open_keys,
)
from samovar.router.identities.key_routes import KeyBody, RotateBody, key_routes
from samovar.router.identities.tokens import IssuerKeys, TokenKeys, TokenVerifier

__all__ = [
    "LASTS_S_MAX",
    "AuditLog",
    "AuditQueue",
    "AuditTrail",
    "FollowedKeys",
    "Identities",
    "IssuerKeys",
    "KeyBody",
    "KeyFile",
    "KeyRecord",
    "KeyStore",
    "KeysRefused",
    "RotateBody",
    "TokenKeys",
    "TokenVerifier",
    "has_one_owner",
    "key_routes",
    "open_keys",
]
