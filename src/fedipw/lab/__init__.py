"""The lab: populations with known truth, training in process, theory, studies."""

from fedipw.lab.arrayclients import ArrayClients
from fedipw.lab.clients import ClientData
from fedipw.lab.testbed import PopulationDraw, PopulationModel, Testbed

__all__ = ["ArrayClients", "ClientData", "PopulationDraw", "PopulationModel", "Testbed"]
