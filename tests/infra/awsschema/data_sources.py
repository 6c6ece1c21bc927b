"""What the data sources and ephemeral resources of the stand-in answer, where made-up text would not do.

It knows no wire: a function takes the configuration (a dict) and the place, and returns what it knows.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable
from typing import Any

from tests.infra.awsschema.values import ACCOUNT, PARTITION, Place

Object = dict[str, Any]
ZONES = "abc"
SECRET_MARK = "samovarsecret"
"""Begins every secret this stand-in makes up, so that a test finds it where it must not be."""


def _zones(config: Object, place: Place) -> Object:
    names = [place.region + letter for letter in ZONES]
    names = [name for name in names if name not in (config.get("exclude_names") or [])]
    return {
        "id": place.region,
        "names": names,
        "zone_ids": [f"use1-az{number}" for number in range(1, len(names) + 1)],
        "group_names": [place.region],
    }


def _region(config: Object, place: Place) -> Object:
    name = config.get("region") or config.get("name") or place.region
    endpoint = f"ec2.{name}.amazonaws.com"
    return {"id": name, "name": name, "region": name, "endpoint": endpoint, "description": f"Region {name}"}


def _identity(config: Object, place: Place) -> Object:
    arn = f"arn:{PARTITION}:iam::{ACCOUNT}:user/samovar-test"
    return {"id": ACCOUNT, "account_id": ACCOUNT, "arn": arn, "user_id": "AIDASAMOVARTEST"}


def _partition(config: Object, place: Place) -> Object:
    suffix = "amazonaws.com"
    return {
        "id": PARTITION,
        "partition": PARTITION,
        "dns_suffix": suffix,
        "reverse_dns_prefix": "com.amazonaws",
    }


def _parameter(config: Object, place: Place) -> Object:
    """AMI parameters have an AMI as value; others something that must not reach any output."""
    name = str(config.get("name", ""))
    public = name.startswith("/aws/service/")
    image = _image_id(name) if public else SECRET_MARK + secrets.token_hex(16)
    known = {"id": name, "value": image, "type": "String" if public else "SecureString", "version": 1}
    return {**known, "insecure_value": image if public else None}


def _image_id(name: str) -> str:
    return "ami-" + hashlib.sha256(name.encode()).hexdigest()[:17]


def _image(config: Object, place: Place) -> Object:
    image = _image_id(repr(sorted(config.items(), key=str)))
    return {"id": image, "image_id": image, "root_device_name": "/dev/sda1", "architecture": "x86_64"}


def _prefix_list(config: Object, place: Place) -> Object:
    return {"id": "pl-63a5400a", "name": config.get("name") or f"com.amazonaws.{place.region}.s3"}


def _password(config: Object, place: Place) -> Object:
    length = int(config.get("password_length") or 32)
    return {"random_password": (SECRET_MARK + secrets.token_hex(length))[:length]}


def _policy_document(config: Object, place: Place) -> Object:
    text = json.dumps(policy_document(config), indent=2)
    return {"json": text, "minified_json": json.dumps(json.loads(text), separators=(",", ":"))}


def policy_document(config: Object) -> Object:
    """An `aws_iam_policy_document` as the policy it stands for; sources are merged by Sid."""
    statements: list[Object] = []
    for source in config.get("source_policy_documents") or []:
        statements += _statements_of(source)
    statements = _merged(statements, [_statement(one) for one in config.get("statement") or []])
    for source in config.get("override_policy_documents") or []:
        statements = _merged(statements, _statements_of(source))
    policy: Object = {"Version": config.get("version") or "2012-10-17"}
    if config.get("policy_id"):
        policy["Id"] = config["policy_id"]
    return {**policy, "Statement": statements}


def _statements_of(source: str) -> list[Object]:
    found = json.loads(source).get("Statement", [])
    return [found] if isinstance(found, dict) else found


def _merged(old: list[Object], new: list[Object]) -> list[Object]:
    ids = {one["Sid"] for one in new if one.get("Sid")}
    return [one for one in old if one.get("Sid") not in ids] + new


def _statement(block: Object) -> Object:
    made: Object = {"Effect": block.get("effect") or "Allow"}
    if block.get("sid"):
        made["Sid"] = block["sid"]
    lists = {"actions": "Action", "not_actions": "NotAction", "resources": "Resource"}
    for name, key in {**lists, "not_resources": "NotResource"}.items():
        if block.get(name):
            made[key] = _one_or_many(block[name])
    for name, key in {"principals": "Principal", "not_principals": "NotPrincipal"}.items():
        if block.get(name):
            made[key] = _principal(block[name])
    for condition in block.get("condition") or []:
        tests = made.setdefault("Condition", {}).setdefault(condition["test"], {})
        tests[condition["variable"]] = _one_or_many(condition["values"], ordered=True)
    return made


def _principal(blocks: list[Object]) -> Any:
    made = {one["type"]: _one_or_many(one["identifiers"]) for one in blocks}
    return "*" if made == {"*": "*"} else made


def _one_or_many(found: list[str], ordered: bool = False) -> str | list[str]:
    listed = found if ordered else sorted(found)
    return listed[0] if len(listed) == 1 else listed


ANSWERS: dict[str, Callable[[Object, Place], Object]] = {
    "aws_availability_zones": _zones,
    "aws_region": _region,
    "aws_caller_identity": _identity,
    "aws_partition": _partition,
    "aws_ssm_parameter": _parameter,
    "aws_ami": _image,
    "aws_prefix_list": _prefix_list,
    "aws_ec2_managed_prefix_list": _prefix_list,
    "aws_iam_policy_document": _policy_document,
    "aws_secretsmanager_random_password": _password,
}


def answer(type_name: str, config: Object, place: Place) -> Object:
    """What is known of this data source; what it does not name is made up by `values`."""
    found = ANSWERS.get(type_name)
    return found(config, place) if found else {}
