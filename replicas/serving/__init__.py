"""A replica as the service calls it: the Serve deployment, and its requests and answers over links.

Its modules are imported one by one: `deployment` needs Ray.
"""
