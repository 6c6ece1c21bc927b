"""`python -m samovar.replicas.native`: compiles the native step and checksums before the first start."""

import torch

from samovar.cache_tiers.blocks import SumsSetup, compile_sums
from samovar.configs.compiled import NUMBERS, PAIR_FLAGS
from samovar.configs.settings import Settings
from samovar.replicas.native.build import build_library, pair_variant_here, variant_here
from samovar.replicas.native.native_step import NotNative


def main() -> None:
    kinds = [(NUMBERS[name], getattr(torch, name), variant_here, ()) for name in NUMBERS]
    for name, dtype, choose, flags in [
        *kinds,
        ("bf16 in pairs", torch.bfloat16, pair_variant_here, PAIR_FLAGS),
    ]:
        settings = Settings()
        try:
            variant, wait_s = choose(), settings.engine.native_build_s_max
            library = build_library(settings.native_dir, variant, dtype, wait_s=wait_s, more_flags=flags)
        except NotNative as why:
            print(f"the native step for {name} is not compiled, another serves instead: {why}")
            continue
        print(f"the native step for {variant.name}, {name}: {library}")
    if (sums := compile_sums(SumsSetup.of(Settings()))) is not None:
        print(f"the checksums of blocks: {sums}")


if __name__ == "__main__":
    main()
