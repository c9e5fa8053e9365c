"""The tests mirror the packages. `make test` runs them in several processes: each has a database server of its own,
since what one server says of its transactions (how far a journal may be read, say) holds for all databases on it."""

import os
from pathlib import Path

from project.paths import CHECKOUT

if (_worker := os.environ.get("PYTEST_XDIST_WORKER")) and "DATA_DIR" not in os.environ:
    # Inherited by every process that a test starts.
    _place = Path(os.environ.get("QUEUEAPP_TEST_SERVERS") or CHECKOUT / ".data", _worker)
    os.environ["DATA_DIR"] = os.environ["EXPENDABLE_DATA_DIR"] = str(_place)
