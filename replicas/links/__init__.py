"""Many streams over one connection between two processes, beside the Serve calls that opened them.

A message through a Serve handle costs about a CPU-millisecond at either end. A stream's call stays with
Serve: who serves it, whether it still runs, its end and its cancelling. What the stream says goes over a
link: one message for all streams of a step (docs/adr/015).
"""

from replicas.links.door_loads import DoorLoad, DoorLoads, others_load
from replicas.links.events import EventSender, events_of, pack_event, said_events, whole_bytes
from replicas.links.inlet import Inlet, Mailbox
from replicas.links.link import Link, Links
from replicas.links.wire import LinkLost, Pace

__all__ = [
    "DoorLoad",
    "DoorLoads",
    "EventSender",
    "Inlet",
    "Link",
    "LinkLost",
    "Links",
    "Mailbox",
    "Pace",
    "events_of",
    "others_load",
    "pack_event",
    "said_events",
    "whole_bytes",
]
