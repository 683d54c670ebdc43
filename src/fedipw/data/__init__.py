"""Populations, client data, selection mechanisms and the synthetic testbed."""

from fedipw.data.arrayclients import ArrayClients
from fedipw.data.clients import ClientData
from fedipw.data.design import Design, Missing, bound_design
from fedipw.data.ledger import Ledger
from fedipw.data.members import Members
from fedipw.data.partitions import Block, Blocks, Partitions, sum_over
from fedipw.data.population import Population
from fedipw.data.tablefile import TableFile
from fedipw.data.tables import read_table, write_table
from fedipw.data.targets import Targets
from fedipw.data.testbed import PopulationDraw, PopulationModel, Testbed

__all__ = [
    "ArrayClients",
    "Block",
    "Blocks",
    "ClientData",
    "Design",
    "Ledger",
    "Members",
    "Missing",
    "Partitions",
    "Population",
    "PopulationDraw",
    "PopulationModel",
    "TableFile",
    "Targets",
    "Testbed",
    "bound_design",
    "read_table",
    "sum_over",
    "write_table",
]
