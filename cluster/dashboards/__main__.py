"""Writes the generated files again, after a change of metrics: `python -m samovar.cluster.dashboards`."""

from __future__ import annotations

from samovar.cluster.dashboards.files import FOLDER, OPERATIONS, texts, with_tables

if __name__ == "__main__":
    for name, text in texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    OPERATIONS.write_text(with_tables(OPERATIONS.read_text(encoding="utf-8")), encoding="utf-8")
