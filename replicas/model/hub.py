"""Fetches a model from the Hugging Face hub into its cache, pinned to a commit.

Everything of the transfer is huggingface_hub's: the cache (`HF_HOME`), the token (`HF_TOKEN`), offline mode
(`HF_HUB_OFFLINE`), another hub (`HF_ENDPOINT`), resumed downloads, locks, progress bars.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import httpx2
from huggingface_hub import (
    HfApi,
    constants,
    get_cached_repo_tree,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from samovar.configs.model_reference import HubModel
from samovar.configs.sections import GIB, MIB
from samovar.replicas.messages import ModelRefused

_log = logging.getLogger(__name__)

# No file of a folder: those are other formats of the same weights (onnx/, original/).
WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer*", "*.model")
NOT_WANTED = ("*/*", "consolidated*.safetensors")

SPARE_BYTES = 64 * 1024 * 1024
"""Left free on the disk beside the model: the cache's own small files, and whatever else writes."""


def fetch(model: HubModel, *, bytes_max: int, progress: bool) -> Path:
    """Return the directory of the model's files in the hub's cache; downloads what is missing.

    A branch or a tag is resolved to the commit that it is now; if the hub cannot be asked, to the one that is
    in the cache. A pinned model that is complete in the cache needs no network. With `progress` it says what
    it downloads, and on a terminal shows bars, on stderr. `bytes_max`: of one model.

    Raises `ModelRefused` if the model does not exist, may not be read, has no weights that can be served, or
    does not fit; or if the hub cannot be reached and the cache does not have it.
    """
    with _in_words(model), _bars(progress and sys.stderr.isatty()):
        try:
            found = _pinned_now(model)
            _look_before(found, bytes_max, progress)
        except (httpx2.TransportError, OfflineModeIsEnabled, HfHubHTTPError) as error:
            cached = _cached(model) if _is_out_of_reach(error) else None
            if cached is None:
                raise
            _log.warning("%s is served as cached, the hub cannot be asked: %s", model, _first_line(error))
            return cached
        return _snapshot(found)


def describe(model: HubModel) -> tuple[Path, int]:
    """Return a directory with the model's config.json, and the bytes of its weights, which stay on the hub.

    Raises `ModelRefused` as `fetch` does.
    """
    with _in_words(model), _bars(False):
        found = _pinned_now(model)
        files = {file.path: file.size for file in _wanted_files(found)}
        if "config.json" not in files:
            raise _no_weights(model)
        folder = snapshot_download(model.id, revision=found.revision, allow_patterns=["config.json"])
        return Path(folder), sum(size for name, size in files.items() if name.endswith(".safetensors"))


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Let huggingface_hub show its progress bars, or not: it would write them to a log, too."""
    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _pinned_now(model: HubModel) -> HubModel:
    """Return the model at the commit that its revision is now, which the cache remembers."""
    if model.is_pinned:
        return model
    # Asked first with a timeout, which `resolve_revision` has not: a network may drop what is sent.
    HfApi().repo_info(model.id, revision=model.revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    return HubModel(model.id, HfApi().resolve_revision(model.id, revision=model.revision).resolved)


def _is_out_of_reach(error: Exception) -> bool:
    """Return whether the hub gave no answer, or said that it cannot give one now."""
    if not isinstance(error, HfHubHTTPError):
        return True
    return error.response.status_code == 429 or error.response.status_code >= 500


def _cached(model: HubModel) -> Path | None:
    try:
        return _snapshot(model, local_files_only=True)
    except LocalEntryNotFoundError:
        return None


def _snapshot(model: HubModel, *, local_files_only: bool = False) -> Path:
    return Path(
        snapshot_download(
            model.id,
            revision=model.revision,
            allow_patterns=list(WANTED),
            ignore_patterns=list(NOT_WANTED),
            local_files_only=local_files_only,
        )
    )


def _look_before(model: HubModel, bytes_max: int, progress: bool) -> None:
    """Refuse what could not be served or would not fit, before the first byte is downloaded."""
    wanted = _wanted_files(model)
    names = [file.path for file in wanted]
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise _no_weights(model)
    missing = [file for file in wanted if not _is_cached(model, file.path)]
    total, needed = (sum(file.size for file in files) for files in (wanted, missing))
    if total > bytes_max:
        raise ModelRefused(
            f"{model.id} has {_size(total)}, more than model.download_bytes_max ({_size(bytes_max)})",
            "raise that setting, or serve a smaller model",
        )
    if not needed:
        return
    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(_existing(cache)).free
    if needed + SPARE_BYTES > free:
        raise ModelRefused(
            f"{model.id} needs {_size(needed)} in {cache}, where {_size(free)} are free",
            "free some space, or set HF_HOME to a directory on a larger disk",
        )
    if progress:
        files = f"{len(missing)} file{'s' * (len(missing) != 1)}"
        print(
            f"downloading {model.id} (commit {model.revision[:12]}): {files}, {_size(needed)}, to {cache}",
            file=sys.stderr,
            flush=True,
        )


def _wanted_files(model: HubModel) -> list[RepoFile]:
    try:
        found = get_cached_repo_tree(model.id, revision=model.revision)
    except CachedRepoTreeNotFoundError:
        tree = HfApi().list_repo_tree(model.id, revision=model.revision)
        found = [entry for entry in tree if isinstance(entry, RepoFile)]
    return [file for file in found if _matches(file.path, WANTED) and not _matches(file.path, NOT_WANTED)]


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether huggingface_hub takes the file for one of these."""
    return any(fnmatch(name, pattern) for pattern in patterns)


def _is_cached(model: HubModel, name: str) -> bool:
    return isinstance(try_to_load_from_cache(model.id, name, revision=model.revision), str)


def _no_weights(model: HubModel) -> ModelRefused:
    return ModelRefused(
        f"{model.id} on the hub has no config.json with *.safetensors beside it"
        " (GGUF, PyTorch or other formats only)",
        "name the repository of the original weights; a GGUF file can be served once it is downloaded: "
        "`hf download`, then `--model FILE.gguf`",
    )


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


@contextmanager
def _in_words(model: HubModel) -> Iterator[None]:
    """Turn the hub's errors into `ModelRefused`, which says what to do."""
    where = constants.ENDPOINT
    try:
        yield
    except GatedRepoError as error:
        raise ModelRefused(
            f"access to {model.id} is restricted by its authors (a gated model)",
            f"accept its terms at {where}/{model.id}, then set HF_TOKEN to a token of that account",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelRefused(
            f"there is no directory {model.id} here, and no such model on the hub that this caller may see",
            f"check the name at {where}/{model.id}; for a private model set HF_TOKEN",
        ) from error
    except RevisionNotFoundError as error:
        raise ModelRefused(
            f"{model.id} has no branch, tag or commit {model.revision!r}",
            f"choose one of {where}/{model.id}/commits/main, or leave out @{model.revision}",
        ) from error
    except (LocalEntryNotFoundError, RevisionResolutionError) as error:
        raise _not_cached(model, _unreachable(error.__cause__)) from error
    except OfflineModeIsEnabled as error:
        raise _not_cached(model, _unreachable(error)) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ModelRefused(
                f"the hub refuses this caller's token for {model.id} (status {status})",
                "set HF_TOKEN to a valid token that may read this model, or remove it",
            ) from error
        raise ModelRefused(
            f"the hub at {where} answers the question for {model} with status {status}",
            "try again later; what is downloaded already is kept",
        ) from error
    except httpx2.HTTPError as error:
        raise _not_cached(model, _unreachable(error)) from error
    except OSError as error:
        raise ModelRefused(
            f"{model.id} cannot be kept in {constants.HF_HUB_CACHE} ({error.strerror or _first_line(error)})",
            "free some space or mend its permissions, or set HF_HOME to another directory",
        ) from error


def _unreachable(error: BaseException | None) -> str:
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids to ask the hub"
    if isinstance(error, HfHubHTTPError):
        return f"the hub at {constants.ENDPOINT} answers with status {error.response.status_code}"
    if isinstance(error, FileMetadataError):
        return f"what answers at {constants.ENDPOINT} is no hub: look at HF_ENDPOINT and at proxies"
    said = f" ({_first_line(error)})" if error is not None else ""
    return f"the hub at {constants.ENDPOINT} cannot be reached{said}"


def _not_cached(model: HubModel, why: str) -> ModelRefused:
    return ModelRefused(
        f"there is no directory {model.id} here, the hub's cache {constants.HF_HUB_CACHE} does not have all "
        f"of {model}, and {why}",
        f"run `hf download {model.id}` where there is a network and the same HF_HOME, or name a directory",
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:,.2f} GiB" if nbytes > GIB / 10 else f"{nbytes / MIB:,.1f} MiB"
