"""Checks that this tree reads what an older one wrote: `python -m tests.reads_older_tree CHECKOUT`.

CHECKOUT: another working tree with its `.venv`. Its service has some conversations and stops; ours goes on
with them from the same cache directory, then from the same bucket.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.support.services import service as services
from tests.support.services import tier_service as tier_services
from tests.support.services.guests import Conversation
from tests.support.services.service import free_port
from tests.support.services.tier_service import s3_env, s3_flags, s3_server, tier_service

CONVERSATIONS = 4
NEWER = {"tiers.lookup-share", "tiers.lookup-idle-share"}
"""Flags of the services that are started here, which an older tree does not know."""


@contextmanager
def command_of(checkout: Path) -> Iterator[None]:
    """While this is open, services start from another checkout."""
    ours, flags = services.sys, tier_services.FLAGS
    services.sys = SimpleNamespace(executable=str(checkout / ".venv/bin/python"))  # type: ignore[assignment]
    tier_services.FLAGS = {name: value for name, value in flags.items() if name not in NEWER}
    try:
        yield
    finally:
        services.sys, tier_services.FLAGS = ours, flags


def compare(
    older: Path, folder: Path, tier: str, flags: Mapping[str, object], **more: Any
) -> list[tuple[str, int, int, bool]]:
    """Return for each conversation: tier, prompt tokens, those from the tier, whether the answer is right."""
    conversations = [Conversation(seed, turn_words=300) for seed in range(CONVERSATIONS)]
    with command_of(older), tier_service(folder, flags, **more) as service:
        for conversation in conversations:
            service.turn(conversation)
        service.settle()
    rows = []
    with tier_service(folder, flags, **more) as service:
        services.until("the tier was scanned", lambda: service.tier(tier)["extents"] >= CONVERSATIONS, 60)
        for conversation in conversations:
            truth = service.uncached(conversation.next_messages())
            reply = service.turn(conversation)
            rows.append((tier, reply.prompt_tokens, reply.by_tier.get(tier, 0), reply.text == truth.text))
    return rows


def main(older: Path) -> int:
    """Print the table; return 1 if a conversation was lost or answered otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(older, Path(folder) / "nvme", "nvme", {})
        with s3_server(Path(folder) / "bucket", free_port()) as demo:
            flags = {**s3_flags(demo), "tiers.nvme.bytes-max": 0}
            rows += compare(older, Path(folder) / "s3", "s3", flags, env=s3_env(demo))
    table = Table("tier", "prompt tokens", "from the tier", "same answer as uncached")
    for tier, prompt, cached, is_same in rows:
        table.add_row(tier, str(prompt), str(cached), "yes" if is_same else "NO")
    Console().print(table)
    return 0 if all(is_same and 2 * cached > prompt for _, prompt, cached, is_same in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
