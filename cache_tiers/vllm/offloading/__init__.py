"""The tiers behind vLLM's own offloading: a tier below its main memory, and the connector that names it."""
