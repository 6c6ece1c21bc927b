"""Deletions: every place is asked, whatever the others answer, and what is left is gone on with."""

from samovar.router.erasure.erasures import (
    Cleared,
    Erase,
    Erasure,
    ErasureKind,
    Erasures,
    Left,
    NotNoted,
)
from samovar.router.erasure.unfinished import UnfinishedFile

__all__ = [
    "Cleared",
    "Erase",
    "Erasure",
    "ErasureKind",
    "Erasures",
    "Left",
    "NotNoted",
    "UnfinishedFile",
]
