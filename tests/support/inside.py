"""What tests look at inside of objects of the product, in one place for each member.

A member that is renamed is renamed here. What a face says is asked of the face, not of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samovar.cache_tiers.node.state import NodeState


def state_of(of: Any) -> NodeState:
    """Return the state that a node's parts share."""
    return of._state


def records_in(of: Any) -> dict[Any, Any]:
    """Return what a tier in memory holds, by address."""
    return of._records


def boxes_of(of: Any) -> dict[str, Any]:
    """Return the mailboxes of an inlet."""
    return of._boxes


def kept_by(of: Any) -> Any:
    """Return the answers that a replica keeps."""
    return of._kept


def is_quiet(of: Any) -> bool:
    """Return whether neither side had news when they last met."""
    return of._is_quiet


def carrier_of(of: Any) -> Any:
    """Return what carries the requests of a guarded proxy."""
    return of._carrier


def waiting_in(of: Any) -> list[Any]:
    """Return the turns whose blocks wait to be stored."""
    return of._waiting


def places_of(of: Any) -> Any:
    """Return the places of a replica."""
    return of._places


def streams_of(of: Any) -> dict[int, Any]:
    """Return the answers that a replica streams."""
    return of._streams


def unreached_by(of: Any) -> dict[Any, float]:
    """Return where these links got no answer."""
    return of._unreached


def guards_of(of: Any) -> dict[str, Any]:
    """Return what guards each tier of a node."""
    return of._guards


def link_of(of: Any) -> Any:
    """Return what a node's peers are called over."""
    return of._link


def callers_of(of: Any) -> Any:
    """Return the connections over which nodes pull blocks from a link."""
    return of._callers


def idle_in(of: Any) -> Any:
    """Return the sessions whose return is awaited."""
    return of._sessions


def turns_of(of: Any) -> Any:
    """Return the turns that a predictor learns from."""
    return of.traffic().turns


def database_of(of: Any) -> Any:
    """Return the connections of a store in PostgreSQL."""
    return of._database


def thread_of(of: Any) -> Any:
    """Return the thread of a watch; None: it has none."""
    return of._thread


def info_of(of: Any) -> Any:
    """Return what a replica says of itself."""
    return of._info


def learner_of(of: Any) -> Any:
    """Return what a node's predictor learns by."""
    return of._learner


def inlet_of(of: Any) -> Any:
    """Return where a replica listens for links."""
    return of._inlet


def direct_calls(of: Any) -> Any:
    """Return how a client calls replicas without Serve."""
    return of._direct


def file_of(of: Any) -> Any:
    """Return the SQLite file of a store."""
    return of._file


def replicas_in(of: Any) -> Any:
    """Return the replicas of a roster or a load table."""
    return of._replicas


def least_loaded(of: Any) -> Any:
    """Return what finds the least loaded replicas."""
    return of._least_loaded


def links_of(of: Any) -> Any:
    """Return the links of something that sends or takes."""
    return of._links


def settings_of(of: Any) -> Any:
    """Return the settings that something was made with."""
    return of._settings


def arena_of(of: Any) -> Any:
    """Return the registered memory of a link."""
    return of._arena


def peers_of(of: Any) -> Any:
    """Return the peers that a link knows."""
    return of._peers


def connecting_by(of: Any) -> Any:
    """Return where these links are connecting."""
    return of._connecting


def queue_of(of: Any) -> Any:
    """Return what waits to be sent over a link."""
    return of._queue


def paused_on(of: Any) -> Any:
    """Return the calls that a link holds back."""
    return of._paused


def bytes_in(of: Any) -> int:
    """Return the unread bytes of a mailbox."""
    return of._nbytes


def registry_of(of: Any) -> Any:
    """Return the extents of a directory."""
    return of._registry


def remembered_in(of: Any) -> Any:
    """Return the sessions whose cuts are remembered."""
    return of._sessions


def connections_of(of: Any) -> Any:
    """Return the open connections of a database."""
    return of._connections


def clears_of(of: Any) -> Any:
    """Return the clears that a node or a tier knows."""
    return of._clears


def free_in(of: Any) -> Any:
    """Return the free runs of an arena."""
    return of._free


def scans_of(of: Any) -> Any:
    """What looks through the media of a node."""
    return of._scans


def join_scans(of: Any, timeout_s: float) -> None:
    """Wait until a node has looked through its tiers."""
    of._scans.join(timeout_s)


def deployment_of(application: Any) -> Any:
    """Return what Serve is to deploy of an application of one deployment."""
    return application._bound_deployment


def handled_by(of: Any, request: Any) -> Any:
    """Return what Serve's proxy answers a request with: its `response_generator`."""
    return of._get_response_handler_info(request)


def look_of(of: Any) -> None:
    """Have a cluster's watch look once."""
    of._look()
