"""What every benchmark writes: `bench/out/NAME.json` with machine, command and rows, and a table."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

OUT_DIR = Path(__file__).parent / "out"


def machine() -> dict[str, Any]:
    """The facts that a number depends on."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def write(name: str, rows: Sequence[Mapping[str, Any]], *, module: str = "", **more: Any) -> Path:
    """Write `OUT_DIR/name.json`; `more` are further top-level fields.

    `module`: the one of `bench` that measured, where it has another name.
    """
    OUT_DIR.mkdir(parents=True, exist_ok=True)
    path = OUT_DIR / f"{name}.json"
    command = " ".join([Path(sys.executable).name, "-m", f"bench.{module or name}", *sys.argv[1:]])
    document = {"machine": machine(), "command": command, "rows": list(rows), **more}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as one table; columns are the keys of the first row."""
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=140).print(table)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
