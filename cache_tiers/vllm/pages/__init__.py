"""vLLM's KV tensors as pages of bytes, and the copies between them and records."""
