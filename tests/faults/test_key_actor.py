"""The keys of a cluster in a real Ray: they outlive their actor, and what they open goes with them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from samovar.cache_tiers.actors import keys as key_actors
from samovar.cache_tiers.actors.keys import cluster_keys, cluster_sealing
from samovar.cache_tiers.actors.tier import tier_actor
from samovar.cache_tiers.blocks import SEALED_MAGIC, Clear, Placement, TierError
from samovar.cache_tiers.encryption import Keys, Unwrapped
from samovar.cache_tiers.messages import Fetch, FetchFailed, Lookup, StoreRequest
from samovar.cache_tiers.sessions import Item, ItemBounds, SessionsCleared, session_actor
from samovar.configs.sections import CpuTierSettings, NvmeTierSettings, TierSettings
from tests.support.nodes.encrypted import OTHER_OUTER, OUTER, outer_file
from tests.support.nodes.node_harness import MIB, SESSION, TENANT, Sample, sample
from tests.support.ray_start import start_small_ray

WAIT_S = 60.0
CALL_S = 10.0
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    start_small_ray()
    yield
    ray.shutdown()


@pytest.fixture
def outer(tmp_path: Path) -> Iterator[Path]:
    yield outer_file(tmp_path)
    ray.kill(handle(), no_restart=True)
    until("its name is free", lambda: not is_there())


def handle() -> Any:
    return ray.get_actor(key_actors.NAME, key_actors.NAMESPACE)


def is_there() -> bool:
    try:
        handle()
    except ValueError:
        return False
    return True


def until(what: str, poll: Callable[[], object]) -> Any:
    ends_s = time.monotonic() + WAIT_S
    while not (value := poll()):
        assert time.monotonic() < ends_s, f"{what}: not within {WAIT_S} s"
        time.sleep(0.05)
    return value


def answers(keys: Keys) -> bool:
    """A machine with much to do takes longer to start an actor than a call waits."""
    try:
        keys.check()
    except TierError:
        return False
    return True


def restart(actor: Any) -> None:
    """Kill an actor and wait for its next life: a kill is sent, and the life before answers meanwhile."""

    def process() -> int:
        with suppress(ray.exceptions.RayError):
            return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=WAIT_S))
        return 0

    before = process()
    assert before
    ray.kill(actor, no_restart=False)
    until("its next life is there", lambda: process() not in (0, before))


def test_keys_outlive_their_actor_and_destroyed_ones_do_not_come_back(tmp_path: Path, outer: Path) -> None:
    keys, other = (cluster_keys(outer, tmp_path / "kv", CALL_S) for _ in range(2))
    until("it is there", partial(answers, keys))
    gone, stays = keys.key_for(TENANT, SESSION), keys.key_for(TENANT, b"another!" * 2)
    assert other.key_for(TENANT, SESSION) == gone  # of another process
    assert keys.destroy([Clear(TENANT, SESSION)]) == 1
    restart(handle())
    fresh = cluster_keys(outer, tmp_path / "kv", CALL_S)

    def answered() -> object:
        try:
            return fresh.live()
        except TierError:
            return None

    assert until("it is back", answered) == {stays.key_id}
    assert fresh.find(TENANT, SESSION, gone.key_id) is None
    assert fresh.find(TENANT, b"another!" * 2, stays.key_id) == stays
    outer.unlink()
    with pytest.raises(TierError, match="cannot be read"):
        cluster_keys(outer, tmp_path / "kv", CALL_S).check()


def test_tenants_keys_are_wrapped_by_the_actor_and_its_operators_key_stays_there(
    tmp_path: Path, outer: Path
) -> None:
    sealing = cluster_sealing(outer, tmp_path / "kv", CALL_S)
    until("the actor is there", partial(answers, sealing.sessions))
    tenants = sealing.tenants
    wrapped, proof = tenants.wrap(b"a name", b"secret")
    assert tenants.unwrap(b"a name", wrapped, proof) == Unwrapped(b"secret", is_current=True)
    with pytest.raises(TierError, match="was changed"):
        tenants.unwrap(b"another", wrapped, proof)
    outer_file(tmp_path, OTHER_OUTER, OUTER)
    assert tenants.unwrap(b"a name", wrapped, proof) == Unwrapped(b"secret", is_current=False)
    outer_file(tmp_path, OTHER_OUTER)
    assert tenants.unwrap(b"a name", wrapped, proof) is None
    outer.unlink()
    with pytest.raises(TierError, match="cannot be read"):
        tenants.wrap(b"a name", b"secret")


def test_replies_are_sealed_on_the_heads_disk_and_there_after_a_restart(tmp_path: Path, outer: Path) -> None:
    path, body = tmp_path / "kv" / "replies.sqlite", b"the eagle lands at noon"
    until("the keys are there", partial(answers, cluster_keys(outer, tmp_path / "kv", CALL_S)))
    bounds = ItemBounds(path=path, sealed_by=outer)
    actor = session_actor(100, 4, 5.0, kept=bounds)
    now_s = time.time()
    one = Item(TENANT, SESSION, "reply", b"r", body, now_s, now_s + 999, is_durable=True)

    def recalled() -> Any:
        return ray.get(actor.recall.remote(TENANT, SESSION), timeout=WAIT_S).replies

    try:
        assert ray.get(actor.keep.remote([one], []), timeout=WAIT_S) == 1
        raw = b"".join(file.read_bytes() for file in path.parent.glob("replies.sqlite*"))
        assert SEALED_MAGIC in raw
        assert body not in raw
        restart(actor)
        assert until("it is back", recalled) == (one,)
        ray.get(actor.forget.remote([SessionsCleared(TENANT, SESSION, now_s + 1)]), timeout=WAIT_S)
        assert recalled() == ()
    finally:
        ray.kill(actor, no_restart=True)


def stored() -> Sample:
    return sample(1, placement=Placement(first="nvme", write_behind=(), lowest="nvme"))


@ray.remote(num_cpus=0)
class Staging:
    """Stages records as a replica does."""

    def __init__(self) -> None:
        from samovar.cache_tiers.actors.staging import StagingBuffer, open_outbox

        self._outbox = StagingBuffer(64 * MIB, keep_s=60)
        open_outbox(self._outbox)

    def stage(self) -> int | None:
        return self._outbox.put(stored().record)


def test_a_nodes_files_are_encrypted_and_an_erasure_takes_their_key(tmp_path: Path, outer: Path) -> None:
    settings = TierSettings(
        cpu=CpuTierSettings(bytes_max=0),
        nvme=NvmeTierSettings(bytes_max=64 * MIB, direct_io=False),
        encryption_key_file=outer,
    )
    one, folder = stored(), tmp_path / "kv"
    staging: Any = Staging.remote()
    actor = tier_actor(settings, ray.get_runtime_context().get_node_id(), folder)

    def look() -> Any:
        lookup = Lookup(one.header.namespace, one.chain, TENANT, SESSION)
        return ray.get(actor.lookup.remote(lookup), timeout=WAIT_S)

    def is_up() -> bool:
        stats = ray.get(actor.stats.remote(), timeout=WAIT_S)
        return {row.name: row.state for row in stats.tiers}["nvme"] == "up"

    def load() -> bytes:
        (span,) = look().spans
        fetch = Fetch(one.header.namespace, TENANT, span.extent_id, span.offset, span.blocks, span.tier, 10.0)
        fetched = ray.get(actor.fetch.remote(fetch), timeout=WAIT_S)
        return b"" if isinstance(fetched, FetchFailed) else fetched.data.tobytes()

    try:
        until("its files are scanned, for which it needs the keys", is_up)
        ticket = ray.get(staging.stage.remote(), timeout=WAIT_S)
        found = look()
        offer = StoreRequest(ticket, one.header, one.record.nbytes, found.incarnation, found.clear_seq)
        reply = ray.get(actor.offer.remote([offer], [staging]), timeout=WAIT_S)
        assert reply.outcomes == ("taken",)
        until("it is stored", lambda: look().spans)
        (path,) = folder.rglob("*.kv")
        data = path.read_bytes()
        assert one.payload.tobytes()[:48] not in data
        assert load() == one.record.tobytes()
        ray.kill(actor, no_restart=False)
        until("its next life has scanned its files", lambda: _quiet(look, since=found.incarnation))
        assert load() == one.record.tobytes()
        cleared = ray.get(actor.clear.remote(Clear(TENANT, SESSION)), timeout=WAIT_S)
        assert cleared.unreachable == ()
        assert not list(folder.rglob("*.kv"))
        assert "session" in (folder / "session-keys.log").read_text()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)  # from a backup
        ray.kill(actor, no_restart=False)
        until("the dead record is deleted", lambda: not path.exists())
    finally:
        ray.kill(actor, no_restart=True)
        ray.kill(staging)


def _quiet(look: Callable[[], Any], since: str) -> bool:
    try:
        seen = look()
        return bool(seen.spans) and seen.incarnation != since
    except ray.exceptions.RayActorError:
        return False
