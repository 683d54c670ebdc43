"""A population of 20 million and ledgers of up to 100 million rows: commands, cluster, peers."""
