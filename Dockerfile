# For GPUs, by the script and the lock that a machine of its own uses:
#   docker build --tag megatron-eqlen .
#   docker run --gpus all --ipc host --volume "$PWD/runs:/opt/megatron_eqlen/runs" megatron-eqlen train RECIPE
# On SLURM: docs/cluster.md. Its user is 1001, who must be allowed to write in runs/.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1001 eqlen && install --directory --owner eqlen /opt/megatron_eqlen
USER eqlen
WORKDIR /opt/megatron_eqlen

# The packages are a layer of their own, which a change of code leaves as it is.
COPY --chown=eqlen setup.py pyproject.toml uv.lock README.md LICENSE ./
COPY --chown=eqlen tools/setup tools/
COPY --chown=eqlen megatron_eqlen/__init__.py megatron_eqlen/
RUN PIP_NO_CACHE_DIR=1 tools/setup gpu --no-driver

COPY --chown=eqlen . .
RUN .venv/bin/python -m compileall -q megatron_eqlen
ENV PATH=/opt/megatron_eqlen/.venv/bin:$PATH
ENTRYPOINT ["eqlen"]
CMD ["--help"]
