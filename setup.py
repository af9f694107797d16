"""Adds to pyproject.toml what it cannot say: folders of the repository that are packages of other names once they are installed."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

# Tools find the package and the entry one folder up, in a checkout and installed.
FOLDERS = {
    "megatron_zpp_tools": "tools",
    **{f"megatron_zpp_tools.{package}": f"tools/{package}" for package in find_packages("tools")},
    "megatron_zpp.csrc": "csrc",
}


class BuildAnew(build_py):
    """Copies the packages into an empty folder: build/ may hold files that the checkout has no longer."""

    def run(self) -> None:
        built = Path(self.build_lib).resolve()
        if built.is_relative_to(Path.cwd() / "build"):  # a folder that the user names may hold other files
            for folder in {package.split(".")[0] for package in self.packages or ()}:
                shutil.rmtree(built / folder, ignore_errors=True)
        super().run()


setup(
    cmdclass={"build_py": BuildAnew},
    packages=[*find_packages(include=["megatron_zpp*"]), *FOLDERS],
    package_dir=FOLDERS,
    package_data={"megatron_zpp": ["py.typed"], "megatron_zpp.csrc": ["**/*.cpp", "**/*.cu", "**/*.h", "*.txt"]},
)
