"""Run commands on each checkpoint of a run, once, as soon as it is complete."""
