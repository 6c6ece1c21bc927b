"""Model replica on a paged KV pool: scheduler, engine, cache tier client and Serve deployment."""
