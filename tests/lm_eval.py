"""`make test-lm-eval`: lm-eval itself scores the service four times and must find the same each time.

Two tiny local tasks, multiple choice and generated answers, through its `local-completions` and the service's
own tokenizer: without tiers, with them cold and warm, and after a restart over the same files. Scores must be
equal, and in exact mode (G14) every log-probability and text as well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.support.services.service import MODEL
from tests.support.services.tier_service import TierService, tier_service

RUN_S_MAX = 1200.0
QUESTIONS = 12
SHOTS = 24
"""Examples before each question, in an order of its own: some 400 tokens, which are worth loading."""
CAPITALS = {
    **{"France": "Paris", "Italy": "Rome", "Japan": "Tokyo"},
    **{"Spain": "Madrid", "Germany": "Berlin", "Austria": "Vienna", "Greece": "Athens", "Egypt": "Cairo"},
    **{"Cuba": "Havana", "Russia": "Moscow", "Poland": "Warsaw", "Norway": "Oslo", "Peru": "Lima"},
    **{"Ireland": "Dublin", "Portugal": "Lisbon"},
}
TASKS = {
    "capitals_choice": """
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc}]
""",
    "capitals_text": """
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{choices[right]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match}]
""",
}


def _question(land: str) -> str:
    return f"Question: Which city is the capital of {land}?\nAnswer:"


def write_tasks(folder: Path) -> None:
    """Write the tasks as lm-eval reads them, and their data."""
    rng = random.Random(1)
    names = list(CAPITALS.values())
    docs = []
    for land, city in list(CAPITALS.items())[-QUESTIONS:]:
        choices = [city, *rng.sample([name for name in names if name != city], 3)]
        rng.shuffle(choices)
        others = [pair for pair in CAPITALS.items() if pair[0] != land]
        shots = "".join(f"{_question(other)} {its}\n" for other, its in rng.choices(others, k=SHOTS))
        asked = shots + _question(land)
        docs.append({"prompt": asked, "choices": choices, "right": choices.index(city)})
    data = folder / "capitals.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{source}{text}")


def run(command: Path, tasks: Path, service: TierService, out: Path) -> dict[str, Any]:
    """Run lm-eval once; return scores and answers by task."""
    url = f"{service.url}/v1/completions"
    args = [
        *("run", "--model", "local-completions", "--include_path", str(tasks), "--output_path", str(out)),
        *("--tasks", *TASKS, "--log_samples", "--model_args"),
        f"model={MODEL},base_url={url},tokenizer_backend=remote,num_concurrent=2,max_retries=1",
    ]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tasks / "hub")}
    ended = subprocess.run(
        [str(command), *args], env=env, text=True, capture_output=True, timeout=RUN_S_MAX, check=False
    )
    if ended.returncode:
        raise SystemExit(f"lm-eval failed:\n{ended.stdout[-2000:]}{ended.stderr[-4000:]}")
    (results,) = out.glob("**/results_*.json")
    scores = json.loads(results.read_text())["results"]
    return {
        name: {
            "score": next(
                value for key, value in scores[name].items() if key in ("acc,none", "exact_match,none")
            ),
            "answers": [
                (doc["doc_id"], doc["resps"])
                for path in out.glob(f"**/samples_{name}_*.jsonl")
                for doc in sorted(map(json.loads, path.open()), key=lambda doc: int(doc["doc_id"]))
            ],
        }
        for name in TASKS
    }


def runs(command: Path, folder: Path) -> Iterator[tuple[str, dict[str, Any], dict[str, int], bool]]:
    """Yield of each run its name, findings, prompt tokens by source, and whether the service was exact."""
    write_tasks(folder)

    def one(name: str, service: TierService) -> tuple[str, dict[str, Any], dict[str, int], bool]:
        before = dict(service.replica()["tokens_by_source"])
        found = run(command, folder, service, folder / name.replace(" ", "-"))
        if service.stats()["nodes"]:
            service.settle()
        after = service.replica()["tokens_by_source"]
        sources = {source: count - before.get(source, 0) for source, count in after.items()}
        return name, found, sources, service.says_exact()

    with tier_service(folder / "off", {"tiers.enabled": "false"}) as service:
        yield one("without tiers", service)
    with tier_service(folder / "on") as service:
        yield one("cold", service)
        yield one("warm", service)
    with tier_service(folder / "on") as service:
        yield one("after a restart", service)


def main(argv: list[str]) -> int:
    """Print the table; return 1 if two runs found something else."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", type=Path, help="lm-eval's")
    args = parser.parse_args(argv)
    table = Table("run", *TASKS, "answers as without tiers", "prompt tokens by source")
    first: dict[str, Any] | None = None
    is_same = True
    with tempfile.TemporaryDirectory() as folder:
        for name, found, sources, is_exact in runs(args.command, Path(folder)):
            assert all(len(part["answers"]) == QUESTIONS for part in found.values()), "questions are missing"
            first = first or found
            scores = {task: part["score"] for task, part in found.items()}
            same_scores = scores == {task: part["score"] for task, part in first.items()}
            same_answers = found == first
            is_same &= same_answers if is_exact else same_scores
            shown = ", ".join(f"{source} {count}" for source, count in sources.items() if count)
            table.add_row(
                name, *(f"{score:.3f}" for score in scores.values()), "yes" if same_answers else "NO", shown
            )
            if name == "after a restart" and not sources.get("nvme"):
                raise SystemExit(f"nothing came from disk after the restart: {shown}")
    Console().print(table)
    return 0 if is_same else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
