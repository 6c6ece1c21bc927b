"""Whether a process listens for links, and the variables that tell Serve's HTTP proxies so."""

from __future__ import annotations

from collections.abc import Mapping

from samovar.configs.cluster import LinkSettings
from samovar.configs.settings import Settings
from samovar.replicas.links import Inlet, open_inlet

CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "samovar.router.proxy.proxy_guard.install"
PREFIX = "SAMOVAR_PROXY_LINKS_"
WAIT_MS = f"{PREFIX}WAIT_MS"


def links_environment(settings: Settings) -> dict[str, str]:
    """Return the variables that tell the proxies whether and how to listen."""
    links = {f"{PREFIX}{name.upper()}": str(value) for name, value in settings.cluster.links}
    return links | {WAIT_MS: str(settings.engine.coalesce_ms)}


def inlet_from_environment(environ: Mapping[str, str]) -> Inlet | None:
    """Return the inlet that `links_environment` described; None: there is to be none."""
    if WAIT_MS not in environ:
        return None
    given = {name: environ.get(f"{PREFIX}{name.upper()}") for name in LinkSettings.model_fields}
    links = LinkSettings.model_validate({name: value for name, value in given.items() if value is not None})
    return open_inlet(links, float(environ[WAIT_MS]) / 1000)


def are_proxies_guarded(environ: Mapping[str, str]) -> bool:
    """Whether the cluster was started with our guard in its proxies: only it makes calls over links.

    Nodes of a cluster are started alike: this process has what its proxies have.
    """
    return environ.get(CALLBACK_VARIABLE) == CALLBACK and WAIT_MS in environ
