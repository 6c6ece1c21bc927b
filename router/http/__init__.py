"""Routes, middleware and the guards in front of them; the Serve deployment of the ingress.

`app` imports transformers: who needs it imports the module.
"""

from router.http.proxy_guard import proxy_environment

__all__ = ["proxy_environment"]
