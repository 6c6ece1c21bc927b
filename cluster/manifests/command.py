"""Runs `samovar render --systemd` and `--kuberay`: reads settings and secrets, returns the file's text."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from samovar.cluster.launch.settings import RenderFailed
from samovar.configs.loader import load


def systemd_unit(
    config: str | None, env: Mapping[str, str], flags: Sequence[str], tiers: Path | None = None
) -> str:
    """Return the unit for this installation's `samovar`; `tiers`: of `samovar tiers`, at that socket.

    Raises `ConfigError`, `RenderFailed`.
    """
    from samovar.cluster.manifests.systemd import render_tiers_unit, render_unit

    program, loaded = Path(sys.executable).with_name("samovar"), load(config, env, flags)
    if tiers is not None:
        return render_tiers_unit(loaded, program, config, tiers)
    return render_unit(loaded, program, config)


def ray_service(
    config: str | None, secrets: Path | None, env: Mapping[str, str], flags: Sequence[str]
) -> str:
    """Return the RayService. `secrets`: the Secret's file. Raises `ConfigError`, `RenderFailed`."""
    from samovar.cluster.deploy.builders import read_secrets
    from samovar.cluster.errors import StartFailed
    from samovar.cluster.manifests.kuberay import render_kuberay

    if secrets is None:
        raise RenderFailed(
            "--kuberay needs --secrets FILE (YAML: `auth:`, below it `api_keys:` and `server_secret:`): pods "
            "check that they have those secrets. They are not printed"
        )
    settings = load(config, env, flags, secrets).settings
    try:
        return render_kuberay(settings, read_secrets(secrets), secrets)
    except StartFailed as error:  # the file of secrets
        raise RenderFailed(str(error)) from error
