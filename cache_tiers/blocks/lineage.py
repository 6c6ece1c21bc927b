"""Tags of sessions and of their lineages: what a turn's blocks are filed, forecast and routed under.

A session, named by its client's id, is a bundle of *lineages*: chains of prompts of which each extends the
one before. Beside the conversation come its titles, follow-up questions and sub-agents under the same id, and
only some of them resume. A lineage is known by its first prompt: every later prompt of it begins with the
same tokens, and so does an edited or regenerated one that forks off after the first.

Both have tags of `TAG_BYTES`: the session's own bytes, then the lineage's: the length of its first prompt and
a keyed digest of it. So a tag alone says whether a prompt is of its lineage, also one read from a record
after a restart. A tag whose lineage part is zero stands for the whole session. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from samovar.cache_tiers.blocks.extent import SESSION_BYTES, TAG_BYTES

_LENGTH_BYTES = 3
_DIGEST_BYTES = TAG_BYTES - SESSION_BYTES - _LENGTH_BYTES
ROOT_TOKENS_MAX = 256**_LENGTH_BYTES - 1


def root_tokens(tag: bytes) -> int:
    """Return the tokens of a lineage's first prompt; 0 for the tag of a whole session."""
    return int.from_bytes(tag[SESSION_BYTES : SESSION_BYTES + _LENGTH_BYTES], "big")


def lineage_tag(
    session: bytes, prompt: Sequence[int], known: Iterable[bytes] = (), *, key: bytes, begin_tokens: int = 0
) -> bytes:
    """Return the tag of the lineage that `prompt` belongs to.

    That is the longest of `known` that it extends, or a new one. Hashes the prompt once, whatever the number
    of known lineages.

    Args:
        session: the session's tag, or any lineage's of it.
        known: tags of the session's lineages, in any order.
        key: secret, at most 64 bytes, so that a tag does not tell what the first prompt was.
        begin_tokens: how much of the prompt all later ones repeat, without what the template puts before the
            answer only; 0: all of it.

    Raises:
        ValueError: the prompt is empty.
    """
    if not prompt:
        raise ValueError("a prompt has at least one token")
    begin = min(begin_tokens or len(prompt), len(prompt), ROOT_TOKENS_MAX)
    own = session[:SESSION_BYTES]
    candidates: dict[int, list[bytes]] = {}
    for tag in known:
        if tag[:SESSION_BYTES] == own and 0 < root_tokens(tag) <= len(prompt):
            candidates.setdefault(root_tokens(tag), []).append(tag)
    tokens = array("I", prompt[: max([begin, *candidates])])
    digest = blake2b(own, digest_size=_DIGEST_BYTES, key=key, person=b"samovar lineage")
    found, new, at = b"", b"", 0
    for length in sorted({begin, *candidates}):
        digest.update(tokens[at:length].tobytes())
        at = length
        tag = own + length.to_bytes(_LENGTH_BYTES, "big") + digest.digest()
        if tag in candidates.get(length, ()):
            found = tag
        if length == begin:
            new = tag
    return found or new
