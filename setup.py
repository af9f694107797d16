"""Adds to pyproject.toml what it cannot say: folders of the repository that are packages of other names once they are installed."""

from setuptools import find_packages, setup

# Tools find the package and the entry one folder up, in a checkout and installed.
FOLDERS = {"megatron_zpp_tools": "tools", "megatron_zpp.csrc": "csrc"}

setup(
    packages=[*find_packages(include=["megatron_zpp*"]), *FOLDERS],
    package_dir=FOLDERS,
    package_data={"megatron_zpp.csrc": ["**/*.cpp", "**/*.cu", "**/*.h", "*.txt"]},
)
