"""A small real model across a local two-rank cluster, checked against the same model in one piece."""
