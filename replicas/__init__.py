"""A model on a paged KV pool: scheduler, engine, the way to the cache tiers, and the Serve deployment
around them.
"""
