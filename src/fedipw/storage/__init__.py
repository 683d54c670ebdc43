"""Files that are whole or not there: checkpoints."""

from fedipw.storage.checkpoint import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
