"""What is on disk: files that appear whole or not at all, locks, checkpoints, scratch files."""
