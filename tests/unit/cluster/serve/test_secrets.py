"""The secret that is kept: made once, read by all, and refused when it may not be one any more."""

from __future__ import annotations

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import SecretStr

from samovar.cluster.serve import secrets as secret
from samovar.cluster.serve.preflight import StartFailed, with_server_secret
from samovar.cluster.serve.secrets import FILE_NAME, SecretRefused, kept_secret
from samovar.configs.settings import AuthSettings, ModelSettings, Settings
from samovar.router.auth import tenant_salt

TEXT = "5a" * 32


def written(folder: Path, text: str = TEXT, mode: int = 0o600) -> Path:
    path = folder / FILE_NAME
    path.write_text(text)
    path.chmod(mode)
    return path


def test_it_is_made_once_for_us_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "cache"
    made = kept_secret(folder)
    assert len(made) == 64
    assert kept_secret(folder) == made
    assert stat.S_IMODE((folder / FILE_NAME).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert os.listdir(folder) == [FILE_NAME]
    assert kept_secret(tmp_path / "b") != made


def test_of_many_who_make_it_at_once_all_get_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have found none before the first makes one."""
    together = threading.Barrier(8)
    make = secret._make

    def at_once(path: Path) -> None:
        together.wait(10)
        make(path)

    monkeypatch.setattr(secret, "_make", at_once)
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: kept_secret(tmp_path), range(8)))
    assert len(set(made)) == 1
    assert os.listdir(tmp_path) == [FILE_NAME]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, mode=mode)
    with pytest.raises(SecretRefused, match=f"mode {mode:04o}") as refused:
        kept_secret(tmp_path)
    assert str(path) in str(refused.value)
    assert TEXT not in str(refused.value)
    assert path.read_text() == TEXT


def test_a_file_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    monkeypatch.setattr(secret.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SecretRefused, match="belongs to user"):
        kept_secret(tmp_path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    real = written(tmp_path)
    real.rename(tmp_path / "real")
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "real")
    with pytest.raises(SecretRefused, match="cannot be read"):
        kept_secret(tmp_path)
    (tmp_path / FILE_NAME).unlink()
    os.mkfifo(tmp_path / FILE_NAME, 0o600)
    with pytest.raises(SecretRefused, match="is not a file"):
        kept_secret(tmp_path)


@pytest.mark.parametrize("text", ["", "5a", TEXT[:-1], TEXT + TEXT, "x" * 64, "\x00" * 64])
def test_a_file_with_something_else_in_it_is_refused_and_stays(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(SecretRefused, match="does not hold a secret"):
        kept_secret(tmp_path)
    assert path.read_text() == text


def of(cache_dir: Path, **auth: object) -> Settings:
    return Settings(auth=AuthSettings.model_validate(auth), model=ModelSettings(cache_dir=cache_dir))


def salt(settings: Settings) -> bytes:
    secret = with_server_secret(settings).auth.server_secret
    assert secret is not None
    return tenant_salt(secret.get_secret_value().encode(), "team", None)


def test_namespaces_survive_a_restart(tmp_path: Path) -> None:
    assert salt(of(tmp_path)) == salt(of(tmp_path)) != salt(of(tmp_path / "other"))


def test_a_configured_secret_holds_and_other_keys_are_kept(tmp_path: Path) -> None:
    configured = of(tmp_path, server_secret="configured-by-hand")
    assert with_server_secret(configured) is configured
    assert os.listdir(tmp_path) == []
    keys = {"api_keys": {"team": "k" * 16}, "admin_key": "a" * 16}
    auth = with_server_secret(of(tmp_path, **keys)).auth
    assert auth.api_keys == {"team": (SecretStr("k" * 16),)}
    assert auth.admin_key == SecretStr("a" * 16)


def test_a_start_says_why_there_is_no_secret(tmp_path: Path) -> None:
    written(tmp_path, mode=0o644)
    with pytest.raises(StartFailed, match=r"auth\.server_secret"):
        with_server_secret(of(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(StartFailed, match=r"model\.cache_dir"):
        with_server_secret(of(tmp_path / "file"))
