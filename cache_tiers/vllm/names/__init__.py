"""What makes KV interchangeable: the namespace of a model as vLLM runs it, and the names of blocks in it."""
