"""What proposes: draft heads, the target they sit on, their losses, vocabulary, checkpoints and exports."""
