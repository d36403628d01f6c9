"""The build's entry; metadata lives in pyproject.toml."""

from setuptools import setup

setup()
