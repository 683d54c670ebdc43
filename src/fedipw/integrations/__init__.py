"""Engines that train on more than one machine, led by the weights of this package."""
