"""Words that server and clients share; a client imports them without the rest of the package."""

from __future__ import annotations

from typing import Final

UNIT_ID: Final = "unit_id"  # who a client is, in its answers as in tables
ACTION: Final = "fedipw"  # of the query that asks a client who it is and how it does
RECORD: Final = "fedipw"  # of question and answer
SERVER_ROUND: Final = "server-round"
COLUMNS: Final = "columns"  # what is asked
DECLINED_CODE: Final = 1000  # and beyond: error codes that are free for an app to use
