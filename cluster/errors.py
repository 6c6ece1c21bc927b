"""What ends a command of the cluster with one sentence."""


class StartFailed(Exception):
    """The service did not become ready; the message says why and where to look."""
