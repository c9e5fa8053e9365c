"""Django's PostgreSQL backend, on a server that is started when the first connection is opened.

Importing the settings, `--help`, or a type checker therefore start nothing. Everything else is Django's own backend:
`vendor` stays "postgresql".
"""

from collections.abc import Iterable
from typing import Any

from django.db.backends.postgresql import base, client
from django.db.utils import OperationalError

from project import embedded_postgres


class DatabaseClient(client.DatabaseClient):
    def runshell(self, parameters: Iterable[str]) -> None:
        self.connection.get_connection_params()  # starts the server and fills in its address
        self.executable_name = str(embedded_postgres.find_binaries() / "psql")
        super().runshell(parameters)


class DatabaseWrapper(base.DatabaseWrapper):
    client_class = DatabaseClient

    def get_connection_params(self) -> dict[str, Any]:
        try:
            server = embedded_postgres.ensure_running()
        except embedded_postgres.EmbeddedPostgresError as error:
            # As from any other server that cannot be reached, so that callers need to know one class only.
            raise OperationalError(str(error)) from error
        self.settings_dict.update(HOST=str(server.socket_directory), USER=server.user, PORT="", PASSWORD="")
        return super().get_connection_params()
