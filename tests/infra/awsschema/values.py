"""Plausible values for what AWS would compute: ids, ARNs, names, versions. Pure.

They have the form of real ones, so that what reads them (IAM policies, the cluster renderer) can be tested;
none of them exists. It knows no protocol and no schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ACCOUNT = "123456789012"
PARTITION = "aws"

Object = dict[str, Any]

_PREFIXES = {
    "aws_ami": "ami",
    "aws_vpc": "vpc",
    "aws_subnet": "subnet",
    "aws_security_group": "sg",
    "aws_default_security_group": "sg",
    "aws_vpc_security_group_ingress_rule": "sgr",
    "aws_vpc_security_group_egress_rule": "sgr",
    "aws_route_table": "rtb",
    "aws_route_table_association": "rtbassoc",
    "aws_internet_gateway": "igw",
    "aws_nat_gateway": "nat",
    "aws_eip": "eipalloc",
    "aws_vpc_endpoint": "vpce",
    "aws_launch_template": "lt",
    "aws_placement_group": "pg",
    "aws_flow_log": "fl",
    "aws_ec2_capacity_reservation": "cr",
    "aws_network_acl": "acl",
}

_NAMED = {
    "aws_s3_bucket": "bucket",
    "aws_iam_role": "name",
    "aws_iam_instance_profile": "name",
    "aws_ssm_parameter": "name",
    "aws_cloudwatch_log_group": "name",
    "aws_cloudwatch_metric_alarm": "alarm_name",
    "aws_kms_alias": "name",
    "aws_placement_group": "name",
}
"""Types whose id is the attribute named."""

_ARNS = {
    "aws_s3_bucket": "arn:{partition}:s3:::{bucket}",
    "aws_iam_role": "arn:{partition}:iam::{account}:role{path}{name}",
    "aws_iam_policy": "arn:{partition}:iam::{account}:policy{path}{name}",
    "aws_iam_instance_profile": "arn:{partition}:iam::{account}:instance-profile{path}{name}",
    "aws_kms_key": "arn:{partition}:kms:{region}:{account}:key/{id}",
    "aws_kms_alias": "arn:{partition}:kms:{region}:{account}:{name}",
    "aws_ssm_parameter": "arn:{partition}:ssm:{region}:{account}:parameter/{name}",
    "aws_cloudwatch_log_group": "arn:{partition}:logs:{region}:{account}:log-group:{name}",
    "aws_cloudwatch_metric_alarm": "arn:{partition}:cloudwatch:{region}:{account}:alarm:{alarm_name}",
    "aws_sns_topic": "arn:{partition}:sns:{region}:{account}:{name}",
    "aws_lb": "arn:{partition}:elasticloadbalancing:{region}:{account}:loadbalancer/app/{name}/{hex}",
    "aws_lb_target_group": "arn:{partition}:elasticloadbalancing:{region}:{account}:targetgroup/{name}/{hex}",
    "aws_lb_listener": "arn:{partition}:elasticloadbalancing:{region}:{account}:listener/app/{hex}/{hex}",
    "aws_launch_template": "arn:{partition}:ec2:{region}:{account}:launch-template/{id}",
}

_ARN_IS_ID = {"aws_iam_policy", "aws_sns_topic", "aws_lb", "aws_lb_target_group", "aws_lb_listener"}

_STRINGS: dict[str, Callable[[Object], str]] = {
    "dns_name": lambda known: (
        f"{known.get('name') or 'x'}-{known['hex'][:8]}.{known['region']}.elb.amazonaws.com"
    ),
    "bucket_domain_name": lambda known: f"{known.get('bucket')}.s3.amazonaws.com",
    "bucket_regional_domain_name": lambda known: f"{known.get('bucket')}.s3.{known['region']}.amazonaws.com",
    "owner_id": lambda known: ACCOUNT,
    "account_id": lambda known: ACCOUNT,
    "region": lambda known: str(known["region"]),
    "path": lambda known: "/",
    "availability_zone": lambda known: f"{known['region']}a",
    "public_ip": lambda known: "198.51.100.7",
    "private_ip": lambda known: "10.0.0.7",
    "key_id": lambda known: str(known.get("id") or known["hex"]),
    "unique_id": lambda known: "AROA" + known["hex"].upper(),
}

_NULL = {("aws_ssm_parameter", "value"), ("aws_ssm_parameter", "insecure_value")}
"""Stay empty where they are not configured: nothing is made up that looks like a secret."""

_NUMBERS = {"latest_version": 1, "default_version": 1, "version": 1}


@dataclass(frozen=True, slots=True)
class Place:
    """Where the provider is configured to work."""

    region: str = "us-east-1"


def complete(type_name: str, known: Object, wanted: dict[str, Any], place: Place, digits: str) -> Object:
    """Values for the attributes `wanted` (name -> type), of a new object of which `known` is set.

    `known`: attribute -> value or None. `digits`: 32 hex digits, the object's own. Returns only what was
    wanted.
    """
    facts: Object = {
        **{name: value for name, value in known.items() if value is not None},
        "digits": digits,
        "hex": digits[:16],
        "partition": PARTITION,
        "account": ACCOUNT,
        "region": known.get("region") or place.region,
    }
    made: Object = {}
    first = ("name", "bucket", "path", "id", "arn")
    order = [one for one in first if one in wanted] + [one for one in wanted if one not in first]
    if type_name in _ARN_IS_ID and "id" in order and "arn" in order:
        order.sort(key=lambda one: {"name": 0, "path": 1, "arn": 2, "id": 3}.get(one, 4))
    for name in order:
        made[name] = facts[name] = _value(type_name, name, wanted[name], facts)
    return made


def _value(type_name: str, name: str, kind: Any, facts: Object) -> Any:
    if (type_name, name) in _NULL:
        return None
    if kind == "string":
        return _string(type_name, name, facts)
    if kind == "number":
        return _NUMBERS.get(name, 0)
    if kind == "bool":
        return False
    return {} if kind[0] in ("map", "object") else []


def _string(type_name: str, name: str, facts: Object) -> str:
    if name in ("name", "bucket"):
        return f"{facts.get(f'{name}_prefix') or 'samovar-'}{facts['hex']}"
    if name == "id":
        return _id(type_name, facts)
    if name == "arn":
        return _arn(type_name, facts)
    if name in _STRINGS:
        return _STRINGS[name](facts)
    if name.endswith("_arn"):
        return f"arn:{PARTITION}:{_service(type_name)}:{facts['region']}:{ACCOUNT}:{name[:-4]}/{facts['hex']}"
    if name.endswith("_id"):
        return f"{name[:-3].rsplit('_', 1)[-1]}-{facts['hex']}"
    return f"{name.replace('_', '-')}-{facts['hex'][:8]}"


def _id(type_name: str, facts: Object) -> str:
    if type_name in _ARN_IS_ID and facts.get("arn"):
        return str(facts["arn"])
    if named := facts.get(_NAMED.get(type_name, "")):
        return str(named)
    if type_name == "aws_kms_key":
        return re.sub(r"^(.{8})(.{4})(.{4})(.{4})(.{12}).*", r"\1-\2-\3-\4-\5", facts["digits"])
    kind = _PREFIXES.get(type_name) or type_name.removeprefix("aws_").replace("_", "-")
    return f"{kind}-{facts['digits'][:17]}"


def _arn(type_name: str, facts: Object) -> str:
    form = _ARNS.get(
        type_name, f"arn:{{partition}}:{_service(type_name)}:{{region}}:{{account}}:{{kind}}/{{id}}"
    )
    kind = type_name.removeprefix("aws_").replace("_", "-")
    return form.format_map({"id": facts["hex"], "path": "/", "name": "x", **facts, "kind": kind}).replace(
        "parameter//", "parameter/"
    )


def _service(type_name: str) -> str:
    word = type_name.removeprefix("aws_").split("_")[0]
    ec2 = {"vpc", "subnet", "security", "launch", "eip", "nat", "internet", "route", "flow", "placement"}
    return "ec2" if word in ec2 else {"cloudwatch": "logs", "lb": "elasticloadbalancing"}.get(word, word)
