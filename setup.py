"""Entry point of setuptools; pyproject.toml has the metadata."""

from setuptools import setup

setup()
