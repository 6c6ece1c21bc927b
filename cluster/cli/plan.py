"""Defines `samovar plan`: the options of its three modes, which of them combine, and one-line errors.

With `--trace` recorded traffic is simulated (`plan/plan.py`); with `--live` a running service is sized by
what it reports (`plan/live.py`); else a model is (`plan/sizing.py`). All are imported when they run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

from samovar.cluster.cli.options import ApiKeyOption, UrlOption

EXIT_REFUSED = 2
PIPE_COLUMNS = 160
TRACE_PANEL = "Recorded traffic (--trace)"
SIZING_PANEL = "A model and a GPU (without --trace)"
LIVE_PANEL = "A running service (--live)"
PRICES_PANEL = "Prices, of recorded traffic's plan"


def _of_trace(help_text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=TRACE_PANEL, show_default=False, **more)


def _of_sizing(help_text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=SIZING_PANEL, show_default=False, **more)


def _of_price(help_text: str, **more: Any) -> Any:
    return typer.Option(help=help_text, rich_help_panel=PRICES_PANEL, show_default=False, min=0, **more)


Trace = Annotated[
    Path | None,
    _of_trace(
        "a recording (`samovar serve --record F`) or a trace of Mooncake, WEKA, Qwen-Bailian, BurstGPT",
        metavar="FILE",
    ),
]
Live = Annotated[
    bool,
    typer.Option(
        "--live",
        help="what fits the running service, and where loading wins, by the prices that it has measured",
        rich_help_panel=LIVE_PANEL,
    ),
]
Model = Annotated[
    Path | None,
    typer.Option(
        metavar="MODEL", help="a directory, or a model of the hub: how many bytes of KV a token takes"
    ),
]
JsonTo = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="also write all numbers to this file")
]
KvDtype = Annotated[
    str | None,
    typer.Option(
        metavar="T",
        help="of the KV, if it differs from the model's: fp32, bf16, fp16, fp8, int8 (see engine.kv_dtype)",
    ),
]
TensorParallel = Annotated[
    int | None, typer.Option(help="GPUs that share a replica, as engine.tensor_parallel: 1, 2, 4, 8")
]
Policy = Annotated[
    str | None, _of_trace("lru, t-lru, ttl, type-km, learned, oracle; several: lru,learned (default)")
]
GpuGib = Annotated[float | None, _of_trace("for KV, a replica; default 64")]
CpuGib = Annotated[float | None, _of_trace("RAM for KV, a node; default 256")]
NvmeGib = Annotated[float | None, _of_trace("NVMe for KV, a node; default 2048")]
S3Gib = Annotated[float | None, _of_trace("S3 in total; default none")]
Replicas = Annotated[
    int | None, _of_trace("8 a node; default: enough to compute every prompt", min=1, max=10_000)
]
BytesPerToken = Annotated[
    int | None,
    _of_trace(
        "bytes of KV per token, instead of --model; default 131072 (Llama-3-8B, bf16)", min=1, max=1 << 40
    ),
]
Prefetch = Annotated[bool | None, _of_trace("on = as the service does (default), off = no prefetch")]
Sweep = Annotated[
    str | None, _of_trace("a tier whose size is varied: cpu (default), gpu, nvme; none: no sweep")
]
Points = Annotated[
    int | None, _of_trace("sizes of the sweep, each twice the previous one; default 5", min=2, max=24)
]
PlotTo = Annotated[Path | None, _of_trace("draw the sweep: a .png, .svg or .pdf", "--plot", metavar="FILE")]
SpreadH = Annotated[float | None, _of_trace("WEKA traces: hours within which sessions start; default 24")]
Seed = Annotated[int | None, _of_trace("WEKA traces: seed of these start times; default 0")]
Jobs = Annotated[int | None, _of_trace("simulations at a time; default: one per core", min=1, max=1024)]
UsdGpuHour = Annotated[float | None, _of_price("dollars of a GPU and hour; assumed 2.5")]
UsdRam = Annotated[float | None, _of_price("dollars of a GiB of RAM and month; assumed 2")]
UsdNvme = Annotated[float | None, _of_price("dollars of a GiB of NVMe and month; assumed 0.08")]
UsdS3 = Annotated[float | None, _of_price("dollars of a GiB on S3 and month; assumed 0.023")]
Gpu = Annotated[str | None, _of_sizing("its memory: 80GB, 64GiB", metavar="SIZE")]
Context = Annotated[str | None, _of_sizing("tokens of a sequence; default 2k,8k,32k,128k", metavar="N,N")]
Weights = Annotated[
    str | None, _of_sizing("of the model, if its directory has no weights: 65GB", metavar="SIZE")
]
MemoryGbPerS = Annotated[float | None, _of_sizing("bandwidth of the GPU's memory; assumed 3350 (H100)")]
Tflops = Annotated[float | None, _of_sizing("of the GPU, without sparsity; assumed 989 (H100, bf16)")]


def plan(
    trace: Trace = None,
    model: Model = None,
    json_to: JsonTo = None,
    kv_dtype: KvDtype = None,
    tensor_parallel: TensorParallel = None,
    policy: Policy = None,
    gpu_gib: GpuGib = None,
    cpu_gib: CpuGib = None,
    nvme_gib: NvmeGib = None,
    s3_gib: S3Gib = None,
    replicas: Replicas = None,
    bytes_per_token: BytesPerToken = None,
    prefetch: Prefetch = None,
    sweep: Sweep = None,
    points: Points = None,
    plot_to: PlotTo = None,
    spread_h: SpreadH = None,
    seed: Seed = None,
    jobs: Jobs = None,
    usd_gpu_hour: UsdGpuHour = None,
    usd_ram: UsdRam = None,
    usd_nvme: UsdNvme = None,
    usd_s3: UsdS3 = None,
    gpu: Gpu = None,
    context: Context = None,
    weights: Weights = None,
    memory_gb_per_s: MemoryGbPerS = None,
    tflops: Tflops = None,
    live: Live = False,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Plan how much memory recorded traffic needs, and what fits a GPU or the running service.

    samovar plan --trace F: recorded traffic under each policy, and with more or less of one tier.

    samovar plan --model DIR --gpu 80GB --context 2k,8k: bytes per token, sequences that fit, load or compute.

    samovar plan --live: the same of the running service, measured.
    """
    of_trace = {
        **{"policy": policy, "gpu_gib": gpu_gib, "cpu_gib": cpu_gib, "nvme_gib": nvme_gib, "s3_gib": s3_gib},
        **{"replicas": replicas, "bytes_per_token": bytes_per_token, "prefetch": prefetch, "sweep": sweep},
        **{"points": points, "plot": plot_to, "spread_h": spread_h, "seed": seed, "jobs": jobs},
        **{"usd_gpu_hour": usd_gpu_hour, "usd_ram": usd_ram, "usd_nvme": usd_nvme, "usd_s3": usd_s3},
    }
    of_sizing: dict[str, Any] = {"gpu": gpu, "context": context, "weights": weights}
    of_both = {} if tensor_parallel is None else {"tensor_parallel": tensor_parallel}
    of_sizing |= {"memory_gb_per_s": memory_gb_per_s, "tflops": tflops}
    if live:
        if trace is not None or model is not None or kv_dtype is not None or of_both:
            _refuse("--live is about the running service: leave --trace, --model and what describes them out")
        _none_of(of_trace, "needs --trace FILE (recorded traffic)")
        _none_of({**of_sizing, "context": None}, "is not needed with --live: the service has measured")
        _exit_with(_run_live, url, api_key, json_to, context)
    if trace is None and model is None:
        _refuse(
            "choose what to plan: --trace FILE (recorded traffic), --model DIR --gpu 80GB (what fits a "
            "GPU), or "
            "--live (the running service)"
        )
    if trace is not None:
        _none_of(of_sizing, "sizes a model without --trace; with it, give --gpu-gib, --cpu-gib, --nvme-gib")
        _exit_with(_run_trace, trace, model, kv_dtype, json_to, of_trace | of_both)
    _none_of(of_trace, "needs --trace FILE (recorded traffic)")
    if gpu is None:
        _refuse(
            "how much memory does the GPU have? Give --gpu 80GB (or --trace FILE, to plan for recorded "
            "traffic)"
        )
    _exit_with(_run_sizing, model, kv_dtype, json_to, of_sizing | of_both)


def _run_trace(
    console: Console,
    trace: Path,
    model: Path | None,
    kv_dtype: str | None,
    json_to: Path | None,
    given: dict[str, Any],
) -> int:
    from samovar.cluster.plan.plan import PlanAsk, run_plan
    from samovar.cluster.plan.runs import SWEPT, PlanRefused
    from samovar.cluster.plan.simulator.fleet import Prices
    from samovar.cluster.plan.sizing import kv_format, read_model

    ask = {key: value for key, value in given.items() if value is not None}
    prices = {"usd_gpu_hour": "gpu_hour", "usd_ram": "cpu_gib_month"}
    prices |= {"usd_nvme": "nvme_gib_month", "usd_s3": "s3_gib_month"}
    ask["prices"] = Prices(**{name: ask.pop(key) for key, name in prices.items() if key in ask})
    if "policy" in ask:
        ask["policies"] = tuple(name.strip() for name in ask.pop("policy").split(",") if name.strip())
    if "plot" in ask:
        ask["plot_to"] = ask.pop("plot")
    if ask.get("sweep", "none") not in (*SWEPT, "none"):
        raise PlanRefused(f"--sweep {ask['sweep']!r:.40}: give gpu, cpu, nvme or none")
    if ask.get("sweep") == "none":
        ask["sweep"] = None
    if model is not None:
        if "bytes_per_token" in ask:
            raise PlanRefused("--bytes-per-token and --model say the same: leave one of them out")
        ask["bytes_per_token"] = read_model(model)[0].token_bytes(kv_format(kv_dtype))
        ask["bytes_from"] = f"of {model}" + (f" in {kv_dtype}" if kv_dtype else "")
    elif kv_dtype is not None:
        raise PlanRefused("--kv-dtype needs --model DIR")
    elif "bytes_per_token" in ask:
        ask["bytes_from"] = "as given"
    return run_plan(PlanAsk(trace=trace, json_to=json_to, **ask), console)


def _run_sizing(
    console: Console, model: Path, kv_dtype: str | None, json_to: Path | None, given: dict[str, Any]
) -> int:
    from samovar.cluster.plan.sizing import SizingAsk, run_sizing

    ask = {key: value for key, value in given.items() if value is not None}
    if "context" in ask:
        ask["contexts"] = ask.pop("context")
    return run_sizing(SizingAsk(model=model, kv_dtype=kv_dtype, json_to=json_to, **ask), console)


def _run_live(
    console: Console, url: str | None, api_key: str | None, json_to: Path | None, contexts: str | None
) -> int:
    from samovar.cluster.cli.diagnose import snapshot
    from samovar.cluster.cli.running import server_url
    from samovar.cluster.cli.status import StatusFailed
    from samovar.cluster.plan.live import run_live
    from samovar.cluster.plan.runs import PlanRefused

    try:
        now = snapshot(server_url(url), api_key)
    except StatusFailed as error:
        raise PlanRefused(str(error)) from error
    return run_live(now, contexts, json_to, console)


def _exit_with(run: Any, *args: Any) -> NoReturn:
    """Run a mode and exit with its code; bad files or numbers give a one-line error, no traceback."""
    from samovar.cluster.plan.runs import PlanRefused
    from samovar.cluster.plan.traces.files import TraceError
    from samovar.cluster.serve.stages import console_of
    from samovar.replicas.messages import ModelRefused

    console = console_of() if sys.stdout.isatty() else console_of(width=PIPE_COLUMNS)
    try:
        code = run(console, *args)
    except (PlanRefused, TraceError, ModelRefused, ValueError, OSError) as error:
        _refuse(str(error))
    raise typer.Exit(code)


def _none_of(options: dict[str, Any], why: str) -> None:
    for name, value in options.items():
        if value is not None:
            _refuse(f"--{name.replace('_', '-')} {why}")


def _refuse(message: str) -> NoReturn:
    typer.echo(f"samovar: plan: {message}", err=True)
    raise typer.Exit(EXIT_REFUSED)
