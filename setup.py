"""With SAMOVAR_WHEEL_LIBRARIES=1 a wheel has our C++ compiled, for the machine that builds it.

Its libraries are loaded by their names, so any Python 3 can use them: one wheel for each kind of machine
(`pyproject.toml`, cibuildwheel). Without the variable there is one wheel for all, which compiles them where
it serves.
"""

import os
import platform
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

WAIT_S = 600.0


class BuildWithLibraries(build_py):
    """Compiles what a start may choose, beside the modules."""

    def run(self) -> None:
        super().run()
        sys.path.insert(0, str(Path(__file__).resolve().parent))
        from samovar.configs.compiled import compiled_library, shipped_sources

        shipped = Path(self.build_lib).resolve() / "samovar" / "configs" / "shipped"
        for source in shipped_sources(platform.machine()):
            print(f"compiled: {compiled_library(source, shipped, wait_s=WAIT_S).name}")


class WithLibraries(Distribution):
    """What is installed where libraries of one kind of machine are."""

    def has_ext_modules(self) -> bool:
        return True


class WheelOfMachine(bdist_wheel):
    """A wheel for this kind of machine, and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if os.environ.get("SAMOVAR_WHEEL_LIBRARIES") == "1":
    setup(distclass=WithLibraries, cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": WheelOfMachine})
else:
    setup()
