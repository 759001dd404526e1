"""The Hydra configuration tree; a package so that pkg://conf finds it. Holds YAML and no code."""
