"""Samovar's tiers under vLLM: `SamovarConnector`, loaded by vLLM from `samovar.cache_tiers.vllm.connector`.

Nothing here imports vLLM or torch but `connector.py`, `told.py` and `pages/tensors.py`, which vLLM imports.
"""
