"""`SamovarOffloadingConnector`: vLLM's OffloadingConnector, which tells `SamovarTier` what model this is.

    vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "SamovarOffloadingConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "samovar.cache_tiers.vllm.offloading.connector",
      "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592, "secondary_tiers": [{
          "type": "SamovarTier", "module_path": "samovar.cache_tiers.vllm.offloading.tier",
          "socket": "/run/samovar/tiers.sock"}]}}'

A secondary tier is told a model's name and no more: not its weights, their revision or quantisation.
"""

from __future__ import annotations

import logging
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from samovar.cache_tiers.blocks import namespace_digest
from samovar.cache_tiers.vllm.connector import CLEAR_S_MAX, KNOWN_WEIGHTS, config_text, guarded
from samovar.cache_tiers.vllm.names.identity import model_path, weights_digest
from samovar.cache_tiers.vllm.offloading.tier import SamovarTier
from samovar.cache_tiers.vllm.refusals import CACHE_DTYPES, check_version

logger = logging.getLogger("vllm.samovar")

UNSAFE_HASHES = "xxhash"


class SamovarOffloadingConnector(OffloadingConnector):  # type: ignore[misc]
    """See the module. Raises `ValueError` at the start for what has no name, naming the fix."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_version(vllm.__version__)
        check_names(vllm_config)
        if role == KVConnectorRole.SCHEDULER:  # the only one that has secondary tiers
            weights = weights_digest(model_path(vllm_config), KNOWN_WEIGHTS.expanduser())
            parts = ("vllm offloading", vllm.__version__, config_text(vllm_config))
            namespace = namespace_digest(weights, *(part.encode() for part in parts))
            name_tiers(vllm_config.kv_transfer_config.kv_connector_extra_config, namespace)
        super().__init__(vllm_config, role, kv_cache_config)

    def reset_cache(self) -> bool | None:
        """Reset vLLM's main memory, and clear what this connector's tenant has in the tiers."""
        is_reset = super().reset_cache()
        return is_reset if self._clear() else False

    @guarded(lambda: False)
    def _clear(self) -> bool:
        scheduler = self.connector_scheduler
        tiers = [] if scheduler is None else scheduler.manager.secondary_tiers
        cleared = [tier.clear(CLEAR_S_MAX) for tier in tiers if isinstance(tier, SamovarTier)]
        return all(cleared)


def check_names(vllm_config: Any) -> None:
    """Raise `ValueError` for what vLLM's keys do not name by content, with the fix."""
    if vllm_config.lora_config is not None:
        raise ValueError(
            "vLLM's keys have adapters' names and paths: use SamovarConnector, which names what is in them"
        )
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if UNSAFE_HASHES in algorithm:
        raise ValueError(
            f"--prefix-caching-hash-algo {algorithm}: its keys can be made to collide; use sha256"
        )
    dtype = vllm_config.cache_config.cache_dtype
    if dtype not in CACHE_DTYPES:
        raise ValueError(
            f"kv_cache_dtype {dtype}: its scales or tables lie outside of the blocks; use 'auto'"
        )


def name_tiers(extra: dict[str, Any], namespace: bytes) -> None:
    """Write the model's name into the settings of each `SamovarTier`."""
    for tier in extra.get("secondary_tiers") or ():
        if tier.get("type") == SamovarTier.__name__:
            tier["namespace"] = namespace.hex()
