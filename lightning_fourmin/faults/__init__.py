"""What keeps a run from failing in silence: missing ranks are named, checkpoints are whole, restarts meet again."""
