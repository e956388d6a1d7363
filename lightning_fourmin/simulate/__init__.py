"""Predicts a training step on a cluster that is not at hand: layer profile, link costs, simulated step."""
