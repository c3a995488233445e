"""What people bring, one file per origin."""
