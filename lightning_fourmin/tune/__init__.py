"""Real steps of a net, timed: whether fourmin helps it, and with which settings."""
