"""Two checkouts compared by the command line alone: numbers, speed and memory."""
