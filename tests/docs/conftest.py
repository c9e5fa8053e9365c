"""The real workers and the private server of the crash suite, for what the pages say about running them."""

from tests.crash.conftest import scene, server

__all__ = ["scene", "server"]
