"""The first layers of a model: matrices of the same shapes, at a fraction of the time."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def cut_model(model_dir: Path, target: Path, layers: int) -> Path:
    """Write the model in `model_dir` without its layers from `layers` on; return `target`.

    For laws about how a layer is computed, which depends on its shapes: libraries choose kernels by them.
    """
    shutil.copytree(model_dir, target, ignore=shutil.ignore_patterns(WEIGHTS, CONFIG))
    config = json.loads((model_dir / CONFIG).read_text())
    (target / CONFIG).write_text(json.dumps(config | {"num_hidden_layers": layers}))
    weights = load_file(model_dir / WEIGHTS)
    kept = {
        name: tensor
        for name, tensor in weights.items()
        if (layer := _LAYER.match(name)) is None or int(layer[1]) < layers
    }
    assert len(kept) < len(weights), "nothing is cut: the model has no more layers than that"
    save_file(kept, target / WEIGHTS, metadata={"format": "pt"})
    return target
