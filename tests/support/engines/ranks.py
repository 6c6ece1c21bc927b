"""Engines whose model and pool lie in several ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from samovar.replicas.forward.loading import load_model
from samovar.replicas.ranks import weights
from samovar.replicas.ranks.group import Launch, RankSubprocess
from samovar.replicas.ranks.worker import Rank, RankStart
from samovar.replicas.start.build import BuiltEngine
from tests.support.engines.engines import small_engine

_loading = threading.Lock()


def _load_alone(*args: Any) -> Any:
    """transformers changes torch for the whole process while it loads a model."""
    with _loading:
        return load_model(*args)


weights.load_model = _load_alone  # for whoever starts ranks as threads


class ThreadRank:
    """A rank in a thread of this process: it starts in no time, and a test can look at it, or break it."""

    def __init__(self, start: RankStart, of_class: type[Rank] = Rank) -> None:
        self.error: BaseException | None = None
        self.rank: Rank | None = None
        self._class = of_class
        self._thread = threading.Thread(target=self._serve, args=(start,), daemon=True)
        self._thread.start()

    def _serve(self, start: RankStart) -> None:
        try:
            self.rank = self._class(start)
            self.rank.serve()
        except BaseException as error:  # noqa: BLE001 - for the test to look at
            self.error = error

    def failure(self) -> str | None:
        return None if self._thread.is_alive() else f"it has ended: {self.error!r}"

    def stop(self) -> None:
        self._thread.join(30)


class Started:
    """A launcher that keeps what it has started."""

    def __init__(self, launch: Callable[[RankStart], ThreadRank | RankSubprocess]) -> None:
        self._launch = launch
        self.ranks: list[ThreadRank | RankSubprocess] = []

    def __call__(self, start: RankStart) -> ThreadRank | RankSubprocess:
        self.ranks.append(self._launch(start))
        return self.ranks[-1]


@contextmanager
def split_engine(
    model_dir: Path, ranks: int, *, kv_groups: int = 4, launch: Launch = ThreadRank, **more: object
) -> Iterator[BuiltEngine]:
    """An engine over so many ranks, threads by default; 1 is the ordinary engine, not exact either."""
    built = small_engine(
        model_dir,
        exact=False,
        launch=launch,
        kv_groups=kv_groups,
        tensor_parallel=ranks,
        **more,  # type: ignore[arg-type]
    )
    try:
        yield built
    finally:
        built.engine.runner.close()
