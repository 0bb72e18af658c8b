"""Experiments as data: what is trained, what is compared with what, and the words that its numbers allow."""
