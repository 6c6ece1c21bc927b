"""The two secrets of a cluster in AWS: SSM SecureStrings below the cluster's prefix.

Written by whoever brings the cluster up, read by its nodes. Knows no files. Values are never part of an
error's text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

TOKEN = "ray-token"
SECRETS = "secrets"
NOT_FOUND = "ParameterNotFound"
DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation")

T = TypeVar("T")


class AwsRefused(Exception):
    """AWS did not do it; the text names what was asked, and the permission that may be missing."""


def get_parameter(ssm: Any, name: str) -> str | None:
    """None where there is none. Raises `AwsRefused`."""
    try:
        answer = asked(
            lambda: ssm.get_parameter(Name=name, WithDecryption=True),
            f"read the SSM parameter {name}",
            f"ssm:GetParameter on parameter{name} and kms:Decrypt on its key",
        )
    except AwsRefused as error:
        if _code(error.__cause__) == NOT_FOUND:
            return None
        raise
    return str(answer["Parameter"]["Value"])


def put_parameter(ssm: Any, name: str, value: str) -> None:
    """Replaces what is there, encrypted with the account's key for SSM. Raises `AwsRefused`."""
    asked(
        lambda: ssm.put_parameter(Name=name, Value=value, Type="SecureString", Overwrite=True),
        f"write the SSM parameter {name}",
        f"ssm:PutParameter on parameter{name} and kms:Encrypt on its key",
    )


def asked(call: Callable[[], T], what: str, permission: str) -> T:
    """The call's result. Raises `AwsRefused`, with the error of boto3 as its cause."""
    try:
        return call()
    except ClientError as error:
        code = _code(error)
        hint = f". Its role needs {permission}" if code in DENIED else ""
        raise AwsRefused(f"cannot {what}: {code}{hint}") from error
    except BotoCoreError as error:
        raise AwsRefused(f"cannot {what}: {error}") from error


def _code(error: BaseException | None) -> str:
    if not isinstance(error, ClientError):
        return ""
    return str(error.response.get("Error", {}).get("Code", "unknown"))
