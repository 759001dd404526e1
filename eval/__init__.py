"""What a head is worth: verification, the one decoder, acceptance, speed. Never imports training or Hydra."""
