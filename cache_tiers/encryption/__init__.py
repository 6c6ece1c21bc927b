"""Records that only a key opens, on media that outlive a session: without its key they are erased.

See docs/adr/034. Built only where `tiers.encryption_key_file` is set: nothing else knows of it.
"""

from samovar.cache_tiers.encryption.keys import KEYS_FILE, LeasedKeys, OuterKeys, SessionKeyFile
from samovar.cache_tiers.encryption.tier import EncryptedTier, Keys, SessionKey

__all__ = ["KEYS_FILE", "EncryptedTier", "Keys", "LeasedKeys", "OuterKeys", "SessionKey", "SessionKeyFile"]
