"""The layouts that servers load: one file per server, there and back."""
