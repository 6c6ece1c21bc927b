"""Who may call, where that changes while the service runs: API keys in a file."""

from samovar.router.identities.identities import LOOK_S, FollowedKeys, Identities
from samovar.router.identities.key_file import KeyFile, KeyRecord, KeysRefused, NoSuchKey

__all__ = ["LOOK_S", "FollowedKeys", "Identities", "KeyFile", "KeyRecord", "KeysRefused", "NoSuchKey"]
