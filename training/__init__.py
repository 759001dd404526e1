"""How a head learns: traffic, regeneration, feature store, loop, resume. Never imports eval or Hydra."""
