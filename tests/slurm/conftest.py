"""One SLURM for all tests of a worker."""

import pytest

from tests.slurm.bed import Bed, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    if reason := missing():
        pytest.skip(reason)
    with Bed(tmp_path_factory.mktemp("slurm") / "bed", nodes=3, cpus=8) as bed:
        yield bed


@pytest.fixture
def bed(cluster):
    """Return the bed with all nodes up, connected and idle; end the jobs that a failed test leaves."""
    cluster.wait(lambda: set(cluster.node_states().values()) == {"idle"}, "nodes are idle before the test")
    yield cluster
    cluster.run("scancel", "--full", "--user=root")
