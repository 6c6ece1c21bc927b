"""What of ours runs in Serve's HTTP proxy: guards, the way to the ingresses over links, and Serve's own.

Requests go to an ingress over a link, without a Serve call (docs/adr/018); Serve carries what links do not.
`ingress_router` imports Ray: import the module.
"""

from samovar.router.proxy.asgi import POLICY_VIOLATION, TRACED, request_id_of, send_error
from samovar.router.proxy.carrier import (
    CUT,
    GO,
    READ_BYTES,
    UNREACHED,
    WHOLE,
    EarlyBody,
    RequestCarrier,
    RetryBuffer,
    packed_head,
    read_request,
)
from samovar.router.proxy.environment import (
    CALLBACK,
    CALLBACK_VARIABLE,
    are_proxies_guarded,
    inlet_from_environment,
    links_environment,
)
from samovar.router.proxy.known_ingresses import ADDRESS, KNOWN, KnownIngresses, ListedIngress
from samovar.router.proxy.proxy_guard import ServeProxy, proxy_environment, read_by_proxies

__all__ = [
    "ADDRESS",
    "CALLBACK",
    "CALLBACK_VARIABLE",
    "CUT",
    "GO",
    "KNOWN",
    "POLICY_VIOLATION",
    "READ_BYTES",
    "TRACED",
    "UNREACHED",
    "WHOLE",
    "EarlyBody",
    "KnownIngresses",
    "ListedIngress",
    "RequestCarrier",
    "RetryBuffer",
    "ServeProxy",
    "are_proxies_guarded",
    "inlet_from_environment",
    "links_environment",
    "packed_head",
    "proxy_environment",
    "read_by_proxies",
    "read_request",
    "request_id_of",
    "send_error",
]
