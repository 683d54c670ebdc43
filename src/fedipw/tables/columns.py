"""Names of columns that have a meaning of their own, in tables of clients and in ledgers."""

from __future__ import annotations

from typing import Final

ID: Final = "unit_id"
ENROLLED: Final = "enrolled"
FROM: Final = "enrolled_from"  # first round or moment of enrollment
UNTIL: Final = "enrolled_until"  # the first one no longer
YES, NO = ("true", "1", "yes"), ("false", "0", "no")  # how files write flags, in any case

ROUND, INVITED, REPLIED = "round", "invited", "replied"
AVAILABLE, INVITE_PROB, OPENED_AT = "available", "invite_prob", "opened_at"
ASKED: Final = "asked"  # whether the server's sample of clients to ask has a client
FATE = "fate"  # the outcome of an invitation
AFTERWARDS: Final = (REPLIED, FATE)  # known when a round closes
OWN_COLUMNS: Final = (ROUND, INVITED, REPLIED, AVAILABLE, ASKED, INVITE_PROB, OPENED_AT, FATE)
