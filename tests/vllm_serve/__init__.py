"""Replicas whose engine is vLLM, behind the whole service: `make test-vllm-serve`."""
