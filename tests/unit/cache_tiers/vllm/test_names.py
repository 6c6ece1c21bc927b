"""What names KV: adapters by their files, layouts of all ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from samovar.cache_tiers.vllm.messages import PageLayout
from samovar.cache_tiers.vllm.names.identity import Adapters, namespace_of


def adapter(folder: Path, name: str, weights: bytes, *, scale: int = 16, number: int = 1) -> Any:
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "adapter_model.safetensors").write_bytes(weights)
    (path / "adapter_config.json").write_text(f'{{"lora_alpha": {scale}}}')
    return SimpleNamespace(lora_name="one name", lora_path=str(path), lora_int_id=number)


@pytest.fixture
def adapters(tmp_path: Path) -> Adapters:
    return Adapters(tmp_path / "known.json")


def test_adapters_of_one_name_are_told_by_their_files(tmp_path: Path, adapters: Adapters) -> None:
    names = [adapters.name(adapter(tmp_path, one, one.encode())) for one in ("a", "b")]
    assert names[0] != names[1]
    assert adapters.name(adapter(tmp_path, "c", b"a", number=2)) == names[0]  # the same files elsewhere
    assert adapters.name(None) == ()


def test_an_adapter_is_named_by_its_scale_too(tmp_path: Path, adapters: Adapters) -> None:
    one, other = (adapter(tmp_path, name, b"w", scale=at) for at, name in ((16, "a"), (32, "b")))
    assert adapters.name(one) != adapters.name(other)


def test_an_adapter_whose_files_change_names_nothing(tmp_path: Path, adapters: Adapters) -> None:
    """vLLM has read the ones from before, or has not: who knows."""
    name = adapters.name(adapter(tmp_path, "a", b"old"))
    changed = adapter(tmp_path, "a", b"new, and longer")
    with pytest.raises(ValueError, match="have changed"):
        adapters.name(changed)
    again = adapter(tmp_path, "a", b"new, and longer", number=2)  # loaded again: vLLM counts on
    assert adapters.name(again) not in ((), name)


@pytest.mark.parametrize("path", ["org/hub-name", "/does/not/exist"])
def test_an_adapter_that_is_not_here_names_nothing(adapters: Adapters, path: str) -> None:
    with pytest.raises(ValueError, match="no local directory"):
        adapters.name(SimpleNamespace(lora_name="n", lora_path=path, lora_int_id=1))


def test_a_namespace_has_the_pages_of_all_ranks() -> None:
    def name(*layouts: PageLayout) -> bytes:
        return namespace_of(
            weights=b"w" * 32, vllm="0.32.0", config="{}", block_tokens=16, layouts=list(layouts)
        )

    one, other = PageLayout(("layer 0",), 512), PageLayout(("layer 1",), 512)
    names = [name(one), name(other), name(one, one), name(one, other), name(other, one), name(one, one, one)]
    assert len(set(names)) == len(names)
