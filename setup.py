"""Install each top-level folder as a part of kernel_muster; everything else stands in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py


class BuildAnew(build_py):
    """Build into an empty folder: pip leaves build/ behind, and a file deleted since would be in the next wheel."""

    def run(self) -> None:
        """Remove what an earlier build left, then build."""
        shutil.rmtree(Path(self.build_lib) / "kernel_muster", ignore_errors=True)
        super().run()


FOLDERS = ("registry", "plugins", "models", "MODEL_toml", "audit")
packages = find_packages(include=[pattern for folder in FOLDERS for pattern in (folder, f"{folder}.*")])
face = [f"kernel_muster.{name}" for name in find_packages("muster")]
setup(
    packages=["kernel_muster", *face, *(f"kernel_muster.{name}" for name in packages)],
    package_dir={"kernel_muster": "muster", **{f"kernel_muster.{folder}": folder for folder in FOLDERS}},
    cmdclass={"build_py": BuildAnew},
)
