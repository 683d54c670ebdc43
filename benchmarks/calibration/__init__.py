"""Seconds and memory of weight calibration beside Python and R peers and one weighted Gram pass."""
