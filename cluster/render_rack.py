"""A cluster of machines that are there already: Ray's provider `local`. Pure.

Ray's newer autoscaler never starts a worker with this provider, so `samovar up` asks for the older one.
"""

from __future__ import annotations

from cluster.cluster_file import Auth, ClusterFile, Docker, RackProvider
from cluster.node_commands import (
    command,
    docker_options,
    head_start,
    head_store_bytes,
    nvme_command,
    setup_commands,
    worker_start,
    worker_store_bytes,
)
from cluster.node_settings import NODE_HOME, TOKEN_FILE, RenderFailed
from configs.settings import Settings


def render_rack(settings: Settings, node_dir: str) -> ClusterFile:
    """`settings`: the nodes'; `node_dir`: the local directory that every node gets. Raises `RenderFailed`."""
    launch, rack = settings.launch, settings.launch.rack
    workers_min = _check(settings)
    store_bytes = worker_store_bytes(settings)
    node_setup = command(["samovar", "node-setup", "--token-file", f"{NODE_HOME}/{TOKEN_FILE}"])
    return ClusterFile(
        cluster_name=launch.name,
        min_workers=workers_min,
        max_workers=len(rack.workers),
        upscaling_speed=launch.upscaling_speed,
        idle_timeout_minutes=launch.idle_timeout_min,
        provider=RackProvider(head_ip=str(rack.head), worker_ips=rack.workers),
        auth=Auth(
            ssh_user=launch.ssh.user,
            ssh_private_key=None if launch.ssh.private_key is None else str(launch.ssh.private_key),
            ssh_proxy_command=launch.ssh.proxy_command,
        ),
        docker=Docker(image=launch.image, run_options=tuple(docker_options(launch, store_bytes)))
        if launch.image
        else None,
        file_mounts={NODE_HOME: node_dir},
        initialization_commands=(nvme_command(launch, launch.name, disks=False),),
        setup_commands=tuple(setup_commands(launch)),
        head_start_ray_commands=tuple(
            head_start(
                settings,
                node_setup,
                num_cpus=None if rack.spare_cpus_head else 0,
                store_bytes=store_bytes if rack.spare_cpus_head else head_store_bytes(settings),
            )
        ),
        worker_start_ray_commands=tuple(worker_start(settings, node_setup, store_bytes=store_bytes)),
    )


def _check(settings: Settings) -> int:
    """How many workers are always up. Raises `RenderFailed`."""
    launch, rack = settings.launch, settings.launch.rack
    if rack.head is None:
        raise RenderFailed("launch.provider=rack needs launch.rack.head: the address of the head node")
    if rack.head in rack.workers:
        raise RenderFailed(
            f"launch.rack.head={rack.head} is also in launch.rack.workers. Leave it out of the second; with "
            "launch.rack.spare_cpus_head=true replicas run on the head, too"
        )
    if len(set(rack.workers)) != len(rack.workers):
        raise RenderFailed("launch.rack.workers names a machine twice. Leave one out")
    if not rack.workers and not rack.spare_cpus_head:
        raise RenderFailed(
            "launch.rack.workers is empty and nothing may run on the head. Name workers, or set "
            "launch.rack.spare_cpus_head=true"
        )
    if launch.ssh.proxy_by_id:
        raise RenderFailed("launch.ssh.proxy_by_id=true does not fit a rack: its machines have no ids")
    workers_min = len(rack.workers) if rack.workers_min is None else rack.workers_min
    if workers_min > len(rack.workers):
        raise RenderFailed(
            f"launch.rack.workers_min={workers_min} is more than launch.rack.workers has: {len(rack.workers)}"
        )
    if rack.workers and workers_min == 0:
        raise RenderFailed(
            "launch.rack.workers_min=0: Ray learns what a worker has from the first one that runs, and would "
            "start none. Set it to 1 or more"
        )
    return workers_min
