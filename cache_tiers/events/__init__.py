"""What routers of other projects hear of our caches: KV events in vLLM's form, over ZeroMQ.

Built only where `telemetry.kv_events` is set: nothing else knows of it.
"""
