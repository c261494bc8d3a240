"""Measuring: statistics, timers, the machine's ceilings, and the runs made of them."""
