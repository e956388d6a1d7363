"""Finds out by measuring how gradients travel fastest on a cluster, and whether fourmin helps a net there."""
