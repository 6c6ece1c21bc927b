"""No executor without tenants: what the product queues is done by `TenantThreads`, or has its reason here.

A queue that all tenants share lets one hold the others. So each pool, thread, queue and process that the
product makes is that type, or work that no tenant's request makes long, and this list says why.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house import ROOT

PACKAGES = ("configs", "cache_tiers", "replicas", "router", "cluster")
MAKERS = {
    "ThreadPoolExecutor", "ProcessPoolExecutor", "InterpreterPoolExecutor", "Thread", "Timer",
    "to_thread", "run_in_executor", "run_sync", "run_in_threadpool", "start_new_thread",
    "Queue", "SimpleQueue", "LifoQueue", "PriorityQueue", "JoinableQueue",
    "create_subprocess_exec", "create_subprocess_shell",
}  # fmt: skip
THE_TYPE = "replicas/turns/tenant_threads.py TenantThreads.__init__"

COMMAND = "a command, or the start of a process: there is no request"
OWN = "the process's own thread in the background, whatever is sent"
END = "the end of the process"
TIERS = "a call to a tier or its actor, within its deadline; who waits is bounded by the scheduler's turns"
DELETES = "a deletion by key, which must not queue behind prompts; limits.concurrent_per_key bounds them"

REASONS = {
    "configs/telemetry/tracing.py Tracer.close": END,
    "cache_tiers/actors/cluster_watch.py ClusterWatch.__init__": OWN,
    "cache_tiers/actors/cluster_watch.py SpotWatch.__init__": OWN,
    "cache_tiers/sessions/actor.py IngressDeaths.look": OWN,
    "cache_tiers/actors/rpc.py ActorRef._found": OWN,
    "cache_tiers/actors/rpc.py ActorRef.call_async": "looks for an actor that is away, once for all who ask",
    "cache_tiers/sessions/actor.py SessionActor.__init__": OWN,
    "cache_tiers/actors/tier.py TierActor.__init__": OWN,
    "cache_tiers/events/publisher.py EventPublisher.__init__": OWN,
    "cache_tiers/forecast/learner.py TurnLearner.start": OWN,
    "cache_tiers/socket/process.py TierProcess.__init__": OWN,
    "cache_tiers/socket/process.py _http": "people and Prometheus, on loopback",
    "cache_tiers/socket/server.py TierSocket.__init__": OWN,
    "cache_tiers/socket/server.py TierSocket._let_in": "one a connection; so many of a process",
    "cache_tiers/vllm/connector.py SamovarConnector.__init__": TIERS,
    "cache_tiers/vllm/connector.py _WorkerCalls.register_kv_caches": TIERS,
    "cache_tiers/vllm/names/identity.py weights_digest": COMMAND,
    "cache_tiers/vllm/offloading/tier.py SamovarTier.__init__": TIERS,
    "cache_tiers/media/guard.py CallExecutor.submit": TIERS,
    "cache_tiers/node/clears.py NodeClears.go_on": OWN,
    "cache_tiers/node/drain.py _Run.carry_out": "a node that leaves: extents by their worth",
    "cache_tiers/node/manager.py TierNode.start": "store workers: one extent each, by the directory's shares",
    "cache_tiers/node/scan.py TierScans._run": COMMAND,
    "cache_tiers/node/scan.py TierScans.start": COMMAND,
    "cache_tiers/recording.py TurnRecorder.__init__": "a line a turn, for the file; a full queue drops it",
    "cache_tiers/transport/link.py NixlLink.__init__": TIERS,
    "cache_tiers/transport/tls_link.py TlsLink.__init__": OWN,
    "cache_tiers/transport/tls_link.py TlsLink._listen": "one a connection of another node; so many, "
    "and each pull ends with its export's time",
    "replicas/serving/deployment.py Replica.clear": DELETES,
    "replicas/serving/deployment.py Replica.__del__": END,
    "replicas/serving/served_engine.py OwnEngine.close": END,
    "replicas/vllm/engine.py VllmEngine.close": END,
    "replicas/vllm/turns.py TurnReports.__init__": TIERS,
    "replicas/serving/deployment.py Replica.tier_sign": TIERS,
    "replicas/serving/deployment.py Replica.tier_stats": TIERS,
    "replicas/engine/thread.py EngineThread.__init__": "the engine itself: its scheduler takes turns",
    "replicas/forward/loading.py move_weights": COMMAND,
    "replicas/grammar/compiler.py GrammarCompiler.__init__": "one mask of each running answer, which "
    "grammar.mask_s_max ends; who runs is the scheduler's",
    "replicas/grammar/compiler.py _on_deep_stack": "a stack for a thread that has its turn, and waits for it",
    "replicas/kv/cuda_device.py _Watcher.__init__": OWN,
    "replicas/kv/cuda_device.py _Watcher.watch": OWN,
    "replicas/kv/registered.py do_later": COMMAND,
    "replicas/model/apart.py main": COMMAND,
    "replicas/model/weights.py _hashed": COMMAND,
    "replicas/offload/tier_client.py WorkerPools.of_threads": TIERS,
    "replicas/ranks/worker.py Rank.serve": OWN,
    "router/context/compaction/compactor.py Compactor.forget": DELETES,
    "router/identities/key_routes.py _KeyRoutes._done": "the administrator alone, one call at a time",
    "router/context/compaction/compactor.py Compactor.forget_entries": DELETES,
    "router/context/documents/text.py read_pdf": "one document of a tenant at once, within limits",
    "router/erasure/erasures.py Erasures._save": DELETES,
    "router/erasure/erasures.py Erasures._take_over": DELETES,
    "router/erasure/erasures.py Erasures.start": COMMAND,
    "router/generation/recorder.py IngressRecorder.__init__": "a line a turn, for the file; beyond its bound "
    "none is kept",
    "router/identities/audit.py AuditQueue.__init__": "lines for the file; beyond its bound none is kept",
    "router/identities/identities.py Identities.__init__": OWN,
    "router/identities/tokens.py TokenKeys.__call__": "one fetch for all who wait, and one in ten seconds",
    "router/ingress/places.py _Places.keys": DELETES,
    "router/ingress/app.py _SimpleRoutes.metrics": "the administrator's",
    "router/ingress/app.py _SimpleRoutes.openapi": "made once",
    "router/ingress/app.py build_api.lifespan": END,
    "router/prompt/prompt.py PromptBuilder.forget": DELETES,
    "replicas/templates/rendering.py _Watchdog._wake": OWN,
    "cluster/doctor/check.py run_check": COMMAND,
    "cluster/launch/up.py run_shown": COMMAND,
    "cluster/plan/runs.py run_all": COMMAND,
    "cluster/serve/autoscale.py OneIngressPerNode.__call__": OWN,
    "cluster/serve/s3_demo.py S3Demo.start": COMMAND,
}


def makers(source: str) -> Iterator[str]:
    """Yield the qualified name of each function that makes a thread, queue, pool or process."""

    def walk(node: ast.AST, scope: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                inner = (*scope, child.name)
            if isinstance(child, ast.Call):
                made: ast.expr = child.func
                while isinstance(made, ast.Subscript):
                    made = made.value
                name = made.attr if isinstance(made, ast.Attribute) else getattr(made, "id", "")
                if name in MAKERS:
                    yield ".".join(scope)
            yield from walk(child, inner)

    yield from walk(ast.parse(source), ())


def test_each_executor_is_one_with_turns_of_tenants_or_has_a_reason() -> None:
    found = {
        f"{path.relative_to(ROOT)} {scope}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for scope in makers(path.read_text())
    }
    found.remove(THE_TYPE)
    new, gone = sorted(found - REASONS.keys()), sorted(REASONS.keys() - found)
    assert not new, "use replicas.turns.TenantThreads, or say why no tenant makes it long"
    assert not gone, "there is no such executor any more"


def test_an_executor_is_seen_however_it_is_written() -> None:
    source = """
class Ingress:
    def __init__(self):
        self.a = asyncio.Queue[int]()
    async def ask(self):
        await asyncio.get_running_loop().run_in_executor(None, work)
def start():
    Thread(target=work).start()
"""
    assert list(makers(source)) == ["Ingress.__init__", "Ingress.ask", "start"]
