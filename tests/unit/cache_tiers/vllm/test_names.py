"""What names KV: adapters by their files, layouts of all ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from samovar.cache_tiers.vllm.messages import PageLayout
from samovar.cache_tiers.vllm.names.chain import check_media, extra_digests
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


def asked(*images: str, adapter: str = "", **fields: Any) -> Any:
    """A request of vLLM's with an image in each of its blocks."""
    media = [SimpleNamespace(modality="image", identifier=one) for one in images]
    lora = SimpleNamespace(lora_name=adapter) if adapter else None
    return SimpleNamespace(**{"mm_features": media, "lora_request": lora, "cache_salt": None} | fields)


def keys_of(request: Any, start: int, end: int, image: int) -> tuple[Any, int]:
    """vLLM's `generate_block_hash_extra_keys`, with one image in a block and no salt."""
    some = request.mm_features[image : image + 1]
    return tuple((one.identifier, end - start) for one in some), image + 1


def digests_of(request: Any) -> list[bytes]:
    return extra_digests(request, (), keys_of, 16, 40)


@pytest.mark.parametrize("digits", ["ab" * 32, "0f" * 64])
def test_an_image_is_named_by_a_digest(digits: str) -> None:
    check_media(asked(digits, digits))
    check_media(asked(f"one:name:{digits}", adapter="one:name"))
    cat, dog = digits, digits[::-1]
    assert digests_of(asked(cat, dog)) != digests_of(asked(dog, cat))
    assert len(digests_of(asked(cat))) == 1


@pytest.mark.parametrize(
    "name",
    [
        *("renderer0-mm-1-image-0", "cat.png", "", "ab" * 16, "ab" * 48, "g" * 64, "AB" * 32),
        *("lora:" + "ab" * 32, "ab" * 32 + "\n", "6ba7b810-9dad-11d1-80b4-00c04fd430c8"),
    ],
)
def test_an_image_that_its_client_or_a_counter_has_named_has_no_name(name: str) -> None:
    """Another one has this name after a restart: what is stored of this one would be loaded for it."""
    for request in (
        asked("ab" * 32, name),
        asked(name, adapter="other"),
        asked(f"one:{name}", adapter="one"),
    ):
        with pytest.raises(ValueError, match=r"image .* is not named by its content"):
            digests_of(request)


def test_a_request_cannot_say_another_salt() -> None:
    said = {"samovar": {"key": 1, "tenant": "00" * 16, "session": "00" * 16, "salt": "", "placement": None}}
    digests = [
        digests_of(asked(cache_salt=salt, kv_transfer_params=params))
        for salt, params in (("a", None), ("b", None), ("a", said), (None, None))
    ]
    assert digests[0] == digests[2]
    assert len({*map(tuple, digests)}) == 3
    assert digests[3] == []


def test_a_namespace_has_the_pages_of_all_ranks() -> None:
    def name(*layouts: PageLayout) -> bytes:
        return namespace_of(
            weights=b"w" * 32, vllm="0.32.0", config="{}", block_tokens=16, layouts=list(layouts)
        )

    one, other = PageLayout(("layer 0",), 512), PageLayout(("layer 1",), 512)
    names = [name(one), name(other), name(one, one), name(one, other), name(other, one), name(one, one, one)]
    assert len(set(names)) == len(names)
