"""Populations, client data, selection mechanisms and the synthetic testbed."""

from fedipw.data.clients import ClientData
from fedipw.data.ledger import Ledger
from fedipw.data.population import Population
from fedipw.data.tables import read_table, write_table
from fedipw.data.targets import Targets
from fedipw.data.testbed import Testbed, TestbedDraw

__all__ = [
    "ClientData",
    "Ledger",
    "Population",
    "Targets",
    "Testbed",
    "TestbedDraw",
    "read_table",
    "write_table",
]
