import pytest

from tests.hosts.cluster import Cluster
from tests.hosts.network import skip_without_hosts


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Two hosts with two ranks each, once for all tests, since launchers take seconds to start."""
    skip_without_hosts()
    cluster = Cluster(tmp_path_factory.mktemp("hosts"))
    yield cluster
    cluster.close()


@pytest.fixture
def network(cluster):
    """The cables of `cluster`, as they were afterwards."""
    yield cluster.network
    cluster.network.plug(up=True)
    cluster.network.disturb()
