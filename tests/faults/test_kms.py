"""The operator's key in AWS KMS, by moto's server over HTTP: made once, rotated, disabled, and away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, EndpointConnectionError

from samovar.cache_tiers.blocks import Clear, TierError
from samovar.cache_tiers.encryption import LeasedKeys, OuterWrapper, SessionKeyFile, open_outer
from samovar.cache_tiers.encryption.keys import LEASE_S as SESSION_LEASE_S
from samovar.cache_tiers.encryption.outer import AGAIN_S, LEASE_S, KmsOuterKeys
from tests.infra.moto_process import KEYS, moto_process
from tests.support.clock import Clock

TENANT, SESSION, OTHER = b"t" * 16, b"s" * 8 + bytes(8), b"o" * 8 + bytes(8)
REGION = "eu-central-1"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_process() as url:
        yield url


class Kms:
    """A region's KMS. Its calls are counted; `is_away`: none gets there; `disabled`: keys that it refuses.

    Of a key that was disabled moto decrypts as before, so this says what AWS says.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.calls: list[str] = []
        self.is_away = False
        self.disabled: set[str] = set()
        self.admin = self.client(REGION)

    def client(self, region: str) -> Any:
        made = boto3.session.Session(KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"]).client(
            "kms", region_name=region, endpoint_url=self.url, config=Config(retries={"total_max_attempts": 1})
        )
        made.meta.events.register("provide-client-params.kms.*", self._asked)
        return made

    def _asked(self, params: dict[str, Any], model: Any, **_: Any) -> None:
        self.calls.append(model.name)
        if self.is_away:
            raise EndpointConnectionError(endpoint_url=self.url)
        if params.get("KeyId") in self.disabled:
            raise ClientError({"Error": {"Code": "DisabledException"}}, model.name)

    def key(self) -> str:
        arn: str = self.admin.create_key()["KeyMetadata"]["Arn"]
        return arn


@pytest.fixture
def kms(moto: str) -> Kms:
    return Kms(moto)


class Head:
    """The keys' process on the head, over the operator's key in KMS; `restart` begins it once more."""

    def __init__(self, kms: Kms, folder: Path, arn: str) -> None:
        self.kms, self.folder, self.clock = kms, folder, Clock()
        self.start(arn)

    def start(self, arn: str) -> None:
        beside = self.folder / "session-keys.kms"

        def outer() -> KmsOuterKeys:
            return KmsOuterKeys(arn, beside, client=self.kms.client, clock=self.clock)

        self.file = SessionKeyFile(self.folder / "session-keys", outer(), wall_clock=lambda: 1e9)
        self.keys = LeasedKeys(self.file, self.clock)
        self.wrapper = OuterWrapper(outer())

    def restart(self, arn: str) -> None:
        self.file.close()
        self.start(arn)


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(TierError) as error:
        call()
    return str(error.value)


def test_a_key_of_kms_wraps_as_a_files_does_and_is_asked_for_seldom(kms: Kms, tmp_path: Path) -> None:
    arn = kms.key()
    head = Head(kms, tmp_path, arn)
    mine = head.keys.key_for(TENANT, SESSION)
    wrapped, proof = head.wrapper.wrap(b"name", b"secret")
    assert head.wrapper.unwrap(b"name", wrapped, proof) is not None
    for _ in range(50):
        head.file.key_for(TENANT, OTHER)
    assert kms.calls.count("GenerateDataKey") == 1
    assert kms.calls.count("Decrypt") == 1, "by the second that reads what the first has written"
    (line,) = (tmp_path / "session-keys.kms").read_text().splitlines()
    assert line.startswith(f"{arn} {arn} ")
    assert (tmp_path / "session-keys.kms").stat().st_mode & 0o777 == 0o600
    head.restart(arn)
    assert head.keys.key_for(TENANT, SESSION) == mine
    assert head.wrapper.unwrap(b"name", wrapped, proof) is not None
    assert head.keys.destroy([Clear(TENANT, SESSION)]) == 1
    assert head.keys.find(TENANT, SESSION, mine.key_id) is None
    head.file.check_integrity()


def test_another_key_wraps_again_and_no_payload_is_written(kms: Kms, tmp_path: Path) -> None:
    old, new = kms.key(), kms.key()
    head = Head(kms, tmp_path, old)
    mine = head.keys.key_for(TENANT, SESSION)
    wrapped, proof = head.wrapper.wrap(b"name", b"secret")
    head.restart(new)
    assert head.keys.key_for(TENANT, SESSION) == mine, "the session's key is as it was"
    found = head.wrapper.unwrap(b"name", wrapped, proof)
    assert found is not None
    assert not found.is_current
    again, its_proof = head.wrapper.wrap(b"name", found.secret)
    kms.disabled.add(old)
    head.restart(new)
    assert head.keys.key_for(TENANT, SESSION) == mine
    assert head.wrapper.unwrap(b"name", wrapped, proof) is None
    asked = len(kms.calls)
    assert head.wrapper.unwrap(b"name", wrapped, proof) is None
    assert len(kms.calls) == asked, "it is not asked for by each request"
    found = head.wrapper.unwrap(b"name", again, its_proof)
    assert found is not None
    assert found.is_current


def test_what_lies_elsewhere_opens_by_what_lies_with_it_if_the_heads_disk_is_lost(
    kms: Kms, tmp_path: Path
) -> None:
    arn = kms.key()
    wrapped, proof = Head(kms, tmp_path / "head", arn).wrapper.wrap(b"name", b"secret")
    found = Head(kms, tmp_path / "another", arn).wrapper.unwrap(b"name", wrapped, proof)
    assert found is not None
    assert (found.secret, found.is_current) == (b"secret", True)


def test_a_kms_that_is_away_is_one_error_at_the_start_and_misses_after_the_leases(
    kms: Kms, tmp_path: Path
) -> None:
    arn = kms.key()
    kms.is_away = True
    head = Head(kms, tmp_path, arn)
    why = refused(head.keys.check)
    assert why.startswith(f"tiers.encryption_key_file: KMS does not give the key {arn}: ")
    begun = len(kms.calls)
    assert refused(head.keys.check) == why
    assert len(kms.calls) == begun, "it is not asked again at once"
    kms.is_away = False
    head.restart(arn)
    mine = head.keys.key_for(TENANT, SESSION)
    kms.disabled.add(arn)
    head.clock.now_s += SESSION_LEASE_S - 1
    assert head.keys.find(TENANT, SESSION, mine.key_id) == mine
    head.clock.now_s += 2
    assert head.keys.find(TENANT, SESSION, mine.key_id) == mine, "the data key has its lease"
    head.clock.now_s += LEASE_S
    assert "DisabledException" in refused(lambda: head.keys.find(TENANT, SESSION, mine.key_id))
    assert "DisabledException" in refused(lambda: head.keys.key_for(TENANT, OTHER))
    assert head.keys.destroy([Clear(TENANT, OTHER)]) == 0, "an erasure needs no operator's key"
    kms.disabled.clear()
    head.clock.now_s += AGAIN_S
    assert head.keys.find(TENANT, SESSION, mine.key_id) == mine
    assert head.keys.destroy([Clear(TENANT, SESSION)]) == 1


def test_the_setting_names_a_file_or_a_key_of_kms(tmp_path: Path) -> None:
    arn = "arn:aws:kms:eu-central-1:123456789012:alias/samovar"
    for given in (f"kms:{arn}", f"kms://{arn}"):
        assert isinstance(open_outer(Path(given), tmp_path / "session-keys"), KmsOuterKeys)
    assert not isinstance(open_outer(tmp_path / "kms", tmp_path / "session-keys"), KmsOuterKeys)


def test_an_alias_that_is_another_keys_now_opens_what_the_first_one_has_wrapped(
    kms: Kms, tmp_path: Path
) -> None:
    first, second = kms.key(), kms.key()
    alias = first.rsplit(":", 1)[0] + ":alias/samovar"
    kms.admin.create_alias(AliasName="alias/samovar", TargetKeyId=first)
    head = Head(kms, tmp_path, alias)
    mine = head.keys.key_for(TENANT, SESSION)
    kms.admin.update_alias(AliasName="alias/samovar", TargetKeyId=second)
    head.restart(alias)
    assert head.keys.find(TENANT, SESSION, mine.key_id) == mine
    kms.admin.delete_alias(AliasName="alias/samovar")
