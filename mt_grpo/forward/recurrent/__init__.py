"""Linear attention, state spaces and short convolutions over packed trees."""
