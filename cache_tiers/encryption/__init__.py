"""Records and rows that only a key opens, on media that outlive a session: without its key they are erased.

See docs/adr/034. Built only where `tiers.encryption_key_file` is set: nothing else knows of it.
"""

from samovar.cache_tiers.encryption.keys import (
    KEYS_FILE,
    LeasedKeys,
    SessionKeyFile,
    random_key,
)
from samovar.cache_tiers.encryption.outer import (
    OuterKeys,
    OuterWrapper,
    TenantWrapper,
    Unwrapped,
    open_outer,
)
from samovar.cache_tiers.encryption.sealer import (
    BadSeal,
    as_text,
    key_id_of,
    of_text,
    open_row,
    row_name,
    seal_row,
)
from samovar.cache_tiers.encryption.sessions import Sealing, SessionSealer
from samovar.cache_tiers.encryption.tier import EncryptedTier, Keys, SessionKey

__all__ = [
    "KEYS_FILE",
    "BadSeal",
    "EncryptedTier",
    "Keys",
    "LeasedKeys",
    "OuterKeys",
    "OuterWrapper",
    "Sealing",
    "SessionKey",
    "SessionKeyFile",
    "SessionSealer",
    "TenantWrapper",
    "Unwrapped",
    "as_text",
    "key_id_of",
    "of_text",
    "open_outer",
    "open_row",
    "random_key",
    "row_name",
    "seal_row",
]
