"""The transports: how weights reach a server."""
