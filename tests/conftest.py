"""What all tests share: helper modules beside this file can be imported, and one S3 gateway serves a session."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from servers import JuiceFSGateway
from store_proxy import StoreProxy


def pytest_configure() -> None:
    """SIGTERM, as from `timeout` or a cancelled job, ends the tests as Ctrl-C does: fixtures stop what they started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def juicefs_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JuiceFSGateway]:
    """A running gateway with one bucket for the whole session: use a prefix of your own, do not stop it."""
    with JuiceFSGateway(tmp_path_factory.mktemp("juicefs")) as gateway:
        yield gateway


@pytest.fixture
def proxy(juicefs_gateway: JuiceFSGateway) -> Iterator[StoreProxy]:
    """Between a test and that gateway: it counts, and does nothing to what passes."""
    with StoreProxy(juicefs_gateway.port) as running:
        yield running
