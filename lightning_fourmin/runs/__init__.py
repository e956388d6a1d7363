"""What a run leaves in its folder, and how another run goes on from it."""
