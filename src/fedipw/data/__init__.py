"""Populations, client data, selection mechanisms and the synthetic testbed."""

from fedipw.data.clients import ClientData
from fedipw.data.population import Population
from fedipw.data.testbed import Testbed, TestbedDraw

__all__ = ["ClientData", "Population", "Testbed", "TestbedDraw"]
