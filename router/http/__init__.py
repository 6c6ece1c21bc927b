"""HTTP routes, middleware and guards, and the Serve deployment of the ingress.

`app` imports transformers, so it is not re-exported here: import the module.
"""

from router.http.proxy_guard import proxy_environment

__all__ = ["proxy_environment"]
