"""The composition root: one file per command. The only place that sees Hydra, and joins training to eval."""
