"""A real S3 server for tests: `rclone serve s3` over a directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
from botocore.config import Config

from samovar.cluster.serve.s3_demo import S3Demo
from samovar.configs.sections import S3TierSettings

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


@contextmanager
def s3_server(directory: Path) -> Iterator[S3TierSettings]:
    """Runs while the context is open; the settings point at it."""
    demo = S3Demo(directory).start()
    try:
        yield demo.s3_settings(S3TierSettings())
    finally:
        demo.stop()


def plain_client(settings: S3TierSettings) -> S3Client:
    """boto3 as anybody would use it: to put things into the bucket behind the tier's back."""
    assert settings.access_key_id is not None
    assert settings.secret_access_key is not None
    return boto3.session.Session().client(
        "s3",
        endpoint_url=settings.endpoint,
        region_name=settings.region,
        aws_access_key_id=settings.access_key_id.get_secret_value(),
        aws_secret_access_key=settings.secret_access_key.get_secret_value(),
        config=Config(s3={"addressing_style": "path"}, proxies={}),
    )
