"""Our KV events, read by vLLM's own structs, of the environment that serves and of each minor's source."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from samovar.cache_tiers.events.feed import POOL, REMOTE, STORAGE, BlocksRemoved, BlocksStored, place_of
from samovar.cache_tiers.events.publisher import REPLAY_PORT, EventPublisher
from tests.support.kv_subscriber import free_ports, until

READER = """
import ast, json, sys
import msgspec, zmq

source, port, replay_port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
if source == "-":
    from vllm.distributed.kv_events import KVEventBatch
else:  # the structs alone, as they are written there
    tree = ast.parse(open(source).read())
    wanted = {"EventBatch", "KVCacheEvent", "BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch"}
    space = {"msgspec": msgspec, "ExternalBlockHash": bytes | int, "Any": __import__("typing").Any}
    parts = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name in wanted]
    exec(compile(ast.Module(parts, []), source, "exec"), space)
    KVEventBatch = space["KVEventBatch"]
decoder = msgspec.msgpack.Decoder(KVEventBatch)
context = zmq.Context.instance()
sub = context.socket(zmq.SUB)
sub.connect(f"tcp://127.0.0.1:{port}")
sub.subscribe("kv@")
asks = context.socket(zmq.DEALER)
asks.connect(f"tcp://127.0.0.1:{replay_port}")
asks.send_multipart([b"", (0).to_bytes(8, "big")])
found, seen = [], -1
while len(found) < count:
    _, topic, number, payload = asks.recv_multipart()
    if number == (-1).to_bytes(8, "big", signed=True):
        asks.send_multipart([b"", (seen + 1).to_bytes(8, "big")])
        continue
    seen = int.from_bytes(number, "big")
    batch = decoder.decode(payload)
    assert batch.data_parallel_rank == 0 and batch.ts > 0
    for event in batch.events:
        fields = {name: getattr(event, name) for name in event.__struct_fields__}
        found.append({"type": type(event).__name__, **fields})
print(json.dumps(found))
"""


def python() -> str:
    return str(Path(os.environ["TESTS_VLLM"]) / "bin" / "python")


def sources() -> list[str]:
    folder = os.environ.get("TESTS_VLLM_SOURCES")
    found = [] if folder is None else sorted(Path(folder).glob("*/vllm/distributed/kv_events.py"))
    # Of minors before 0.29 events are arrays, not maps.
    return ["-", *(str(one) for one in found if one.read_text().count("array_like=True") == 1)]


@pytest.mark.parametrize("source", sources())
def test_vllms_structs_read_what_we_tell(source: str) -> None:
    publisher = EventPublisher("127.0.0.1", free_ports(), model="tea")
    until(lambda: publisher.port is not None)
    port = publisher.port or 0
    feed = publisher.feed
    feed.tell(BlocksStored((2**64 - 1,), None, tuple(range(16)), 16, POOL, "ab"))
    feed.tell(BlocksStored((7,), 2**64 - 1, tuple(range(16, 32)), 16, POOL, "ab"))
    feed.tell(BlocksStored((2**64 - 1, 7), None, (), 16, place_of("cpu")))
    feed.tell(BlocksRemoved((7,), POOL))
    feed.tell(BlocksStored((7,), 2**64 - 1, (), 16, STORAGE))
    feed.tell(BlocksRemoved((7,), REMOTE))
    done = subprocess.run(
        [python(), "-c", READER, source, str(port), str(port + REPLAY_PORT), "6"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    publisher.close()
    assert done.returncode == 0, done.stderr[-3000:]
    cleared, gpu, cpu, gone, disk, remote = json.loads(done.stdout.splitlines()[-1])
    assert cleared["type"] == "AllBlocksCleared"
    assert (gpu["type"], gpu["block_hashes"], gpu["parent_block_hash"]) == (
        "BlockStored",
        [2**64 - 1, 7],
        None,
    )
    assert (gpu["token_ids"], gpu["block_size"], gpu["medium"]) == (list(range(32)), 16, "GPU")
    assert (gpu["extra_keys"], gpu["lora_id"], gpu["lora_name"]) == ([["ab"], None], None, None)
    assert (cpu["token_ids"], cpu["medium"], cpu["locality"]) == ([], "CPU", "LOCAL")
    assert (gone["type"], gone["medium"], gone["block_hashes"]) == ("BlockRemoved", "GPU", [7])
    assert (disk["medium"], disk["locality"], disk["parent_block_hash"]) == ("STORAGE", "LOCAL", 2**64 - 1)
    assert (remote["medium"], remote["locality"], remote["ownership"]) == ("STORAGE", "REMOTE", "samovar")
