"""The KV pool: pages and their owners, the prefix index, and the bytes of a block."""

from replicas.kv.block_io import PageIo, Ticket, page_io
from replicas.kv.copy_device import DONE, CopyEvent, Told
from replicas.kv.cuda_device import register_object_store
from replicas.kv.kv_pool import KvGeometry, KvPool, LayerKv, PagePlan, free_memory_bytes, plan_pages
from replicas.kv.page_pool import ROOT_ENTRY, TRASH_PAGE, OutOfPages, PagePool, PrefixEntry, session_owner
from replicas.kv.registered import RegisteredMemory

__all__ = [
    "DONE",
    "ROOT_ENTRY",
    "TRASH_PAGE",
    "CopyEvent",
    "KvGeometry",
    "KvPool",
    "LayerKv",
    "OutOfPages",
    "PageIo",
    "PagePlan",
    "PagePool",
    "PrefixEntry",
    "RegisteredMemory",
    "Ticket",
    "Told",
    "free_memory_bytes",
    "page_io",
    "plan_pages",
    "register_object_store",
    "session_owner",
]
