"""Tables of clients and rounds: files and frames, formulas and designs, partitions of rows."""

from fedipw.tables.design import Design, Missing, bound_design
from fedipw.tables.ledger import Ledger
from fedipw.tables.partitions import Block, Blocks, Partitions, sum_over
from fedipw.tables.population import Members, Population
from fedipw.tables.table import Table, read_table, write_table
from fedipw.tables.targets import Targets

__all__ = [
    "Block",
    "Blocks",
    "Design",
    "Ledger",
    "Members",
    "Missing",
    "Partitions",
    "Population",
    "Table",
    "Targets",
    "bound_design",
    "read_table",
    "sum_over",
    "write_table",
]
