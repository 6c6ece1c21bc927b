"""A replica as the service calls it: the deployment, what it asks of an engine, calls over links, spans.

Its modules are imported one by one: `deployment` needs Ray.
"""
