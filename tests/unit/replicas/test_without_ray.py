"""An engine and its tiers where Ray and the packages of other parts are not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.house import ROOT

RUN = """
import importlib.abc, sys
from pathlib import Path

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "boto3", "botocore", "gguf", "fastapi", "nixl"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocked())

import samovar.replicas.start.build, samovar.replicas.engine, samovar.replicas.offload
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import receipt_of, tiered

engine = tiered(Path(sys.argv[1]), Path(sys.argv[2]), threads=1)
prompt = prompt_of(60)
answer = engine.run(prompt)
engine.forget_pool()
again = engine.run([*prompt, *answer.ids, *prompt_of(9, seed=1)])
print(receipt_of(again).decision, receipt_of(again).tokens["cpu"])
"""


def test_a_start_and_offload_run_without_ray_boto3_gguf_fastapi_and_nixl(
    tiny_llama: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", RUN, str(tiny_llama), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["load", "67"]
