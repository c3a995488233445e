"""What a trainer says and leaves of its batches and steps: metrics, records, warnings, a table, and the console."""
