"""Objects between ranks, sealed with the secret of their job: torch, Megatron and vLLM unpickle what a
connection brings, and gloo takes anybody's who connects while a group is made.

    all_gather_object, broadcast_object_list, ...    HMAC-SHA256 of the pickle, then the pickle
"""

from __future__ import annotations

import hmac
import os
import pickle
from typing import IO, Any

from torch.distributed import distributed_c10d

SECRET = "EQLEN_SECRET"
"""Environment variable: the secret, which launchers make and ranks inherit."""
SIZE = 32


class SealError(ConnectionError):
    """A message of somebody who does not have the secret."""


def seal(required: bool = False) -> None:
    """Seal the objects of this process's collectives, if the environment has a secret. Raises ValueError if
    it is ``required`` and missing."""
    if SECRET in os.environ:
        module: Any = distributed_c10d
        module._pickler, module._unpickler = _Sealing, _Opening
    elif required:
        raise ValueError(
            f"{SECRET}: expected a secret in the environment of all nodes' ranks, found none: "
            f"export {SECRET}=..., the same on each, as slurm/train.sbatch does"
        )


def _digest(body: bytes | memoryview) -> bytes:
    return hmac.digest(os.environ[SECRET].encode(), body, "sha256")


class _Sealing:
    """Stands for ``pickle.Pickler``."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def dump(self, item: Any) -> None:
        body = pickle.dumps(item)
        self.file.write(_digest(body) + body)


class _Opening:
    """Stands for ``pickle.Unpickler``. Raises SealError before anything is unpickled."""

    def __init__(self, file: IO[bytes]) -> None:
        self.data = file.read()

    def load(self) -> Any:
        body = memoryview(self.data)[SIZE:]
        if not hmac.compare_digest(self.data[:SIZE], _digest(body)):
            raise SealError("an object of another rank: expected the seal of this job, found another")
        return pickle.loads(body)
