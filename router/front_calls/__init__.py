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
    open_inlet,
)
from router.front_calls.known_doors import KNOWN, Door, KnownDoors, address_of
from router.front_calls.serve_proxy import ServeProxy
from router.front_calls.taker import RequestTaker

__all__ = [
    "CALLBACK",
    "CALLBACK_VARIABLE",
    "KNOWN",
    "Door",
    "EarlyBody",
    "KnownDoors",
    "RequestCarrier",
    "RequestTaker",
    "ServeProxy",
    "address_of",
    "are_proxies_guarded",
    "inlet_from_environment",
    "links_environment",
    "open_inlet",
]
