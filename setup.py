"""Install each top-level folder as a part of kernel_muster; everything else stands in pyproject.toml."""

from setuptools import find_packages, setup

FOLDERS = ("registry", "plugins", "models", "MODEL_toml", "audit")
packages = find_packages(include=[pattern for folder in FOLDERS for pattern in (folder, f"{folder}.*")])
face = [f"kernel_muster.{name}" for name in find_packages("muster")]
setup(
    packages=["kernel_muster", *face, *(f"kernel_muster.{name}" for name in packages)],
    package_dir={"kernel_muster": "muster", **{f"kernel_muster.{folder}": folder for folder in FOLDERS}},
)
