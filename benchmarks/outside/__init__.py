"""Published results of others, and ours in the same settings."""
