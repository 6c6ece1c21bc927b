"""The cluster file: a pure function of the settings and of what Terraform says.

Knows neither where these come from nor how `ray up` is run.
"""

from __future__ import annotations

from cluster.cluster_file import ClusterFile
from cluster.node_settings import RenderFailed, node_settings
from cluster.render_aws import render_aws
from cluster.render_rack import render_rack
from cluster.terraform_outputs import CloudOutputs
from configs.settings import Settings

HEADER = """\
{name}: written by `samovar render` from {sources}.
Do not edit: change those and run it again. It holds no secrets."""


def render(settings: Settings, outputs: CloudOutputs | None, node_dir: str) -> ClusterFile:
    """`outputs`: of Terraform, None for a rack; `node_dir`: see `node_files.py`.

    Raises `RenderFailed`.
    """
    if settings.launch.provider == "rack":
        if outputs is not None:
            raise RenderFailed("launch.provider=rack takes nothing from Terraform. Leave out --terraform")
        return render_rack(node_settings(settings, None), node_dir)
    if outputs is None:
        raise RenderFailed(
            "launch.provider=aws needs --terraform FILE, made with `terraform output -json > FILE`; for "
            "machines of your own set launch.provider=rack"
        )
    _check_name(settings, outputs)
    return render_aws(node_settings(settings, outputs), outputs, node_dir)


def header(file: ClusterFile, sources: list[str]) -> str:
    return HEADER.format(name=file.cluster_name, sources=" and ".join(sources))


def _check_name(settings: Settings, outputs: CloudOutputs) -> None:
    """The head's role may end instances of its own cluster only: by the name that Terraform knows."""
    launch = settings.launch
    if "name" in launch.model_fields_set and launch.name != outputs.cluster_name:
        raise RenderFailed(
            f"launch.name={launch.name}, and Terraform made the cluster {outputs.cluster_name}. Leave the "
            "first out, or apply Terraform with that name"
        )
