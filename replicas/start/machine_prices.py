"""Keeps what the model that was started last costs on this machine, for `samovar doctor`.

Imports no torch.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from samovar.cache_tiers.pricing import PrefillPrice
from samovar.configs.atomic_file import atomic_write
from samovar.configs.settings import Settings
from samovar.replicas.messages import ReplicaInfo

logger = logging.getLogger(__name__)

FILE = "last-start.json"
FILE_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True)
class MachinePrices:
    """The price of a prefill of a model, as a start of it measured, and its bytes of KV per token.

    `pool_bytes`: of one replica; 0: not told.
    """

    model_name: str
    device: str
    kv_dtype: str
    bytes_per_token: int
    prefill: PrefillPrice
    pool_bytes: int = 0

    @staticmethod
    def of(info: ReplicaInfo, prefill: PrefillPrice) -> MachinePrices:
        """Return those of a replica that has started."""
        return MachinePrices(
            info.model_name,
            info.device,
            info.kv_dtype,
            info.bytes_per_token,
            prefill,
            info.pool_bytes,
        )


_PRICES = TypeAdapter(MachinePrices)


def measurements_dir(settings: Settings) -> Path:
    """Return the directory of what starts have measured on this machine."""
    return settings.model.cache_dir.expanduser() / "measurements"


def keep_prices(folder: Path, prices: MachinePrices) -> None:
    """Write the prices into a small file in `folder`; a file that cannot be written costs nothing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / FILE, json.dumps(asdict(prices)).encode(), durable=False)
    except OSError as error:
        logger.info("the prices of this start are not kept: %s", error)


def kept_prices(folder: Path) -> MachinePrices | None:
    """Return the prices of the last start; None if there are none, or none that can be read."""
    try:
        with (folder / FILE).open("rb") as file:
            return _PRICES.validate_json(file.read(FILE_BYTES_MAX))
    except (OSError, ValueError):  # also pydantic's: of another version, or not ours
        return None
