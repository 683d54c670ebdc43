"""What is done with updates: memory of the clients' latest. Only this room reads them."""

from fedipw.combining.memory import (
    ControlVariates,
    LatestUpdates,
    Memory,
    MemorySum,
    MemoryWeights,
    UpdateMemory,
)

__all__ = [
    "ControlVariates", "LatestUpdates", "Memory", "MemorySum", "MemoryWeights", "UpdateMemory",
]  # fmt: skip
