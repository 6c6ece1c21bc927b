"""Before anything starts it is known whether the operator's key can be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from samovar.cluster.errors import StartFailed
from samovar.cluster.serve.preflight import check_encryption
from samovar.configs.sections import TierSettings
from samovar.configs.settings import Settings
from tests.support.nodes.encrypted import outer_file


def settings(key: Path | None) -> Settings:
    return Settings(tiers=TierSettings(encryption_key_file=key))


def test_a_key_that_cannot_be_had_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_encryption(settings(None))
    check_encryption(settings(outer_file(tmp_path)))
    outer_file(tmp_path, "no key")
    with pytest.raises(StartFailed, match="64 hexadecimal digits"):
        check_encryption(settings(tmp_path / "outer"))
    with pytest.raises(StartFailed, match=r"tiers\.encryption_key_file: .*/none cannot be read"):
        check_encryption(settings(tmp_path / "none"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    arn = "arn:aws:kms:eu-central-1:123456789012:key/none"
    with pytest.raises(StartFailed, match=f"KMS does not give the key {arn}"):
        check_encryption(settings(Path(f"kms:{arn}")))
