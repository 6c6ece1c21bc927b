"""With SAMOVAR_WHEEL_LIBRARIES=1 a wheel has our C++ compiled, for the machine that builds it.

Its libraries are loaded by their names, so any Python 3 can use them: one wheel for each kind of machine
(`pyproject.toml`, cibuildwheel). Without the variable there is one wheel for all, which compiles them where
it serves.
"""

import os
import platform
import sys
from pathlib import Path

from setuptools import setup
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


class WheelOfMachine(bdist_wheel):
    """A wheel for this kind of machine, and any Python 3."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


has_libraries = os.environ.get("SAMOVAR_WHEEL_LIBRARIES") == "1"
setup(cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": WheelOfMachine} if has_libraries else {})
