"""Studies of selection as it was observed, on tables that are not part of the project."""
