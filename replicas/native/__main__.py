"""`python -m replicas.native`: compiles the native step beforehand, so that no start waits for it."""

from configs.settings import Settings
from replicas.native.build import NUMBERS, build_library, variant_here
from replicas.native.native_step import NotNative


def main() -> None:
    settings = Settings()
    for dtype, number in NUMBERS.items():
        try:
            variant = variant_here()
            wait_s = settings.engine.native_build_s_max
            library = build_library(settings.native_dir, variant, dtype, wait_s=wait_s)
        except NotNative as why:
            print(f"the native step is not compiled, another serves instead: {why}")
            return
        print(f"the native step for {variant.name}, {number}: {library}")


if __name__ == "__main__":
    main()
