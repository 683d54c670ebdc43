"""One number per reply: methods as five choices, the weigher, and its two drivers."""
