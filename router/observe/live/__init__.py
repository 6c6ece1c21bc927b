"""What people watch: the live page's files, the stream of the service's state, and a tenant's usage."""

from router.observe.live.hub import LiveHub
from router.observe.live.page_files import PageFiles
from router.observe.live.routes import LiveRoutes

__all__ = ["LiveHub", "LiveRoutes", "PageFiles"]
