"""vLLM as the engine of a replica, in an environment of its own (docs/engines.md).

Nothing here imports vLLM but `async_llm.py`, in the process of a replica.
"""

from samovar.replicas.vllm.deployment import VllmReplica

__all__ = ["VllmReplica"]
