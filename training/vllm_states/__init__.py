"""What runs in the server's environment, with nothing of ours: this folder alone is on its path."""
