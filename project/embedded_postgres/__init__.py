"""A real PostgreSQL for a checkout without a database server: started on demand, shared, stopped after the last user.

Every process that calls `ensure_running` is a *user* of the server until it ends. Nothing is counted in a file that a
crash could leave wrong; each fact is a lock that the kernel drops with the process that held it:

    users.lock     shared by every user; free means that the server has no user
    keeper.lock    held by the *keeper*, a small background process that starts the server, restarts it when it was
                   killed, and stops it when users.lock has been free for a moment
    server.lock    inherited by the postmaster and so by each of its backends; free means that none of them is left,
                   which is the only safe moment to start another one on the same files

So any process may be killed at any moment: without a keeper the next user starts one, and the new keeper takes over a
server that still runs. The server listens on a Unix socket in a directory that only its owner may enter.
"""

from project.embedded_postgres.binaries import find_binaries
from project.embedded_postgres.clients import ensure_running
from project.embedded_postgres.data_directory import EmbeddedServer
from project.embedded_postgres.errors import EmbeddedPostgresError

__all__ = ["EmbeddedPostgresError", "EmbeddedServer", "ensure_running", "find_binaries"]
