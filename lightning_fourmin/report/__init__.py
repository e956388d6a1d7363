"""The pages of a run and of a sweep, drawn from what a run has written into its folder."""
