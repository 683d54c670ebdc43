"""Selection correction from sums alone: what clients add up without showing it to the server."""
