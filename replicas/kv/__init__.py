"""The KV pool: pages and their owners, the prefix index, and the bytes of a block."""

from samovar.replicas.kv.block_io import PageIo, Ticket, page_io
from samovar.replicas.kv.copy_device import DONE, CopyEvent, Told
from samovar.replicas.kv.cuda_device import register_object_store
from samovar.replicas.kv.kv_pool import KvGeometry, KvPool, LayerKv, PagePlan, free_memory_bytes, plan_pages
from samovar.replicas.kv.page_pool import (
    ROOT_ENTRY,
    TRASH_PAGE,
    AnnouncedPool,
    OutOfPages,
    PagePool,
    PrefixEntry,
)
from samovar.replicas.kv.registered import RegisteredMemory, populate_pages

__all__ = [
    "DONE",
    "ROOT_ENTRY",
    "TRASH_PAGE",
    "AnnouncedPool",
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
    "populate_pages",
    "register_object_store",
]
