"""Which names an endpoint without API keys answers to.

It listens on loopback, but a browser on that machine carries a stranger's page there as well: a
page may post to 127.0.0.1, or give its own name our address (DNS rebinding) and read the answers.
Both show in the headers that the browser writes itself, `Host` and `Origin`. Knows ASGI scopes;
nothing of keys or of routes.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import Scope

from router.auth import is_open
from router.errors import Forbidden, shown

AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:/@\s]+))(?::\d{0,5})?")
ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(.*)")  # a browser sends scheme, host and port, or `null`


class LocalHosts:
    """`localhost`, every loopback address, and the names in `allowed` (`server.allowed_hosts`)."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(name.lower() for name in allowed) | {"localhost"}

    def check(self, scope: Scope) -> None:
        """Raises `Forbidden` for a request, other than for the open health path, to or from elsewhere."""
        if is_open(scope):
            return
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            raise Forbidden(f"One Host header is needed; this request has {len(hosts)}.")
        if not self._is_ours(hosts[0]):
            raise Forbidden(_message("Host", hosts[0]))
        for origin in headers.getlist("origin"):
            match = ORIGIN.fullmatch(origin)
            if match is None or not self._is_ours(match[1]):
                raise Forbidden(_message("Origin", origin))

    def _is_ours(self, authority: str) -> bool:
        """Whether `authority`, a host with or without a port, is one of ours."""
        match = AUTHORITY.fullmatch(authority)
        if match is None:
            return False
        host = (match[1] or match[2]).lower()
        if match[2] and host.removesuffix(".") in self._allowed:
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False  # a name: it may resolve to anything


def _message(header: str, value: str) -> str:
    return (
        f"The {header} {shown(value)} is neither localhost nor a loopback address, and this endpoint has no "
        "API keys. If it is yours, put its name into server.allowed_hosts, or set auth.api_keys."
    )
