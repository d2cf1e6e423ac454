"""What the bench command and the programs in `benchmarks/` share, and the command itself."""
