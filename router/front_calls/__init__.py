"""Requests from Serve's HTTP proxies to the front doors over links, without a Serve call (docs/adr/018).

`carrier` is the proxy's end, `taker` the front door's. Serve carries what they do not.
"""

from router.front_calls.carrier import EarlyBody, RequestCarrier
from router.front_calls.environment import (
    CALLBACK,
    CALLBACK_VARIABLE,
    are_proxies_guarded,
    inlet_from_environment,
    links_environment,
)
from router.front_calls.known_doors import ADDRESS, KNOWN, Door, KnownDoors
from router.front_calls.serve_proxy import ServeProxy
from router.front_calls.taker import RequestTaker

__all__ = [
    "ADDRESS",
    "CALLBACK",
    "CALLBACK_VARIABLE",
    "KNOWN",
    "Door",
    "EarlyBody",
    "KnownDoors",
    "RequestCarrier",
    "RequestTaker",
    "ServeProxy",
    "are_proxies_guarded",
    "inlet_from_environment",
    "links_environment",
]
