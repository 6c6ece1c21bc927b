"""One SQLite file that threads and processes use at once: connections, transactions, copies, erasing."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path

from samovar.router.context.knowledge.entries import KnowledgeError, Rows, RowSealer, StoreBusy

logger = logging.getLogger(__name__)

PRAGMAS = ("synchronous=FULL", "secure_delete=ON", "trusted_schema=OFF")


WAL_TRIES = 100
IN_MEMORY = Path(":memory:")
"""The path of a file that only one thread uses, and that is gone when it is closed."""


def _use_wal(db: sqlite3.Connection) -> None:
    """Switch a file to its write-ahead log.

    SQLite does not wait when two connections do that at once, as those of two ingresses that start; the
    transaction in between does.
    """
    for left in reversed(range(WAL_TRIES)):
        try:
            db.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if not left:
                raise
        db.execute("BEGIN IMMEDIATE")
        db.execute("ROLLBACK")


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):  # to open and close it would end this process's locks on it
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


class SqliteFile:
    """A file of one schema, made with mode 0600; each thread has a connection of its own. Thread-safe.

    `path`: or `IN_MEMORY`. `schemas`: what each format of the file, its `user_version`, adds
    to the one before; statements that end with ";" and a line's end. An older file gets what it lacks.
    `busy_s`: how long a write waits for that of another. Raises `KnowledgeError` if it cannot be opened;
    without `must_open` that is logged, and every use tries again.
    """

    def __init__(self, path: Path, schemas: Sequence[str], busy_s: float, must_open: bool = True) -> None:
        self.path = path
        self._schemas = schemas
        self._busy_s = busy_s
        self._local = threading.local()
        self._lock = threading.Lock()  # of the list of connections
        # Each with a lock that its thread holds while it uses it: closed in use, SQLite may crash.
        self._connections: list[tuple[sqlite3.Connection, threading.RLock]] = []
        self._opening = threading.Lock()
        self._is_open = False
        try:
            self._open()
        except KnowledgeError as error:
            if must_open:
                raise
            logger.error("%s. What does not need it goes on; each call tries again.", error)

    def _open(self) -> None:
        with self._opening:
            if self._is_open:
                return
            try:
                if self.path != IN_MEMORY:
                    _make(self.path)
                self._connect()
                self._prepare()
                self._is_open = True
            except (OSError, sqlite3.Error) as error:
                raise KnowledgeError(f"the knowledge base {self.path} cannot be opened: {error}") from None
            finally:
                if not self._is_open:
                    self.close()

    def _prepare(self) -> None:
        with self.transaction() as db:
            (found,) = db.execute("PRAGMA user_version").fetchone()
            form = len(self._schemas)
            if not 0 <= found <= form:
                raise KnowledgeError(f"{self.path} has format {found}, and this version reads {form}")
            for schema in self._schemas[found:]:
                for statement in schema.split(";\n"):
                    db.execute(statement)
            db.execute(f"PRAGMA user_version = {form}")

    def _connect(self) -> tuple[sqlite3.Connection, threading.RLock]:
        # mode=rw: a file that is gone must not come back empty, and for everyone to read.
        made = sqlite3.connect(
            str(IN_MEMORY) if self.path == IN_MEMORY else f"{self.path.absolute().as_uri()}?mode=rw",
            timeout=self._busy_s,
            isolation_level=None,
            check_same_thread=False,
            uri=True,
        )
        try:
            if self.path != IN_MEMORY:
                _use_wal(made)
            for pragma in PRAGMAS:
                made.execute(f"PRAGMA {pragma}")
        except BaseException:
            made.close()
            raise
        self._local.own = own = (made, threading.RLock())
        with self._lock:
            self._connections.append(own)
        return own

    @property
    def db(self) -> sqlite3.Connection:
        """This thread's connection, for a file that only this thread closes. Raises `KnowledgeError`."""
        return self._own()[0]

    def _own(self) -> tuple[sqlite3.Connection, threading.RLock]:
        found: tuple[sqlite3.Connection, threading.RLock] | None = getattr(self._local, "own", None)
        if found is not None:
            return found
        if not self._is_open:
            self._open()
        try:
            return getattr(self._local, "own", None) or self._connect()
        except sqlite3.Error as error:
            raise KnowledgeError(f"the knowledge base {self.path} cannot be opened: {error}") from None

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        db, in_use = self._own()
        with in_use:
            yield db

    @property
    def is_writing(self) -> bool:
        """Whether this thread is in a transaction, and sees what is not committed."""
        return getattr(self._local, "is_writing", False)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Write whole or not at all; inside of another one as a part of it, that can be undone alone.

        Raises `StoreBusy` if another writer does not finish in time.
        """
        with self._using() as db, self._part(db) if self.is_writing else self._whole(db):
            yield db

    @contextmanager
    def _whole(self, db: sqlite3.Connection) -> Iterator[None]:
        try:
            db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            raise StoreBusy(f"the knowledge base is busy: {error}") from None
        except sqlite3.Error as error:
            raise KnowledgeError(f"the knowledge base could not be written: {error}") from None
        self._local.is_writing = True
        try:
            yield
            db.execute("COMMIT")
        except BaseException as error:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise KnowledgeError(f"the knowledge base could not be written: {error}") from None
            raise
        finally:
            self._local.is_writing = False

    @contextmanager
    def _part(self, db: sqlite3.Connection) -> Iterator[None]:
        db.execute("SAVEPOINT part")  # the innermost of a name is meant
        try:
            yield
        except BaseException:
            with suppress(sqlite3.Error):  # an error of the disk has undone all
                db.execute("ROLLBACK TO part")
                db.execute("RELEASE part")
            raise
        db.execute("RELEASE part")

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Give the connection, and raise `KnowledgeError` for what SQLite raises."""
        try:
            with self._using() as db:
                yield db
        except sqlite3.Error as error:
            raise KnowledgeError(f"the knowledge base could not be read: {error}") from None

    def empty_log(self) -> None:
        """Move the write-ahead log into the file and cut it to nothing: it holds old pages.

        Raises `StoreBusy` if a reader holds it for longer than `busy_s`; what is left is overwritten later.
        Raises `KnowledgeError` if the disk is full, or fails.
        """
        try:
            with self._using() as db:
                (busy, _, _) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.Error as error:
            message = (
                f"it is deleted, and the log that holds its bytes cannot be emptied: {error}. Delete it again"
            )
            raise KnowledgeError(message) from None
        if busy:
            raise StoreBusy(
                "it is deleted, and another process still reads the log that holds its bytes. Delete it again"
            )

    def backup(self, target: Path) -> None:
        """Copy all into a new file while it is in use. Raises `KnowledgeError` if `target` exists."""
        try:
            os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            with closing(sqlite3.connect(target)) as copy, self._using() as db:
                db.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")
        except (OSError, sqlite3.Error) as error:
            raise KnowledgeError(f"the backup {target} could not be written: {error}") from None

    def restore(self, source: Path) -> None:
        """Replace all by a backup, whole or not at all, while it is in use."""
        if not source.is_file():
            raise KnowledgeError(f"there is no backup {source}")
        try:
            with closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as copy:
                (found,) = copy.execute("PRAGMA user_version").fetchone()
                (answer,) = copy.execute("PRAGMA integrity_check(1)").fetchone()
                form = len(self._schemas)
                if not 1 <= found <= form or answer != "ok":
                    raise KnowledgeError(f"{source} is no whole backup of format {form} or before")
                with self._using() as db:
                    copy.backup(db)
            self._prepare()
        except sqlite3.Error as error:
            raise KnowledgeError(f"the backup {source} could not be restored: {error}") from None

    def replace(self, made: sqlite3.Connection, last: Callable[[], None]) -> None:
        """Replace all by what another file has, whole or not at all, while it is in use.

        `last`: called once no other can write here, and before anything is replaced; it may change `made`.
        """
        is_told = False

        def step(status: int, _left: int, _all: int) -> None:
            nonlocal is_told
            if status == sqlite3.SQLITE_OK and not is_told:  # from its first page on the file is locked
                is_told = True
                last()

        try:
            with self._using() as db:
                made.backup(db, pages=1, progress=step)
        except sqlite3.Error as error:
            raise KnowledgeError(f"the backup could not be restored: {error}") from None

    def close(self) -> None:
        """Close the connections of all threads, each when what its thread does in it is over."""
        with self._lock:
            left, self._connections = self._connections, []
        self._local = threading.local()
        for connection, in_use in left:
            with in_use:
                connection.close()


class SqliteTables:
    """See `Tables`: those of a file. `is_own`: it is closed with them."""

    skip_locked = ""
    sealer: RowSealer | None = None

    def __init__(self, file: SqliteFile, *, is_own: bool = False) -> None:
        self.file = file
        self._is_own = is_own

    def by(self, index: str) -> str:
        return f" INDEXED BY {index}"

    def writing(self, tenant: str, of: str = "") -> AbstractContextManager[sqlite3.Connection]:
        return self.file.transaction()  # all writers of a file wait for each other

    def reading(self, tenant: str, of: str = "") -> AbstractContextManager[sqlite3.Connection]:
        return self.file.reading()

    def everyone(self, rows: Rows) -> AbstractContextManager[None]:
        return nullcontext()

    def erased(self) -> None:
        if not self.file.is_writing:
            self.file.empty_log()

    def close(self) -> None:
        if self._is_own:
            self.file.close()
