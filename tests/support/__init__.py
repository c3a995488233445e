"""What tests and benchmarks share: servers, ranks, tiny models."""
