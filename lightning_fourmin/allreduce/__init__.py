"""Gradient communication: who is where, what is fused, which algorithm, and the engine that runs it."""
