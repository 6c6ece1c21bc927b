"""What people watch: the live page's files, the stream of the service's state, and a tenant's usage."""

from samovar.router.observe.live.hub import LiveHub
from samovar.router.observe.live.routes import LiveRoutes, PageFiles

__all__ = ["LiveHub", "LiveRoutes", "PageFiles"]
