"""Checks a machine before a service runs on it: what would not start, be slow, or be open to others.

Each check looks at one thing, changes nothing, and returns (state, what was found, what to do). What
`samovar serve` refuses is asked of its own checks (`cluster/serve/preflight.py`). The arguments behind the
settings are for tests.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from importlib import metadata
from pathlib import Path

from samovar import HOME
from samovar.cache_tiers.command import vllm_checks
from samovar.cluster.doctor.check import CheckState, MachineCheck, Result, existing
from samovar.cluster.doctor.media import MEASURE_S, disk_price, disk_tier, prices, s3_tier, serves_here
from samovar.cluster.doctor.safety import CHILD_S_MAX, nixl, open_binds, ray_cluster, secrets_files
from samovar.cluster.engines.environment import is_made_of, recipe_for
from samovar.cluster.engines.interpreter import ADD, ASK_S_MAX, environment_dir, find_python, python_of
from samovar.cluster.errors import StartFailed
from samovar.cluster.serve import preflight
from samovar.cluster.serve.startup_table import smaller_than_pools
from samovar.configs.sections import GIB
from samovar.configs.settings import Settings
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model import find_early, gpus_seen, refuse_early, torch_version, why_no_gpu
from samovar.replicas.start.machine_prices import MachinePrices, kept_prices, measurements_dir
from samovar.router.observe.diagnosis import in_bytes

PYTHON_MIN, PYTHON_LAST_TRIED = (3, 11), (3, 13)
FREE_FOR_MODELS = 2 * GIB
S3_S_MAX, TORCH_S_MAX = 30.0, 60.0
ASK_S, BUILD_S = 5.0, 30.0
DRIVERS = {11: 450, 12: 525, 13: 580}
"""The first driver, by the major version of CUDA that torch is built for ("CUDA compatibility", NVIDIA)."""
POPULATE_READ = 22
"""`MADV_POPULATE_READ`: see `replicas/kv/registered.py`, whose room imports torch."""
C_COMPILERS = ("gcc", "clang", "cc")
"""Those that Triton looks for where $CC names none."""
MODULE = "#include <Python.h>\nint samovar_probe(void) { return Py_IsInitialized(); }\n"
"""As little as a module that Triton compiles on a machine's first kernel."""


def checks_of(
    settings: Settings, *, running: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> list[MachineCheck]:
    """Return all checks of this machine for a service with these settings.

    `running`: URLs of this user's services.
    """
    disk = cache(partial(disk_price, settings))  # measured once, for two checks
    return [
        MachineCheck("python", "Python", python),
        MachineCheck("packages", "packages", partial(packages, settings)),
        MachineCheck("model", "model", partial(model, settings)),
        MachineCheck("native", "native step", partial(native_step, settings, environ), TORCH_S_MAX),
        MachineCheck("gpu", "GPU", partial(gpu, settings), TORCH_S_MAX),
        MachineCheck("gpu_kernels", "GPU kernels", partial(gpu_kernels, settings), BUILD_S + 10),
        MachineCheck("gpu_memory", "GPU copies", partial(gpu_memory, settings)),
        MachineCheck("gpu_node", "GPU's NUMA node", partial(gpu_node, settings)),
        MachineCheck("vllm", "vLLM", partial(vllm, settings), ASK_S_MAX + 5),
        MachineCheck("port", "port", partial(port, settings, running)),
        MachineCheck("shm", "/dev/shm", partial(shared_memory, settings)),
        MachineCheck("cache_dir", "model cache", partial(cache_dir, settings)),
        MachineCheck(
            "disk", "disk tier", partial(disk_tier, settings, disk, running=running), MEASURE_S + 10
        ),
        MachineCheck("s3", "S3 tier", partial(s3_tier, settings), S3_S_MAX),
        MachineCheck("nixl", "NIXL", partial(nixl, settings), CHILD_S_MAX + 5),
        MachineCheck("ray", "Ray", partial(ray_cluster, settings, environ), CHILD_S_MAX),
        MachineCheck("binds", "open ports", partial(open_binds, settings)),
        MachineCheck("secrets", "secrets", partial(secrets_files, settings)),
        MachineCheck("prices", "load or compute", partial(prices, settings, disk), MEASURE_S + 10),
    ]


def checks_for_vllm(path: Path | None, config: str | None) -> list[MachineCheck]:
    """Return the checks of `samovar-tiers doctor`: see `vllm_checks`."""
    return [
        MachineCheck(check.name, check.title, check.run, check.s_max) for check in vllm_checks(path, config)
    ]


def python(version: tuple[int, ...] = sys.version_info[:3], system: str = sys.platform) -> Result:
    """Look at the interpreter and the system."""
    said = f"{'.'.join(map(str, version))} on {platform.platform(terse=True)}"
    if version[:2] < PYTHON_MIN:
        return "error", said, f"install Python {'.'.join(map(str, PYTHON_MIN))} or later"
    if system != "linux":
        return "warning", said, "Samovar is made for Linux: /dev/shm, O_DIRECT and NIXL are not elsewhere"
    if version[:2] > PYTHON_LAST_TRIED:
        return "warning", said, "later than was tried: if a package fails, use 3.11 to 3.13"
    return "ok", said, ""


def packages(
    settings: Settings,
    required: Iterable[str] | None = None,
    installed: Callable[[str], str] = metadata.version,
) -> Result:
    """Compare the installed packages with what this version requires, and with what the tiers need."""
    from packaging.requirements import Requirement

    wrong, count = [], 0
    for line in required if required is not None else requirements():
        asked = Requirement(line)
        if asked.marker is not None and not asked.marker.evaluate({"extra": ""}):
            continue
        count += 1
        try:
            found = installed(asked.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{asked.name} is not installed")
            continue
        if not asked.specifier.contains(found, prereleases=True):
            wrong.append(f"{asked.name} is {found}, not {asked.specifier}")
    if wrong:
        return (
            "error",
            "; ".join(wrong),
            "install again: `make setup`, or pip install --force-reinstall samovar",
        )
    try:
        preflight.check_extras(settings)
    except StartFailed as error:
        return "error", str(error), "install the extra that is named"
    return "ok", f"{count} packages as required", ""


def requirements() -> list[str]:
    """Return what the installed distribution requires, or, in a bare checkout, its pyproject.toml."""
    try:
        return metadata.requires("samovar") or []
    except metadata.PackageNotFoundError:
        import tomllib

        listed = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]["dependencies"]
        return [str(one) for one in listed]


def model(settings: Settings) -> Result:
    """Ask the start's own check whether the configured model can be served, as far as its files tell."""
    said = []
    for name, own in settings.of_models().items():
        try:
            found = find_early(own.model)
            refuse_early(own, found)
        except ModelRefused as error:
            refused = preflight.named(error, name)
            return "error", refused.reason, refused.fix
        where = str(own.model.path or "the default model")
        said.append(where + ("" if found else " (from the hub or converted)"))
    return "ok", ", ".join(said), ""


def native_step(settings: Settings, environ: Mapping[str, str]) -> Result:
    """Look for the compiler and the instructions that the native step needs."""
    if settings.engine.step not in ("auto", "native"):
        return "ok", f"not used: engine.step is {settings.engine.step}", ""
    if settings.engine.device == "cuda":
        return "ok", "not used: engine.device is cuda", ""
    from samovar.configs.compiled import NotCompiled, find_compiler
    from samovar.replicas.native import NotNative, variant_here

    try:
        variant = variant_here()
        compiler = find_compiler(environ, wait_s=ASK_S)
    except (NotNative, NotCompiled) as error:
        libraries = len(list(settings.native_dir.glob("step-*.so"))) if settings.native_dir.is_dir() else 0
        if libraries:
            return "ok", f"{error}; {libraries} steps were compiled before and can be used", ""
        state: CheckState = "error" if settings.engine.step == "native" else "warning"
        return (
            state,
            str(error),
            "install a C++ compiler (Debian: apt-get install g++); else torch computes, slower",
        )
    said = compiler.version.strip().splitlines()
    return "ok", f"{variant.name}, {said[0] if said else compiler.command[0]}", ""


def gpu(
    settings: Settings,
    version: Callable[[], str] = torch_version,
    why_not: Callable[[str], str | None] = why_no_gpu,
    count: Callable[[], int] = gpus_seen,
    driver: Callable[[], tuple[str, str] | None] = lambda: asked_driver(),
    cuda: Callable[[], int | None] = lambda: cuda_major(),
) -> Result:
    """Ask the start's own check for GPUs, and the driver whether it is new enough for torch's CUDA."""
    if settings.engine.device == "cpu":
        return "ok", "not used: engine.device is cpu", ""
    reason = why_not(version())
    if reason is not None:
        if settings.engine.device == "cuda":
            return "error", f"engine.device is cuda and {reason}", preflight.CUDA_FIX
        return "ok", f"none, so the CPU computes: {reason}", ""
    seen, named, major = count(), driver(), cuda()
    least = None if major is None else DRIVERS.get(major)
    if not seen:
        state: CheckState = "error" if settings.engine.device == "cuda" else "warning"
        said = "there is a driver, and torch sees no GPU"
        if named is None or least is None or int(named[1].partition(".")[0]) >= least:
            return state, said, "install a driver that fits torch's CUDA build"
        said += f": its CUDA {major} needs driver {least} or later, and this is {named[1]}"
        return state, said, f"install NVIDIA driver {least} or later, or a torch built for an older CUDA"
    try:
        preflight.check_gpus(settings)
    except (StartFailed, ModelRefused) as error:
        return "error", str(error), "lower cluster.replicas or engine.tensor_parallel"
    about = "" if named is None else f" ({named[0]}, driver {named[1]})"
    return "ok", f"{seen} for torch {version()}{about}", ""


def gpu_kernels(
    settings: Settings,
    why_not: Callable[[Settings], str | None] = lambda settings: why_unused(settings),
    environ: Mapping[str, str] = os.environ,
    headers: Callable[[], Path] = lambda: Path(sysconfig.get_path("include")),
) -> Result:
    """Compile what Triton compiles before its first kernel, by a C compiler and Python's headers."""
    if (unused := why_not(settings)) is not None:
        return "ok", unused, ""
    fix = "install both (Debian: apt-get install gcc python3-dev); else attention has no kernel, and is slow"
    named = environ.get("CC")
    names = (named,) if named else C_COMPILERS
    compiler = next((one for name in names if (one := shutil.which(name, path=environ.get("PATH")))), None)
    if compiler is None:
        return "error", f"there is no C compiler on the PATH ({', '.join(names)})", fix
    if not (headers() / "Python.h").is_file():
        return "error", f"Python's headers are not in {headers()}", fix
    with tempfile.TemporaryDirectory(prefix="samovar-doctor-") as folder:
        source = Path(folder) / "probe.c"
        source.write_text(MODULE)
        command = [compiler, "-shared", "-fPIC", f"-I{headers()}", str(source), "-o", f"{folder}/probe.so"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=BUILD_S)
    if done.returncode:
        return "error", f"{compiler} fails: {done.stderr.strip().splitlines()[-1][:200]}", fix
    return "ok", f"{compiler} and the headers in {headers()} compile a module", ""


def gpu_memory(
    settings: Settings,
    why_not: Callable[[Settings], str | None] = lambda settings: why_unused(settings),
    advise: Callable[[mmap.mmap], None] = lambda memory: memory.madvise(POPULATE_READ),
    where: Path = Path("/dev/shm"),
) -> Result:
    """Try what shows shared memory to the GPU's driver (`MADV_POPULATE_READ`, Linux 5.14) on a page of it."""
    if (unused := why_not(settings)) is not None:
        return "ok", unused, ""
    with tempfile.NamedTemporaryFile(prefix="samovar-doctor-", dir=where) as file:
        file.truncate(mmap.PAGESIZE)
        try:
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as memory:
                advise(memory)
        except OSError as error:
            fix = "run Linux 5.14 or later: else what is loaded is copied once more on its way to the GPU"
            return "warning", str(error.strerror or error), fix
    return "ok", f"pages of {where} can be brought in for the GPU's copies", ""


def gpu_node(
    settings: Settings,
    why_not: Callable[[Settings], str | None] = lambda settings: why_unused(settings),
    nodes: Callable[[], Sequence[int]] = lambda: gpu_nodes(),
    cpus: Callable[[], frozenset[int]] = lambda: frozenset(os.sched_getaffinity(0)),
    system: Path = Path("/sys/devices/system/node"),
) -> Result:
    """See whether this process may run on CPUs that no GPU is near: copies from their memory are slower."""
    if (unused := why_not(settings)) is not None:
        return "ok", unused, ""
    of = {
        int(folder.name.removeprefix("node")): cpu_list((folder / "cpulist").read_text())
        for folder in sorted(system.glob("node[0-9]*"))
    }
    near = {node for node in nodes() if node >= 0}
    if len(of) < 2 or not near:
        return "ok", "one NUMA node" if len(of) < 2 else "the GPUs name no NUMA node", ""
    said = f"the GPUs are at NUMA {_nodes(near)} of {len(of)}"
    far = {node for node, theirs in of.items() if node not in near and theirs & cpus()}
    if not far:
        return "ok", said, ""
    at = ",".join(map(str, sorted(near)))
    return (
        "warning",
        f"{said}, and this process may run at {_nodes(far)}, too",
        f"start with `numactl --cpunodebind={at} --membind={at}`: across sockets copies are half as fast",
    )


def _nodes(numbers: set[int]) -> str:
    return f"node{'s' * (len(numbers) > 1)} {', '.join(map(str, sorted(numbers)))}"


def why_unused(settings: Settings) -> str | None:
    """Return why no GPU is used, or None."""
    if settings.engine.device == "cpu":
        return "not used: engine.device is cpu"
    reason = why_no_gpu(torch_version())
    return None if reason is None else f"not used: {reason}"


def cpu_list(text: str) -> frozenset[int]:
    """Return the numbers of a list as the kernel writes it, such as `0-3,8`."""
    numbers = set[int]()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def cuda_major() -> int | None:
    """Return the major version of CUDA that the installed torch is built for; torch is not imported."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    text = (Path(found.origin).parent / "version.py").read_text()
    written = re.search(r"^cuda\b.*=\s*['\"](\d+)\.", text, re.MULTILINE)
    return None if written is None else int(written[1])


def asked_driver() -> tuple[str, str] | None:
    """Return the first GPU's name and the driver's version, as nvidia-smi tells them."""
    lines = _asked("name,driver_version")
    if not lines:
        return None
    name, _, version = lines[0].rpartition(",")
    return name.strip(), version.strip()


def gpu_nodes() -> list[int]:
    """Return the NUMA node of each GPU; -1 where the system names none."""
    found = []
    for line in _asked("pci.bus_id"):
        place = Path("/sys/bus/pci/devices") / line.strip().lower()[-12:] / "numa_node"
        found.append(int(place.read_text()) if place.is_file() else -1)
    return found


def _asked(fields: str) -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader"]
    said = subprocess.run(command, check=False, capture_output=True, text=True, timeout=ASK_S).stdout
    return said.strip().splitlines()


def vllm(settings: Settings) -> Result:
    """Ask the Python that vLLM's replicas would run in for its versions, as the start does."""
    of_vllm = [own for own in settings.of_models().values() if own.engine.kind == "vllm"]
    is_wanted, made = bool(of_vllm), environment_dir(settings)
    settings = of_vllm[0] if of_vllm else settings
    if not is_wanted and not made.is_dir():
        return "ok", "not used: engine.kind is samovar", ""
    try:
        python, found = find_python(settings)
    except StartFailed as error:
        text, _, fix = str(error).rpartition(". ")
        return "error" if is_wanted else "warning", text, fix
    said = f"{found.vllm} with Ray {found.ray} and Python {found.python}: {python}"
    if python == python_of(made) and not is_made_of(made, recipe_for(settings.engine.device)):
        return "warning", f"{said}, which is not what this version locks", f"make it again by `{ADD}`"
    return "ok", said, ""


def port(settings: Settings, running: Sequence[str] = ()) -> Result:
    """Ask the start's own check whether the port is free."""
    host, number = settings.server.host, settings.server.port
    try:
        preflight.check_port(host, number)
    except StartFailed as error:
        if mine := serves_here(settings, running):
            return "ok", f"{host}:{number} is served by Samovar itself ({mine})", ""
        text, _, fix = str(error).partition(". ")
        return "error", text, fix
    return "ok", f"{host}:{number} is free", ""


def shared_memory(
    settings: Settings,
    free: Callable[[], int | None] = preflight.shm_free_bytes,
    kept: Callable[[Path], MachinePrices | None] = kept_prices,
) -> Result:
    """Ask the start's own sizing whether Ray's object store, with the cpu tier, fits."""
    free_bytes, known = free(), kept(measurements_dir(settings))
    try:
        settings = settings.model_copy(update={"cluster": settings.of_models()[""].cluster})
        memory = preflight.free_memory(settings, _weights_bytes(settings))
        sized, warning = preflight.with_object_store(settings, free_bytes, memory)
    except StartFailed as error:
        text, _, fix = str(error).partition(". ")
        return "error", text, fix
    if warning:
        text, _, fix = warning.partition(". ")
        return "warning", text, fix
    store, tier_bytes = in_bytes(sized.cluster.object_store_bytes or 0), sized.tiers.cpu.bytes_planned
    room = "no /dev/shm" if free_bytes is None else f"{in_bytes(free_bytes)} free"
    said = f"{room}; Ray's store takes {store}, {in_bytes(tier_bytes)} of it the cpu tier"
    pools_bytes = 0 if known is None else known.pool_bytes * settings.cluster.replicas_first
    if settings.tiers.enabled and (why := smaller_than_pools(tier_bytes, pools_bytes)):
        return "ok", f"{said}, {why}", ""
    return "ok", said, ""


def _weights_bytes(settings: Settings) -> int:
    """Return the size of the model's weights as far as they are here; `model` tells what is wrong."""
    try:
        found = [find_early(own.model) for own in settings.of_models().values()]
    except ModelRefused:
        return 0
    folders = [one for one in found if one is not None]
    here = [sum(file.stat().st_size for file in one.glob("*.safetensors")) for one in folders]
    return sum(here) // len(here) if here else 0


def cache_dir(settings: Settings) -> Result:
    """See whether models can be kept, and how much room there is."""
    where = settings.model.cache_dir.expanduser()
    place = existing(where)
    if not os.access(place, os.W_OK | os.X_OK):
        return "error", f"{place} cannot be written", "make it writable, or choose another model.cache_dir"
    free = shutil.disk_usage(place).free
    said = f"{where}, {in_bytes(free)} free"
    if free < FREE_FOR_MODELS:
        return (
            "warning",
            said,
            "free some room, or choose another model.cache_dir: converted models are kept there",
        )
    return "ok", said, ""
