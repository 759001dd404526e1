"""Proposers that are not trained heads: what the decoder is compared with."""
