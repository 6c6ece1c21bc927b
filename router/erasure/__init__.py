"""Deletions: every place is asked, whatever the others answer, and what is left is gone on with."""

from router.erasure.clears import Cleared, Clears, Erase, Erasure, ErasureKind, Left
from router.erasure.owed import OwedFile

__all__ = ["Cleared", "Clears", "Erase", "Erasure", "ErasureKind", "Left", "OwedFile"]
