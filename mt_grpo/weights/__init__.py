"""Sends the trainer's weights to the servers that sample with them."""
