"""Renders the cluster file: a pure function of the settings and Terraform's outputs."""

from __future__ import annotations

import re

from samovar.cluster.launch.cluster_file import (
    Auth,
    AwsProvider,
    ClusterFile,
    Disk,
    Docker,
    Ebs,
    Ec2Node,
    LaunchTemplate,
    Market,
    Metadata,
    NodeDocker,
    NodeType,
    Profile,
    RackProvider,
)
from samovar.cluster.launch.commands import (
    EFA_DOCKER_OPTIONS,
    command,
    docker_options,
    head_start,
    head_store_bytes,
    nvme_command,
    setup_commands,
    worker_start,
    worker_store_bytes,
)
from samovar.cluster.launch.settings import NODE_HOME, TOKEN_FILE, RenderFailed, node_settings
from samovar.cluster.launch.terraform import CloudOutputs, PoolOutputs
from samovar.configs.settings import Settings

HEAD_TYPE = "head"
SECONDS_A_MINUTE = 60
ROOT_DEVICES = {"ec2-user": "/dev/xvda"}
ROOT_DEVICE = "/dev/sda1"
"""The root device of Ubuntu's images; Amazon Linux, whose login is ec2-user, has another."""

ECR = re.compile(r"^(?P<registry>[0-9]{12}\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com)/")


def render_aws(settings: Settings, outputs: CloudOutputs, node_dir: str) -> ClusterFile:
    """Return the file of a cluster on EC2, made of Terraform's resources. Raises `RenderFailed`.

    Gives everything that Ray would otherwise create itself (role, key pair, a security group open to the
    world). `settings`: the nodes'; `node_dir`: the local directory that every node gets.
    """
    launch = settings.launch
    key_name, private_key = _key(settings, outputs)
    if HEAD_TYPE in outputs.pools:
        raise RenderFailed(
            f"a pool in Terraform is named `{HEAD_TYPE}`, the name of the head's type. Rename the pool"
        )
    store_bytes = worker_store_bytes(settings)
    node_setup = _node_setup(settings, outputs)
    pools = {name: _pool(settings, outputs, pool, key_name) for name, pool in sorted(outputs.pools.items())}
    return ClusterFile(
        cluster_name=outputs.cluster_name,
        max_workers=sum(pool.max_workers for pool in outputs.pools.values()),
        upscaling_speed=launch.upscaling_speed,
        idle_timeout_minutes=launch.idle_timeout_min,
        provider=AwsProvider(region=outputs.region),
        auth=Auth(
            ssh_user=launch.ssh.user,
            ssh_private_key=private_key,
            ssh_proxy_command=launch.ssh.proxy_command,
            ssh_proxy_use_node_id=True if launch.ssh.proxy_by_id else None,
        ),
        docker=Docker(image=launch.image, run_options=tuple(docker_options(launch, store_bytes)))
        if launch.image
        else None,
        head_node_type=HEAD_TYPE,
        available_node_types={HEAD_TYPE: _head(settings, outputs, key_name), **pools},
        file_mounts={NODE_HOME: node_dir},
        initialization_commands=tuple(_initialization(settings, outputs, disks=False)),
        setup_commands=tuple(setup_commands(launch)),
        head_start_ray_commands=tuple(
            head_start(settings, node_setup, num_cpus=None, store_bytes=head_store_bytes(settings))
        ),
        worker_start_ray_commands=tuple(worker_start(settings, node_setup, store_bytes=store_bytes)),
    )


def _key(settings: Settings, outputs: CloudOutputs) -> tuple[str, str]:
    """Return the key pair's name and the private key's file. Raises `RenderFailed` if either is missing.

    Without both, Ray would create its own key pair and write it to ~/.ssh.
    """
    if outputs.key_name is None:
        raise RenderFailed(
            "Terraform has created no key pair (its `key_name` is empty), and `ray up` needs SSH. Set "
            "`ssh_public_key` in the .tfvars and apply again"
        )
    if settings.launch.ssh.private_key is None:
        raise RenderFailed(
            f"launch.ssh.private_key is empty: name the file with the private key of {outputs.key_name}"
        )
    return outputs.key_name, str(settings.launch.ssh.private_key)


def _node_setup(settings: Settings, outputs: CloudOutputs) -> str:
    words = ["samovar", "node-setup", f"--region={outputs.region}", f"--ssm-prefix={outputs.ssm_prefix}"]
    if outputs.target_group_arn is not None:
        words += [f"--target-group={outputs.target_group_arn}", f"--port={settings.server.port}"]
    return command([*words, *_tls_words(settings)])


def _tls_words(settings: Settings) -> list[str]:
    folder = settings.cluster.tls_dir
    return [] if folder is None else ["--tls-dir", str(folder)]


def _initialization(settings: Settings, outputs: CloudOutputs, *, disks: bool) -> list[str]:
    commands = [nvme_command(settings.launch, outputs.cluster_name, disks=disks)]
    if settings.launch.image and (found := ECR.match(settings.launch.image)):
        login = ["docker", "login", "--username", "AWS", "--password-stdin", found["registry"]]
        password = ["aws", "ecr", "get-login-password", "--region", found["region"]]
        commands.append(f"{command(password)} | {command(login)}")
    return commands


def _head(settings: Settings, outputs: CloudOutputs, key_name: str) -> NodeType:
    """Return the head's node type, with 0 CPUs, so that no replica is placed there.

    The session directory and Serve's controller, which run there, need none.
    """
    head = outputs.head
    device = ROOT_DEVICES.get(settings.launch.ssh.user, ROOT_DEVICE)
    return NodeType(
        resources={"CPU": 0},
        min_workers=0,
        max_workers=0,
        node_config=Ec2Node(
            instance_type=head.instance_type,
            image_id=head.ami_id,
            key_name=key_name,
            iam_instance_profile=Profile(arn=head.instance_profile_arn),
            subnet_ids=(head.subnet_id,),
            security_group_ids=(outputs.security_group_id,),
            block_device_mappings=(Disk(device_name=device, ebs=Ebs(volume_size=head.disk_gib)),),
            metadata_options=Metadata(),
        ),
    )


def _pool(settings: Settings, outputs: CloudOutputs, pool: PoolOutputs, key_name: str) -> NodeType:
    """Return a pool's node type. Ray derives CPUs, GPUs and memory from the instance type."""
    marks = {
        "kv_nvme": pool.nvme_disks,
        "kv_spot": int(pool.market == "spot"),
        "kv_efa": pool.efa_interfaces,
    }
    own_network = pool.has_own_network  # then Ray refuses further subnets and groups
    return NodeType(
        resources={name: count for name, count in marks.items() if count},
        labels={"kv/market": pool.market},
        min_workers=pool.min_workers,
        max_workers=pool.max_workers,
        idle_timeout_s=pool.idle_timeout_min * SECONDS_A_MINUTE,
        initialization_commands=tuple(_initialization(settings, outputs, disks=pool.nvme_disks > 0)),
        docker=NodeDocker(worker_run_options=EFA_DOCKER_OPTIONS)
        if settings.launch.image and pool.efa_interfaces
        else None,
        node_config=Ec2Node(
            instance_type=pool.instance_type,
            key_name=key_name,
            iam_instance_profile=Profile(arn=outputs.worker_instance_profile_arn),
            launch_template=LaunchTemplate(
                launch_template_id=pool.launch_template_id, version=pool.launch_template_version
            ),
            subnet_ids=None if own_network else pool.subnet_ids,
            security_group_ids=None if own_network else (outputs.security_group_id,),
            instance_market_options=Market() if pool.market == "spot" else None,
            # Otherwise Ray copies the template's, with a `State` that RunInstances does not accept.
            metadata_options=Metadata(),
        ),
    )


def render_rack(settings: Settings, node_dir: str) -> ClusterFile:
    """Return the file of a cluster of existing machines: Ray's provider `local`. Raises `RenderFailed`.

    Ray's newer autoscaler never starts a worker with this provider, so `samovar up` selects the older one.
    `settings`: the nodes'; `node_dir`: the local directory that every node gets.
    """
    launch, rack = settings.launch, settings.launch.rack
    workers_min = _check(settings)
    store_bytes = worker_store_bytes(settings)
    words = ["samovar", "node-setup", "--token-file", f"{NODE_HOME}/{TOKEN_FILE}"]
    node_setup = command([*words, *_tls_words(settings)])
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
    """Check the rack's settings and return the minimum number of workers. Raises `RenderFailed`."""
    launch, rack = settings.launch, settings.launch.rack
    if rack.head is None:
        raise RenderFailed("launch.provider=rack needs launch.rack.head: the address of the head node")
    if rack.head in rack.workers:
        raise RenderFailed(
            f"launch.rack.head={rack.head} is also in launch.rack.workers. Remove it from the second; with "
            "launch.rack.spare_cpus_head=true replicas run on the head as well"
        )
    if len(set(rack.workers)) != len(rack.workers):
        raise RenderFailed("launch.rack.workers names a machine twice. Remove one")
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
            "launch.rack.workers_min=0: Ray learns a worker's resources from the first one that runs, so it "
            "would start none. Set it to 1 or more"
        )
    return workers_min


HEADER = """\
{name}: written by `samovar render` from {sources}.
Do not edit: change those and run it again. It holds no secrets."""


def render(settings: Settings, outputs: CloudOutputs | None, node_dir: str) -> ClusterFile:
    """Return the cluster file. `outputs`: Terraform's, None for a rack; `node_dir`: see `up.py`.

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
    """Check that the name is Terraform's: the head's role may terminate only instances of that cluster.

    Raises `RenderFailed`.
    """
    launch = settings.launch
    if "name" in launch.model_fields_set and launch.name != outputs.cluster_name:
        raise RenderFailed(
            f"launch.name={launch.name}, and Terraform made the cluster {outputs.cluster_name}. Leave the "
            "first out, or apply Terraform with that name"
        )
