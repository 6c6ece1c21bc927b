"""Many streams and calls over one connection between two processes, beside Ray Serve.

A message through a Serve handle costs about a CPU-millisecond at either end. What a stream says goes over a
link: one message for all streams of a step (docs/adr/015). So do calls, to processes that take them
(docs/adr/018); where there is no link, Serve carries them.
"""

from samovar.replicas.links.calls import CLOSING, FAILED, FULL, Calls, Handler, LinkCall
from samovar.replicas.links.events import EventSender, events_of, pack_event, said_events, whole_bytes
from samovar.replicas.links.inlet import Inlet, open_inlet
from samovar.replicas.links.link import Link, Links
from samovar.replicas.links.mailbox import Mailbox
from samovar.replicas.links.wire import LinkLost, Pace

__all__ = [
    "CLOSING",
    "FAILED",
    "FULL",
    "Calls",
    "EventSender",
    "Handler",
    "Inlet",
    "Link",
    "LinkCall",
    "LinkLost",
    "Links",
    "Mailbox",
    "Pace",
    "events_of",
    "open_inlet",
    "pack_event",
    "said_events",
    "whole_bytes",
]
