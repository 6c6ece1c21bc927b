"""Routes, middleware and the guards in front of them; the Serve deployment of the ingress."""

from router.http.app import REPLICA_DEPLOYMENT, Ingress
from router.http.proxy_guard import proxy_environment

__all__ = ["REPLICA_DEPLOYMENT", "Ingress", "proxy_environment"]
